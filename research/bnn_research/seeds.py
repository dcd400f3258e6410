"""Transformers of other seeds: the barrier between them after every way of alignment."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bnn_research import families
from bnn_research.scales import settings_of
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.tables import Cell, Table, spread
from weightsym import (
    Element,
    FullMatch,
    Learning,
    Outcome,
    Symmetries,
    barrier,
    discover,
    fold_networks,
    in_one_shape,
    learn_match,
    match,
    match_all,
)
from weightsym import params as P
from weightsym.params import Params, keyed_generator

Batches = list[tuple[Tensor, Tensor]]
Way = Callable[["Pair"], Element]


@dataclass(frozen=True)
class Scale(families.Scale):
    """Also how learning goes, how weights start, and the width of one network of each pair.

    Attributes:
        learning: number of steps.
        start: standard deviation of matrices.
        narrow: width of its stream, None for that of the other one.
    """

    learning: int
    start: float
    narrow: int | None = None


SCALES = {
    "small": Scale(3, 64, 256, 600, 6000, 100, 0.02),
    "paper": Scale(5, 256, 1024, 10_000, 6000, 1000, 0.02),
}


def seeds(
    scale: Literal["small", "paper"] = "small",
    family: Literal["GPT-2", "ViT"] = "GPT-2",
    networks: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    steps: int | None = None,
    learning: int | None = None,
    start: float | None = None,
    narrow: int | None = None,
    out: str = "studies/seeds",
) -> Outcome:
    """Measure barriers between transformers of other seeds, as GLMC does.

    Decoders learn tinyshakespeare letter by letter, or vision transformers MNIST. Norms are folded;
    the barrier is that half way, on held-out examples.

    Args:
        scale: small, which takes minutes, or paper.
        family: GPT-2 or ViT.
        networks: number of networks, all pairs of which are matched.
        width: of the stream.
        hidden: number of hidden units of a layer.
        steps: number of training steps.
        learning: number of steps of what is learnt.
        start: standard deviation with which matrices and tables start, as those of GPT-2; the
            default of torch for a matrix is 1 / sqrt(3 width). Biases start at zero.
        narrow: width of one network of each pair, with hidden units in proportion; every network
            of the other width is then matched with each of as many of this one.
        out: folder for the results.
    """
    folder = results_folder(out, "seeds")
    settings = settings_of(
        SCALES, scale, networks=networks, width=width, hidden=hidden, steps=steps,
        learning=learning, start=start, narrow=narrow,
    )  # fmt: skip
    if settings.networks < 2:
        raise ValueError(f"`networks` must be at least 2, got {settings.networks}.")
    if narrow is not None and narrow >= settings.width:
        raise ValueError(f"`narrow` must be below the width of {settings.width}, got {narrow}.")
    before = time.process_time()
    pairs = list(_pairs(family, settings))
    tables = {"barriers": _table(pairs)}
    cautions = [f"{(time.process_time() - before) / 60:.1f} CPU minutes."]
    title = f"Barriers between {family} of other seeds"
    return publish(
        Findings("seeds", title, tables, {}, cautions, {"scale": settings.__dict__}), folder
    )


# ------------------------------------------------------------ pairs
@dataclass(frozen=True, eq=False)
class Pair:
    """Two networks without gains, and examples to compare, to learn from, and to judge by."""

    module: nn.Module
    a: Params
    b: Params
    sym: Symmetries
    batches: Batches
    held: Batches
    learning: Learning

    def measured(self, way: Way) -> tuple[float, float]:
        """Barrier and CPU seconds of a way."""
        start = time.process_time()
        moved = way(self)(self.a)
        seconds = time.process_time() - start
        line = barrier(self.module, moved, self.b, self.held, cross_entropy, points=3)
        return line.height, seconds


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of letters or classes.

    Args:
        outputs: logits.
        targets: numbers.
    """
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _pairs(name: str, settings: Scale) -> Iterator[Pair]:
    numbers = range(2 * settings.networks)
    wide = Trained.of(name, settings, numbers[: settings.networks])
    pairs: Iterable[tuple[Params, Params]] = itertools.combinations(wide.networks, 2)
    if settings.narrow is not None:
        hidden = settings.hidden * settings.narrow // settings.width
        other = replace(settings, width=settings.narrow, hidden=hidden)
        narrow = Trained.of(name, other, numbers[settings.networks :])
        moving = [widened(w, narrow, wide) for w in narrow.networks]
        pairs = itertools.product(moving, wide.networks)
    family, generator = wide.family, keyed_generator("seeds", name)
    batches = [family.data(generator) for _ in range(32)]
    learning = Learning(steps=settings.learning)
    for a, b in pairs:
        yield Pair(wide.module, a, b, wide.sym, batches, [family.held], learning)


