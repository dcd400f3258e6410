"""Planted permutations: how many of a hundred are found again, by which way of matching.

A network is copied, noise is added to the copy, its units are permuted, and every way of matching
is asked for the permutation. Streams that nothing anchors (stem, head and biases are zero) are what
coordinate ascent fails on. Where noise makes another permutation better than the planted one, an
objective at least as large counts as found. The package rebasin is one of the ways where it is
installed (`--ways rebasin best --noise 0.5`); what computes something else afterwards is marked.
"""

import argparse
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.studies.alignment_networks import ConvNet, Transformer
from lightning_bnn.symmetry import (
    Symmetries,
    discover,
    identity,
    match,
    permute,
    random_permutations,
)
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.plan import Plan


class Residual(nn.Module):
    """A stream of one width, and blocks of two linear layers beside it."""

    def __init__(self, hidden: int, stream: int, blocks: int, inputs: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(inputs, stream), nn.Linear(stream, inputs)
        self.first = nn.ModuleList(nn.Linear(stream, hidden) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Linear(hidden, stream) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(x).relu())
        return self.head(x)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    x: tuple[int, ...]
    change: Callable[[P.Params], P.Params] = lambda params: params
    trials: int = 100


def without_ends(params: P.Params) -> P.Params:
    """Nothing tells the units of the stream apart but the blocks."""
    ends = ("stem", "head")
    return {n: t * 0 if n.startswith(ends) or n.endswith("bias") else t for n, t in params.items()}


def centred(params: P.Params) -> P.Params:
    """Rows and columns sum to zero, so that the centre of all permutations tells nothing."""
    return {
        n: t - t.mean(0) - t.mean(1, keepdim=True) + t.mean() if t.ndim == 2 else t
        for n, t in without_ends(params).items()
    }


def cases() -> Iterator[Case]:
    for layers in ([64, 64], [64, 64, 64]):
        ends = (64, 10) if len(layers) == 2 else (2, 1)
        name = "-".join(map(str, [ends[0], *layers, ends[1]]))
        yield Case(f"MLP {name}", lambda a=ends, b=layers: models.mlp(a[0], b, a[1]), (1, ends[0]))
    for blocks in (1, 2, 4):
        yield Case(f"residual (30, 50) x {blocks}", lambda b=blocks: Residual(30, 50, b), (1, 3))
    yield Case("(3, 5) x 2, ends zero", lambda: Residual(3, 5, 2), (1, 3), without_ends)
    for blocks in (1, 2, 4):
        name = f"(30, 50) x {blocks}, ends zero"
        yield Case(name, lambda b=blocks: Residual(30, 50, b), (1, 3), without_ends)
    yield Case("(30, 50) x 2, centred", lambda: Residual(30, 50, 2), (1, 3), centred)
    yield Case("OptuNet", models.optunet, (1, 1, 28, 28))
    yield Case("CNN, BatchNorm", lambda: ConvNet(12), (1, 1, 8, 8))
    yield Case("residual CNN, BatchNorm", lambda: ConvNet(12, 2), (1, 1, 8, 8))
    yield Case("ViT, two layers", lambda: Transformer(32), (1, 1, 8, 8))
    yield Case("GPT, two layers", lambda: Transformer(32, 27), (16,))
    yield Case("ResNet-18", torchvision.models.resnet18, (1, 3, 64, 64), trials=10)


def noisy(params: P.Params, noise: float, generator: torch.Generator) -> P.Params:
    """Noise in units of the deviation of every tensor."""
    return {
        n: t + noise * t.std() * torch.randn(t.shape, generator=generator)
        if t.is_floating_point() and t.numel() > 1 and "running" not in n
        else t
        for n, t in params.items()
    }


def from_the_identity(params: P.Params, reference: P.Params, sym: Symmetries) -> P.Params:
    """Git Re-Basin: groups in random order, from where the network stands."""
    ascent = Ascent(Plan(sym), P.stack([params]), reference)
    generator, start = torch.Generator().manual_seed(0), [p[None] for p in identity(sym)]
    orders = [p[0] for p in ascent.run(start, generator, 100, forward_pass=False)]
    return permute(params, sym, orders)


def matched(**how: Any) -> Callable[[Case, P.Params, P.Params, Symmetries], P.Params]:
    """By `match` with some options."""
    return lambda case, a, b, sym: match(a, b, sym, **how).apply(a, sym)


def by_rebasin(case: Case, params: P.Params, reference: P.Params, sym: Symmetries) -> P.Params:
    """Coordinate descent by the package rebasin, which moves modules."""
    from rebasin import PermutationCoordinateDescent

    mine, other = case.build().eval(), case.build().eval()
    mine.load_state_dict(params)
    other.load_state_dict(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PermutationCoordinateDescent(other, mine, example(case)).rebasin()
    return {n: t.detach() for n, t in P.of(mine).items()}


WAYS: dict[str, Callable[[Case, P.Params, P.Params, Symmetries], P.Params]] = {
    "Git Re-Basin": lambda case, a, b, sym: from_the_identity(a, b, sym),
    "ascent": matched(method="ascent"),
    "restarts=10": matched(method="ascent", restarts=10),
    "frank-wolfe": matched(method="frank-wolfe"),
    "best": matched(),
    "rebasin": by_rebasin,
}


def example(case: Case) -> Tensor:
    """An input; characters where there is one dimension only."""
    return torch.randn(case.x) if len(case.x) > 1 else torch.randint(27, (1, *case.x))


def growth(widths: list[int]) -> None:
    """CPU time for two hidden layers of growing width, with half of the weights' size noise."""
    print(f"{'MLP 64-w-w-10, w =':<20}{'ascent':>12}{'best':>12}   CPU ms, then memory so far")
    for width in widths:
        torch.manual_seed(0)
        model = models.mlp(64, [width, width], 10)
        sym, params = discover(model, torch.randn(1, 64)), P.of(model)
        generator = torch.Generator().manual_seed(1)
        planted = permute(noisy(params, 0.5, generator), sym, random_permutations(sym, generator))
        times = []
        for method in ("ascent", "best"):
            start = time.process_time()
            match(planted, params, sym, method=method)
            times.append(1e3 * (time.process_time() - start))
        memory = f"   {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GB"
        print(f"{width:<20}" + "".join(f"{t:>12.0f}" for t in times) + memory, flush=True)


def row(case: Case, noise: float, trials: int, ways: Sequence[str]) -> dict[str, str]:
    """Per way: how many of a hundred are found, and CPU milliseconds for one of them."""
    found, seconds, changed = ({name: 0.0 for name in ways} for _ in range(3))
    sym = discover(case.build(), example(case))
    plan = Plan(sym)
    for trial in range(trials):
        torch.manual_seed(trial)
        params = case.change({n: t.clone() for n, t in P.of(case.build()).items()})
        generator = torch.Generator().manual_seed(1000 + trial)
        copy = case.change(noisy(params, noise, generator))
        planted = permute(copy, sym, random_permutations(sym, generator))
        goal = float(plan.similarity(copy, params))
        for name in ways:
            start = time.process_time()
            back = WAYS[name](case, planted, params, sym)
            seconds[name] += time.process_time() - start
            found[name] += float(plan.similarity(back, params)) >= goal - 1e-6 * abs(goal)
            changed[name] += changes(case, planted, back)
    return {
        n: f"{100 * found[n] / trials:.0f} ({1e3 * seconds[n] / trials:.1f})"
        + (f" {100 * changed[n] / trials:.0f} changed" if changed[n] else "")
        for n in ways
    }


def changes(case: Case, before: P.Params, after: P.Params) -> bool:
    """Whether a network computes something else than before."""
    model, x = case.build().eval(), example(case)
    old, new = (P.apply(model, network, x) for network in (before, after))
    return bool((old - new).abs().max() > 1e-3 * old.abs().max().clamp_min(1e-6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--noise", type=float, nargs="+", default=[0, 0.2, 0.5])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS)[:-1])
    parser.add_argument("--growth", type=int, nargs="+", help="widths: print times instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.growth:
        growth(options.growth)
    else:
        table(options)


def table(options: argparse.Namespace) -> None:
    """One row per case and noise."""
    width = 22
    print(f"{'found of 100, ms':<28}{'noise':>6}" + "".join(f"{w:>{width}}" for w in options.ways))
    for case in cases():
        if options.only not in case.name:
            continue
        trials = min(options.trials, case.trials)
        for noise in options.noise:
            cells = row(case, noise, trials, options.ways)
            print(
                f"{case.name:<28}{noise:>6.0%}" + "".join(f"{t:>{width}}" for t in cells.values()),
                flush=True,
            )


if __name__ == "__main__":
    main()
