"""What `lightning-bnn diff` says about pairs of networks whose history is known.

Networks are trained on the digits. A copy is permuted, rescaled, mixed, or moved by a random
element of the whole group; or trained on for one or ten epochs, at the full learning rate and in a
new order of the examples, and then moved. Networks of one start have the same initial weights and
other orders of examples, and one of them is moved. Independent ones share nothing but the data.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.commands.diff_report import EXIT_CODES, rounding_of, verdict_of
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.studies.alignment_networks import ConvNet, Transformer, digits
from lightning_bnn.symmetry import (
    Difference,
    Symmetries,
    difference,
    discover,
    fingerprint,
    mix,
    permute,
    random_mixings,
    random_permutations,
    random_scales,
    rescale,
)
from lightning_bnn.symmetry.matching.by_outputs import output_error, random_inputs
from lightning_bnn.symmetry.verify import random_element

ROUNDING = rounding_of([torch.float32])
Move = Callable[[P.Params, Symmetries, torch.Generator], P.Params]


def factored() -> nn.Module:
    """Three layers, the first of which is a product of two matrices."""
    first = nn.Linear(64, 16, bias=False), nn.Linear(16, 32), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *first, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, float]] = {
    "MLP": (lambda: models.mlp(64, [32, 32], 10), 20, 0.005),
    "CNN": (lambda: ConvNet(8), 10, 0.005),
    "residual CNN": (lambda: ConvNet(12, 2), 10, 0.005),
    "factored": (factored, 20, 0.005),
    "ViT": (lambda: Transformer(16), 30, 0.002),
}
"""What builds a network, for how many epochs it is trained, and its learning rate."""

MOVES: dict[str, Move] = {
    "permuted": lambda p, s, g: permute(p, s, random_permutations(s, g)),
    "rescaled": lambda p, s, g: rescale(p, s, random_scales(s, g)),
    "mixed": lambda p, s, g: mix(p, s, random_mixings(s, g)),
    "all of these": lambda p, s, g: random_element(p, s, g, mixing=True),
}


class Population:
    """Networks of one architecture, trained from seeds."""

    def __init__(self, name: str) -> None:
        self.build, self.epochs, self.rate = NETWORKS[name]
        self.inputs, self.labels = digits().train
        self.model = self.build()
        self.sym = discover(self.model.eval(), self.inputs[:2])

    def new(self, starts: Iterable[int], orders: Iterable[int]) -> list[P.Params]:
        """Networks from initial weights and orders of examples."""
        networks = []
        for start in starts:
            torch.manual_seed(start)
            networks.append({n: t.clone() for n, t in P.of(self.build()).items()})
        return self.tuned(networks, orders, self.epochs)

    def tuned(self, networks: list[P.Params], orders: Iterable[int], epochs: int) -> list[P.Params]:
        """Copies that were trained on, all at once, each in an order of its own."""
        stack, model = P.stack(networks), self.model.train()
        trained = {n: stack[n].requires_grad_() for n in P.weight_names(model)}
        rest = {n: t for n, t in stack.items() if n not in trained}
        optimizer = torch.optim.Adam(trained.values(), self.rate)
        generators = [keyed_generator(order, "order") for order in orders]

        def loss(weights: P.Params, buffers: P.Params, x: Tensor, y: Tensor) -> Tensor:
            outputs = torch.func.functional_call(model, {**weights, **buffers}, (x,))
            return nn.functional.cross_entropy(outputs, y)

        for _ in range(epochs):
            rows = [torch.randperm(len(self.inputs), generator=g) for g in generators]
            for k in torch.stack(rows).split(64, 1):
                optimizer.zero_grad()
                torch.vmap(loss)(trained, rest, self.inputs[k], self.labels[k]).sum().backward()
                optimizer.step()
        model.eval()
        return P.unstack({n: t.detach() for n, t in stack.items()})


def pairs(population: Population, numbers: range) -> Iterator[tuple[str, P.Params, P.Params]]:
    """Pairs of every class."""
    sym, own = population.sym, [*numbers]

    def orders(first: int) -> list[int]:
        return [first + k for k in own]

    originals = population.new(own, own)
    copies = {
        "tuned, 1 epoch": population.tuned(originals, orders(1000), 1),
        "tuned, 10 epochs": population.tuned(originals, orders(2000), 10),
        "one start": population.new(own, orders(3000)),
        "independent": population.new(orders(10_000), orders(10_000)),
    }
    for k, b in zip(own, originals, strict=True):
        generator = keyed_generator(k, "element")
        for name, move in MOVES.items():
            if name != "mixed" or sym.linear:
                yield name, move(b, sym, generator), b
        for name, found in copies.items():
            a = found[k - own[0]]
            yield name, random_element(a, sym, generator, mixing=True), b


def row(name: str, seen: list[tuple[Difference, str]]) -> str:
    """How often every verdict was given, and the range of what decides them."""
    counts = Counter(verdict for _, verdict in seen)
    rest, share, z = (
        torch.tensor([getattr(d, what) for d, _ in seen]) for what in ("rest", "share", "z")
    )
    numbers = " | ".join(str(counts[verdict]) for verdict in EXIT_CODES)
    return f"| {name} | {numbers} | {span(rest)} | {span(share)} | {span(z, '.0f')} |"


def span(values: Tensor, form: str = ".2g") -> str:
    return f"{float(values.min()):{form}} to {float(values.max()):{form}}"


def table(name: str, count: int) -> None:
    """The confusion table of one architecture."""
    population, seen = Population(name), dict[str, list[tuple[Difference, str]]]()
    inputs = random_inputs(population.inputs[:2])
    agree, start = Counter[str](), time.process_time()
    for k in range(0, count, 10):
        for kind, a, b in pairs(population, range(k, min(k + 10, count))):
            found = difference(a, b, population.sym)
            verdict = verdict_of(found, output_error(population.model, a, b, inputs), ROUNDING)
            seen.setdefault(kind, []).append((found, verdict))
            codes = (fingerprint(p, population.sym) for p in (a, b))
            agree[kind] += next(codes).agrees(next(codes))
        print(f"\n{name}: {len(seen[kind])} pairs, {time.process_time() - start:.0f} CPU s\n")
        print(f"| | {' | '.join(EXIT_CODES)} | rest | share | z | fingerprints agree |")
        print("|---" * (len(EXIT_CODES) + 5) + "|")
        for name_of_row, rows in seen.items():
            print(f"{row(name_of_row, rows)} {agree[name_of_row]} |", flush=True)


def flips(name: str, elements: int) -> None:
    """How often rounding changes the words of fingerprints along orbits."""
    population, each = Population(name), 20
    changed, worst = Counter[str](), 0.0
    for k in range(elements // each):
        torch.manual_seed(k)
        params = P.of(population.build())
        own = fingerprint(params, population.sym)
        for j in range(each):
            generator = keyed_generator(k, "orbit", j)
            other = fingerprint(
                random_element(params, population.sym, generator, mixing=True), population.sym
            )
            words = zip(own.code.split("-"), other.code.split("-"), strict=True)
            changed[str([x == y for x, y in words].count(False))] += 1
            pairs = zip(own.norms.values(), other.norms.values(), strict=True)
            worst = max(worst, *(abs(x - y) / x for x, y in pairs if x > 0))
    print(
        f"{name}: of {elements} random elements of orbits, {changed['0']} change no word, "
        f"{changed['1']} one, {changed['2']} both; largest relative error of a norm {worst:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--networks", nargs="+", default=["MLP", "CNN", "factored"], choices=NETWORKS
    )
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--elements", type=int, default=1000, help="of orbits, for fingerprints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.networks:
        table(name, args.pairs)
    print()
    for name in args.networks:
        flips(name, args.elements)


if __name__ == "__main__":
    main()
