"""The loss barrier between two transformers, modulo more and more of their symmetries.

LIGHTNING_BNN_DATA=data python benchmarks/transformer_alignment.py --weights FOLDER [--pairs 5]
python benchmarks/transformer_alignment.py --of characters --weights FOLDER [--pairs 5]

trains two networks for every pair (80 or 25 CPU seconds each; kept in the folder): vision
transformers on MNIST, or decoders on the characters of sources of the standard library, which every
installation has. It folds the gains of their norms, brings the second to the first in several ways,
and prints one row for each: the barrier on training and on test examples (2000 images or 200
texts each, 7 points), the accuracy half way, the distance of the weights and the time. Intervals
are Student's for the mean over pairs, at 95 %; with `--ring` as many networks as pairs are trained,
each is in two of these, and intervals are narrower than they should be.
"""

from __future__ import annotations

import _pydecimal
import argparse
import inspect
import statistics
import tarfile
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.datamodules import MNIST
from lightning_bnn.symmetry import (
    FullMatch,
    Symmetries,
    barrier,
    discover,
    fold_norms,
    interpolate,
    learn_match,
    match,
    match_all,
)

RATE, DECAY = 2e-3, 0.1
LENGTH, VOCABULARY = 64, 96
SOURCES = (argparse, inspect, statistics, typing, tarfile, _pydecimal)


class Block(nn.Module):
    """Attention and a GELU layer behind RMSNorms."""

    def __init__(self, d: int, heads: int, hidden: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, h: Tensor) -> Tensor:
        """Add what attention and the layer behind it say."""
        y = self.n1(h)
        q, k, v = (
            m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h = h + self.o(a.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.n2(h))))


