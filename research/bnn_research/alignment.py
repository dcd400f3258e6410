"""Planted permutations, barriers of pairs, and averages across runs: matching in numbers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from bnn_research.scales import settings_of
from lightning_bnn.datamodules import MNIST
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.tables import Cell, Table
from weightsym import (
    Learning,
    Outcome,
    Symmetries,
    average,
    barrier,
    discover,
    match,
    permute,
    random_permutations,
)
from weightsym import params as P
from weightsym.params import Params, keyed_generator

Images = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scale:
    """The number of planted elements, of seeds and of networks to average, and their data."""

    trials: int
    seeds: int
    networks: Sequence[int]
    images: int
    epochs: int


SCALES = {
    "smallest": Scale(1, 1, (2,), 60, 1),
    "small": Scale(100, 3, (2, 10), 6000, 4),
    "large": Scale(100, 5, (2, 10, 30), 60_000, 10),
}


def alignment(
    scale: Literal["smallest", "small", "large"] = "small",
    trials: int | None = None,
    seeds: int | None = None,
    images: int | None = None,
    epochs: int | None = None,
    noise: float = 0.5,
    seed: int = 0,
    out: str = "studies/alignment",
) -> Outcome:
    """Count recovered permutations, and measure barriers of pairs and averages across runs.

    Planted permutations are those of copies with noise. Pairs and averages are networks of MNIST,
    trained from different starts; its files must be in the folder of the data.

    Args:
        scale: smallest, to test that it runs; small, which takes about five minutes; or large.
        trials: number of planted permutations for each network.
        seeds: number of pairs, and of sets of networks to average.
        images: number of training images.
        epochs: number of epochs.
        noise: in standard deviations of each tensor.
        seed: random seed of the networks, the noise and the batches.
        out: folder for the results.
    """
    folder = results_folder(out, "alignment")
    if not noise >= 0:
        raise ValueError(f"`noise` must not be negative, got {noise}.")
    settings = settings_of(SCALES, scale, trials=trials, seeds=seeds, images=images, epochs=epochs)
    data = MnistImages.of(settings.images)
    tables = {
        "planted": _planted(settings.trials, noise, seed),
        "pairs": _pairs(settings, data, seed),
        "averages": _averages(settings, data, seed),
    }
    note = {"scale": settings.__dict__, "noise": noise, "seed": seed}
    return publish(Findings("alignment", "Alignment in numbers", tables, {}, settings=note), folder)


# ------------------------------------------------------------ planted permutations
class Stream(nn.Module):
    """Two blocks on a stream; with ``ends`` zero, nothing outside of the blocks anchors it."""

    def __init__(self, width: int = 50, hidden: int = 30, ends: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 4)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(2))
        for layer in (self.first, self.last):
            nn.init.zeros_(layer.bias)
            layer.weight.data.mul_(ends)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.last(x)


def centred_stream() -> nn.Module:
    """Return a stream whose blocks also sum to zero over rows and over columns."""
    net = Stream(ends=0.0)
    for layer in (*net.up, *net.down):
        w = layer.weight.data
        w -= w.mean(0, keepdim=True)
        w -= w.mean(1, keepdim=True)
        nn.init.zeros_(layer.bias)
    return net


class GroupedQueries(nn.Module):
    """Attention of eight heads, of which four share their keys and values."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, 32), nn.Linear(32, width)
        self.k, self.v = nn.Linear(width, 8), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(4, 1) for y in (k, v))
        attended = (q @ k.mT / 2).softmax(-1) @ v
        return self.out(attended.transpose(1, 2).flatten(2))