@dataclass(frozen=True, eq=False)
class Trained:
    """Networks of one architecture and other seeds, without gains."""

    family: families.Family
    module: nn.Module
    networks: list[Params]
    sym: Symmetries

    @classmethod
    def of(cls, name: str, settings: Scale, numbers: Sequence[int]) -> Trained:
        """Train networks of these seeds, and fold their norms."""
        family, nets = families.family(name, settings), list[nn.Module]()
        for seed in numbers:
            torch.manual_seed(seed)
            net = family.make()
            for key, w in net.named_parameters():
                if w.ndim > 1:
                    nn.init.normal_(w, std=settings.start)
                elif key.endswith("bias"):
                    nn.init.zeros_(w)
            generator = keyed_generator("seeds", name, seed)
            nets.append(families.trained(net, family.data, settings.steps, generator, rate=1e-3))
        module, networks = fold_networks(nets[0], [P.of(net) for net in nets], family.example)
        return cls(family, module.eval(), networks, discover(module.eval(), family.example))


_READ = ("k.weight", "v.weight", "up.weight", "head.weight")  # behind a norm, and no queries


def widened(network: Params, narrow: Trained, wide: Trained) -> Params:
    """A narrow network among the zeros of a wide one, with the same outputs but for eps of norms.

    Its stream is centred, as norms read no more. Norms divide by the mean square of more channels,
    and attention by the root of larger heads.

    Args:
        network: one of the narrow ones.
        narrow: their symmetries.
        wide: the other networks.
    """
    (stream,) = (g for g in narrow.sym.linear if g.kind == "centred")
    centred, factor = dict(network), math.sqrt(stream.size / wide.sym.shapes["head.weight"][1])
    for axis in (narrow.sym.axes[p.axis] for p in stream.placements):
        w = centred[axis.tensor]
        centred[axis.tensor] = w - w.mean(axis.dim, keepdim=True)
    found, _, _ = in_one_shape(centred, wide.networks[0], narrow.sym, wide.sym)
    by_end = dict.fromkeys(_READ, factor) | {"q.bias": 1 / factor}
    return {n: by_end.get(".".join(n.split(".")[-2:]), 1.0) * found[n] for n in network}


# ------------------------------------------------------------ ways
def _by(by: Literal["weights", "activations"], pair: Pair) -> FullMatch:
    if by == "weights":
        return match_all(pair.a, pair.b, pair.sym)
    inputs = [x for x, _ in pair.batches[:8]]
    return match_all(pair.a, pair.b, pair.sym, model=pair.module, batches=inputs, by=by)


def _permuted(pair: Pair, learnt: bool) -> Element:
    if not learnt:
        return match(pair.a, pair.b, pair.sym).element
    data = {"model": pair.module, "batches": pair.batches, "loss": cross_entropy}
    how = pair.learning
    return match(pair.a, pair.b, pair.sym, method="learned", learning=how, **data).element  # type: ignore[arg-type]


def _learnt(pair: Pair, start: FullMatch, moving: Params, goal: Params, steps: int) -> Element:
    how = replace(pair.learning, steps=steps)
    found = learn_match(
        start, moving, goal, pair.sym, pair.module, pair.batches, loss=cross_entropy, learning=how
    )
    return found.element


def _one_sided(pair: Pair) -> Element:
    return _learnt(pair, _by("activations", pair), pair.a, pair.b, pair.learning.steps)


def _two_sided(pair: Pair) -> Element:
    """Learn half of the steps at one end and half at the other, as one element of the first."""
    start, half = _by("activations", pair), pair.learning.steps // 2
    first = _learnt(pair, start, pair.a, pair.b, half)
    moved = first(pair.a)
    still = replace(start, element=Element(pair.sym))
    second = _learnt(pair, still, pair.b, moved, half)
    return second.inverse @ first


WAYS: dict[str, Way] = {
    "nothing": lambda pair: Element(pair.sym),
    "permutations, by weights": functools.partial(_permuted, learnt=False),
    "permutations, learnt": functools.partial(_permuted, learnt=True),
    "all, by weights": lambda pair: _by("weights", pair).element,
    "all, by activations": lambda pair: _by("activations", pair).element,
    "all, learnt": _one_sided,
    "all, learnt at both ends": _two_sided,
}


def _table(pairs: list[Pair]) -> Table:
    rows: list[dict[str, Cell]] = []
    for title, way in WAYS.items():
        heights, seconds = zip(*(pair.measured(way) for pair in pairs), strict=True)
        rows.append({
            "what is removed": title,
            "barrier": spread(torch.tensor(heights)),
            "CPU s": sum(seconds) / len(seconds),
        })  # fmt: skip
    title = f"Barrier half way in nats, mean and deviation of {len(pairs)} pairs"
    return Table.of(title, rows, {"barrier": 3, "CPU s": 1})
