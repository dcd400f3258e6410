"""Trained pairs: what every way of matching leaves of the barrier, as it is and repaired.

Independent pairs of networks are trained on the same data. Means over pairs of the test barrier
(five points) and of the loss at the midpoint, less the mean loss of the ends, with half of a 95 %
interval.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from planted_permutations import Residual
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.symmetry import Learning, MatchResult, Symmetries, barrier, discover, match

Batches = list[tuple[Tensor, Tensor]]


class ResidualClassifier(nn.Module):
    def __init__(self, hidden: int, stream: int, blocks: int) -> None:
        super().__init__()
        self.body = Residual(hidden, stream, blocks, 64)
        self.body.head = nn.Linear(stream, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Batches, Batches]]
    epochs: int
    decay: float  # a normal prior of deviation one, per example


def digits() -> tuple[Batches, Batches]:
    """1078 to train and match, 719 to test."""
    raw = load_digits()
    x, y = torch.tensor(raw.data, dtype=torch.float32), torch.tensor(raw.target)
    x = (x - x[:1078].mean(0)) / x[:1078].std(0).clamp(min=1e-3)
    return batches(x[:1078], y[:1078], 77), [(x[1078:], y[1078:])]


def mnist() -> tuple[Batches, Batches]:
    """20 000 to train, 10 000 to test; read from LIGHTNING_BNN_DATA."""
    from torchvision.datasets import MNIST

    folder = Path(os.environ["LIGHTNING_BNN_DATA"])
    sets = [MNIST(folder, train) for train in (True, False)]
    (x, y), (u, v) = (((s.data.flatten(1) / 255 - 0.13) / 0.31, s.targets) for s in sets)
    return batches(x[:20_000], y[:20_000], 500), batches(u, v, 2000)


def batches(x: Tensor, y: Tensor, size: int) -> Batches:
    return list(zip(x.split(size), y.split(size), strict=True))


def cases() -> list[Case]:
    return [
        Case("digits 64-64-10", lambda: models.mlp(64, [64], 10), digits, 40, 1 / 1078),
        Case(
            "digits residual (32,64)x3", lambda: ResidualClassifier(32, 64, 3), digits, 40, 1 / 1078
        ),
        Case("MNIST 784-128-128-10", lambda: models.mlp(784, [128, 128], 10), mnist, 6, 1 / 20_000),
    ]


def train(case: Case, data: Batches, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=case.decay)
    for _ in range(case.epochs):
        for k in torch.randperm(len(data)).tolist():
            optimizer.zero_grad()
            x, y = data[k]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def ways(model: nn.Module, data: Batches, steps: int) -> dict[str, dict[str, object]]:
    seen = {"model": model, "batches": data}
    learn = {**seen, "loss": nn.functional.cross_entropy, "learning": Learning(steps=steps)}
    return {
        "ascent": {"method": "ascent"},
        "activations": {"method": "activations", **seen},
        "correlation": {"method": "correlation", **seen},
        "regression": {"method": "regression", **seen},
        "best": {"method": "best"},
        "best, with batches": {"method": "best", **seen},
        "sinkhorn": {"method": "sinkhorn", **learn},
        "learned": {"method": "learned", **learn},
    }


def heights(model: nn.Module, a: P.Params, b: P.Params, data: Batches) -> list[float]:
    """Barrier and rise at the midpoint, as the networks are and repaired."""
    found = []
    for repair in (False, True):
        line = barrier(model, a, b, data, points=5, repair=repair)
        ends = (line.losses[0] + line.losses[-1]) / 2
        found += [line.height, line.losses[2] - ends]
    return found


def row(case: Case, pairs: int, steps: int) -> dict[str, list[list[float]]]:
    """Per way and pair: two heights as they are, two repaired, milliseconds of the CPU."""
    teaching, testing = case.data()
    rows: dict[str, list[list[float]]] = {}
    for pair in range(pairs):
        nets = [train(case, teaching, 2 * pair + k) for k in (0, 1)]
        a, b = ({n: t.detach() for n, t in P.of(net).items()} for net in nets)
        sym = discover(nets[0], teaching[0][0][:1])
        rows.setdefault("nothing", []).append([*heights(nets[0], a, b, testing), 0.0])
        for name, options in ways(nets[0], teaching, steps).items():
            found, ms = timed(b, a, sym, options)
            measured = heights(nets[0], a, found.apply(b, sym), testing)
            rows.setdefault(name, []).append([*measured, ms])
            print(pair, name, *(f"{h:.4f}" for h in measured), f"{ms:.0f}", file=sys.stderr)
    return rows


def timed(
    b: P.Params, a: P.Params, sym: Symmetries, options: dict[str, object]
) -> tuple[MatchResult, float]:
    start = time.process_time()
    found = match(b, a, sym, **options)  # type: ignore[arg-type]
    return found, 1e3 * (time.process_time() - start)


def summary(values: list[float]) -> str:
    """Mean, and half of Student's 95 % interval for a handful of pairs."""
    from scipy.stats import t

    x = torch.tensor(values, dtype=torch.float64)
    half = float(t.ppf(0.975, len(x) - 1)) * float(x.std()) / math.sqrt(len(x)) if len(x) > 1 else 0
    return f"{float(x.mean()):.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="digits", help="part of a case's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in (c for c in cases() if options.only in c.name):
        print(f"\n{case.name}, {options.pairs} pairs, {options.steps} steps")
        print("| | barrier | midpoint | repaired: barrier | midpoint | CPU ms |\n|" + "---|" * 6)
        for name, rows in row(case, options.pairs, options.steps).items():
            *columns, ms = (list(c) for c in zip(*rows, strict=True))
            cells = [*map(summary, columns), f"{sum(ms) / len(ms):.0f}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