def encoder() -> nn.Module:
    """Return a transformer of two layers with norms in front."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(8, 32), stack, nn.Linear(32, 4))


PLANTED: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stream of 50, blocks of 30, ends zero": (functools.partial(Stream, ends=0.0), (4, 8)),
    "the same, centred": (centred_stream, (4, 8)),
    "transformer, two layers": (encoder, (2, 6, 8)),
    "grouped queries, 8 heads on 2": (GroupedQueries, (2, 6, 32)),
}
WAYS: tuple[Literal["ascent", "best"], ...] = ("ascent", "best")


def _planted(trials: int, noise: float, seed: int) -> Table:
    rows: list[list[Cell]] = []
    for name, (make, shape) in PLANTED.items():
        found, spent = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0.0)
        x = torch.randn(shape, generator=keyed_generator(seed, name))
        sym = discover(make().eval(), x)
        for trial in tqdm(range(trials), desc=name, leave=False):
            generator = keyed_generator(seed, "planted", name, trial)
            with torch.random.fork_rng():
                torch.manual_seed(generator.initial_seed())
                net = make().eval()
            params = P.of(net)
            near = _noisy(params, noise, generator)
            moved = permute(near, sym, random_permutations(sym, generator))
            for way in WAYS:
                start = time.process_time()
                back = permute(moved, sym, match(moved, params, sym, method=way))
                spent[way] += time.process_time() - start
                found[way] += all(torch.equal(back[n], near[n]) for n in near)
        rows.append([name, *(c for w in WAYS for c in (found[w], 1e3 * spent[w] / trials))])
    header = ["network", *(c for way in WAYS for c in (way, f"{way}, CPU ms"))]
    return Table(f"Recovered of {trials} planted permutations", header, rows, 3)


def _noisy(params: Params, noise: float, generator: torch.Generator) -> Params:
    def moved(w: Tensor) -> Tensor:
        size = noise * w.std() if w.numel() > 1 else w.new_zeros(())
        return w + size * torch.randn(w.shape, generator=generator)

    return {n: moved(w) for n, w in params.items()}


# ------------------------------------------------------------ networks of MNIST
@dataclass(frozen=True)
class MnistImages:
    """Images of half the size, which is enough to tell digits apart."""

    train: Images
    test: Images

    @classmethod
    def of(cls, count: int) -> MnistImages:
        """Read so many training images, and as many test images at most."""
        source = MNIST(augment=False, val_size=0)
        splits = source.load()
        sets = [
            (F.avg_pool2d(source.normalise(x[:count]), 2), y[:count])
            for x, y in (splits.train, splits.test)
        ]
        return cls(*sets)

    def batches(self, most: int = 10_000) -> list[Images]:
        """Return training images, in at least four batches."""
        size = max(1, min(500, len(self.train[0]) // 4))
        x, y = (t[:most].split(size) for t in self.train)
        return list(zip(x, y, strict=True))

    def accuracy(self, net: nn.Module, params: Params) -> float:
        """Return the share of test images that are classified right, in per cent."""
        with torch.no_grad():
            outputs = torch.func.functional_call(net, params, (self.test[0],))
        return 100 * float((outputs.argmax(1) == self.test[1]).double().mean())


def perceptron() -> nn.Module:
    """Return two hidden layers of 64 units."""
    layers = (nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def convolutions() -> nn.Module:
    """Return three convolutions with BatchNorm."""
    layers = list[nn.Module]()
    for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2)):
        conv = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


KINDS = {"MLP 196-64-64-10": perceptron, "CNN with BatchNorm": convolutions}


def trained(make: Callable[[], nn.Module], data: MnistImages, epochs: int, seed: int) -> nn.Module:
    """Train a network from a start of its own.

    Args:
        make: returns a network.
        data: the training images.
        epochs: how many.
        seed: of the start and the batches.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = make().train()
        optimizer = torch.optim.Adam(net.parameters(), 2e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(data.train[0])).split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(data.train[0][rows]), data.train[1][rows]).backward()
                optimizer.step()
    return net.eval()


def _pairs(settings: Scale, data: MnistImages, seed: int) -> Table:
    """Barriers of two perceptrons, by the way in which they are matched."""
    heights: dict[str, list[float]] = {}
    spent: dict[str, float] = {}
    test = [data.test]
    for k in tqdm(range(settings.seeds), desc="pairs", leave=False):
        nets = [trained(perceptron, data, settings.epochs, seed + 2 * k + j) for j in range(2)]
        sym, (a, b) = discover(nets[0], data.test[0][:2]), map(P.of, nets)
        given: dict[str, Any] = {"model": nets[0], "batches": data.batches()}
        ways: dict[str, Callable[[], Params]] = {
            "nothing": functools.partial(dict, a),
            **{w: functools.partial(_matched, a, b, sym, method=w) for w in WAYS},
            "activations": functools.partial(_matched, a, b, sym, method="activations", **given),
            "learned": functools.partial(
                _matched, a, b, sym, method="learned", loss=F.cross_entropy,
                learning=Learning(), **given,
            ),
        }  # fmt: skip
        for name, way in ways.items():
            start = time.process_time()
            moved = way()
            spent[name] = spent.get(name, 0.0) + time.process_time() - start
            line = barrier(nets[0], b, moved, test)
            heights.setdefault(name, []).append(line.height)
    rows: list[list[Cell]] = [
        [name, *_spread(values), spent[name] / settings.seeds] for name, values in heights.items()
    ]
    header = ["matched by", "barrier, nats", "deviation", "CPU s"]
    return Table(f"Pairs of perceptrons, {settings.seeds} pairs", header, rows, 3)


def _matched(a: Params, b: Params, sym: Symmetries, **how: Any) -> Params:
    return permute(a, sym, match(a, b, sym, **how))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _averages(settings: Scale, data: MnistImages, seed: int) -> Table:
    """Accuracy of averages of networks from different starts."""
    rows: list[list[Cell]] = []
    for name, make in KINDS.items():
        scores: dict[tuple[int, str], list[float]] = {}
        for k in tqdm(range(settings.seeds), desc=name, leave=False):
            most = max(settings.networks)
            nets = [trained(make, data, settings.epochs, seed + 100 * k + j) for j in range(most)]
            net, every = nets[0], [P.of(n) for n in nets]
            sym, batches = discover(net, data.test[0][:2]), data.batches(2000)
            for count in settings.networks:
                stack = P.stack(every[:count])
                inputs: dict[str, Any] = {"model": net, "batches": batches}
                mean = P.stack([P.weighted_mean(stack)])  # statistics of BatchNorm are estimated
                means = {"plain": average(mean, sym, **inputs),
                         "in one frame": average(stack, sym, **inputs)}  # fmt: skip
                alone = float(np.mean([data.accuracy(net, p) for p in every[:count]]))
                scores.setdefault((count, "one network"), []).append(alone)
                for way, params in means.items():
                    scores.setdefault((count, way), []).append(data.accuracy(net, params))
        for count in settings.networks:
            ways = ("one network", "plain", "in one frame")
            cells = [_spread(scores[count, way]) for way in ways]
            rows.append([name, count, *(c for pair in cells for c in pair)])
    header = ["networks", "number", "one network, %", "+-", "plain average, %", "+-",
              "in one frame, %", "+-"]  # fmt: skip
    return Table(f"Averages across runs, {settings.seeds} sets", header, rows, 1)