class Images(nn.Module):
    """A vision transformer of two layers with sixteen patches of 7 x 7 pixels."""

    def __init__(self, d: int = 64, heads: int = 4, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, d, 7, 7)
        self.place = nn.Parameter(0.02 * torch.randn(16, d))
        self.blocks = nn.Sequential(*(Block(d, heads, hidden) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digit."""
        h = self.embed(x).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(h)).mean(1))


class Characters(nn.Module):
    """A decoder of two layers that predicts the next of 96 characters."""

    def __init__(self, d: int = 64, heads: int = 4, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, d)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, d))
        self.blocks = nn.Sequential(*(Block(d, heads, hidden, True) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character, behind every one: ``(texts, characters, length)``."""
        return self.head(self.norm(self.blocks(self.embed(x) + self.place))).mT


# ------------------------------------------------------------ data
Examples = tuple[Tensor, Tensor]


def images() -> tuple[Examples, Examples]:
    """Training and test images, standardised, with their labels."""
    splits = MNIST(val_size=0, augment=False).load()
    pairs = (
        (x.float().div(255).sub(0.1307).div(0.3081), y) for x, y in (splits.train, splits.test)
    )
    return next(pairs), next(pairs)


def characters() -> tuple[Examples, Examples]:
    """Rows of characters with the ones that follow, to train and, every tenth, to test."""
    text = "".join(inspect.getsource(module) for module in SOURCES)
    codes = torch.tensor([min(max(ord(c) - 31, 0), VOCABULARY - 1) for c in text])
    rows = codes[: (len(codes) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    tests = torch.arange(len(rows)) % 10 == 0
    pairs = ((r[:, :-1], r[:, 1:]) for r in (rows[~tests], rows[tests]))
    return next(pairs), next(pairs)


# ------------------------------------------------------------ training
@dataclass(frozen=True)
class Task:
    """What networks are trained on, and how.

    Attributes:
        network: makes one with random weights.
        examples: of training and test.
        steps: of training.
        batch: examples per step.
        few: as many of every set are judged.
        taught: as many are for matching and learning.
    """

    network: Callable[[], nn.Module]
    examples: Callable[[], tuple[Examples, Examples]]
    steps: int
    batch: int
    few: int
    taught: int


TASKS = {
    "images": Task(Images, images, 2400, 128, 2000, 20000),
    "characters": Task(Characters, characters, 600, 32, 200, 5000),
}


def trained(folder: Path, seed: int, of: str = "images") -> nn.Module:
    """A network from the folder, trained first if it is not there."""
    task = TASKS[of]
    torch.manual_seed(seed)
    model, path = task.network(), folder / f"{of}-{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    x, y = task.examples()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, task.steps, pct_start=0.1)
    for _ in range(task.steps):
        chosen = torch.randint(len(x), (task.batch,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    torch.save(model.state_dict(), path)
    return model.eval()


# ------------------------------------------------------------ ways
@dataclass(frozen=True)
class Pair:
    """Two folded networks, their symmetries, and examples to match and learn by."""

    model: nn.Module
    a: P.Params
    b: P.Params
    sym: Symmetries
    batches: list[tuple[Tensor, Tensor]]

    def without_streams(self) -> Symmetries:
        """The symmetries but for the rotations of the stream."""
        return replace(self.sym, linear=tuple(g for g in self.sym.linear if g.rescales))

    def by_activations(self, swaps: int = 0) -> FullMatch:
        """Everything, by activations of four batches."""
        few = self.batches[:4]
        how = {"model": self.model, "batches": few, "by": "activations", "swaps": swaps}
        return match_all(self.b, self.a, self.sym, **how)

    def learned(self, steps: int) -> P.Params:
        """By activations, then by the loss half way."""
        data = self.sym, self.model, self.batches
        found = learn_match(self.by_activations(), self.b, self.a, *data, steps=steps)
        return found.apply(self.b, self.sym)


def ways(pair: Pair, steps: int) -> dict[str, Callable[[], P.Params]]:
    """What brings the second network to the first; the last ones use images."""
    a, b, sym, less = pair.a, pair.b, pair.sym, pair.without_streams()
    return {
        "nothing": lambda: b,
        "permutations": lambda: match(b, a, sym).apply(b, sym),
        "+ heads": lambda: match_all(b, a, less).apply(b, less),
        "+ stream, by weights": lambda: match_all(b, a, sym).apply(b, sym),
        "+ stream, by activations": lambda: pair.by_activations().apply(b, sym),
        "+ swaps of heads": lambda: pair.by_activations(1).apply(b, sym),
        f"learned, {steps} steps": lambda: pair.learned(steps),
    }


def numbers(pair: Pair, moved: P.Params, sets: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Barrier on training images and on test images, accuracy half way (per cent), distance."""
    heights = [
        barrier(
            pair.model, pair.a, moved, list(zip(x.split(250), y.split(250), strict=True)), points=7
        ).height
        for x, y in sets
    ]
    x, y = sets[-1]
    with torch.no_grad():
        middle = torch.func.functional_call(pair.model, interpolate(pair.a, moved, 0.5), (x,))
    right = 100 * float((middle.argmax(1) == y).double().mean())
    apart = sum(float((moved[n] - pair.a[n]).square().sum()) for n in pair.a) ** 0.5
    return [*heights, right, apart]


def mean_and_interval(values: Sequence[float]) -> str:
    """The mean, and half the width of Student's interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3g}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3g} ± {half:.2g}"


def main() -> None:
    """Train what is missing, match all pairs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=list(TASKS), default="images")
    parser.add_argument("--weights", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ring", action="store_true", help="as many networks as pairs")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.weights.mkdir(parents=True, exist_ok=True)
    task = TASKS[options.of]
    (x, y), (tx, ty) = task.examples()
    few, every = task.few, torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    batches = [(x[i], y[i]) for i in every[few : few + task.taught].split(task.batch)]
    sets = [(x[every[:few]], y[every[:few]]), (tx[:few], ty[:few])]
    count = options.pairs
    table: dict[str, list[list[float]]] = {}
    for k in range(count):
        seeds = (k, (k + 1) % count) if options.ring else (2 * k, 2 * k + 1)
        a, b = (fold_norms(trained(options.weights, s, options.of), x[:1]) for s in seeds)
        pair = Pair(a, P.of(a), P.of(b), discover(a, x[:1]), batches)
        for name, way in ways(pair, options.steps).items():
            start = time.process_time()
            moved = way()
            seconds = time.process_time() - start
            row = [*numbers(pair, moved, sets), 1e3 * seconds]
            print(k, f"{name:<26}", *(f"{v:9.3f}" for v in row), flush=True)
            table.setdefault(name, []).append(row)
    print(f"\n{'means of ' + str(count):<26}", "| train | test | half way, % | distance | CPU ms")
    for name, rows in table.items():
        print(f"{name:<26}", *(f"| {mean_and_interval(c)}" for c in zip(*rows, strict=True)))


if __name__ == "__main__":
    main()
