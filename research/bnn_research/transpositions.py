"""P3, figures 1 and 2: matched and unmatched networks during training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from bnn_research.populations import fit_quietly
from bnn_research.scales import settings_of
from lightning_bnn.datamodules import MNIST, Digits
from lightning_bnn.datamodules.base import DataModule, InMemory
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.models import mlp
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.tables import Cell, Table
from weightsym import (
    Outcome,
    Symmetries,
    barrier,
    discover,
    interpolate,
    match_activations,
    permute,
)
from weightsym import params as P
from weightsym import transpositions as count_swaps
from weightsym.params import Params, keyed_generator

Pairs = Mapping[int, Mapping[str, float]]
"""Measurements on pairs of networks, by epoch or by the initial number of swaps."""


@dataclass(frozen=True)
class Scale:
    """The number of networks, their data, and the length of training."""

    mnist: bool
    hidden: int
    epochs: int
    lr: float
    points: int
    batches: int


SCALES = {
    "small": Scale(False, 64, 50, 0.01, 13, 20),
    "paper": Scale(True, 512, 50, 0.001, 50, 100),
}


def transpositions(
    scale: Literal["small", "paper"] = "small",
    hidden: int | None = None,
    epochs: int | None = None,
    points: int | None = None,
    seed: int = 0,
    out: str = "studies/transpositions",
) -> Outcome:
    """Train two networks from different starts, and one network from permuted copies of its start.

    Figure 1 shows the barrier between the two networks during training, as they are and matched by
    activations. For figure 2, a start and a copy of it whose units are permuted by a number of
    swaps are trained with different orders of the data, to test whether matching finds the same
    number of swaps afterwards.

    Args:
        scale: small, which runs in minutes, or paper, the paper's recipe.
        hidden: number of hidden units.
        epochs: number of training epochs.
        points: number of tested numbers of swaps, between 1 and all.
        seed: random seed of the initial weights, permutations and orders.
        out: folder for the results.
    """
    folder = results_folder(out, "transpositions")
    settings = settings_of(SCALES, scale, hidden=hidden, epochs=epochs, points=points)
    return publish(_Study(settings, seed).findings(), folder)


def permutation_with(swaps: int, units: int, generator: torch.Generator) -> Tensor:
    """Draw a random permutation of exactly this many swaps: of ``units - swaps`` cycles.

    Args:
        swaps: number of swaps.
        units: length of the permutation.
        generator: draws it.

    >>> p = permutation_with(3, 8, torch.Generator().manual_seed(0))
    >>> count_swaps(p)
    tensor(3)
    """
    if not 0 <= swaps < units:
        raise ValueError(f"`swaps` must be between 0 and {units - 1}, got {swaps}.")
    names = torch.randperm(units, generator=generator).tolist()
    result = torch.arange(units)
    for position in range(units - swaps, units):
        after = names[int(torch.randint(position, (), generator=generator))]
        result[names[position]] = result[after]
        result[after] = names[position]
    return result


class _Study:
    """Data, network and symmetries, and measurements on them."""

    def __init__(self, settings: Scale, seed: int) -> None:
        self.settings, self.seed = settings, seed
        source: DataModule = Digits()
        self.data = "digits (a substitute for MNIST)"
        if settings.mnist:
            source, self.data = MNIST(val_size=0, augment=False, standardise=False), "MNIST"
        inputs, self.labels = source.load().train
        self.inputs = source.normalise(inputs).flatten(1)
        self.model: nn.Module = mlp(self.inputs.shape[1], [settings.hidden], 10).eval()
        self.symmetries: Symmetries = discover(self.model, self.inputs[:2])
        batches = zip(self.inputs.split(64), self.labels.split(64), strict=True)
        self.batches = list(itertools.islice(batches, settings.batches))

    # -------------------------------------------------------- training and measuring
    def train(self, starts: Params, order: str) -> list[Params]:
        """Return stacks of networks at the start and after every epoch."""
        module = DeepEnsemble(
            self.model,
            members=P.stack_size(starts),
            optimizer=lambda p: torch.optim.SGD(p, self.settings.lr, momentum=0.9),
        )
        module.state.networks.load_state_dict(starts)
        history = _Weights([{n: t.clone() for n, t in starts.items()}])
        key = int(torch.randint(2**31, (), generator=keyed_generator(self.seed, order)))
        source = InMemory((self.inputs, self.labels), 64, key)
        fit_quietly(module, source, self.settings.epochs, [history])
        return history.stacks

    def match(self, network: Params, reference: Params) -> tuple[list[Tensor], float]:
        """Return permutations that match two networks by activations, and their number of swaps."""
        permutations = match_activations(
            self.model, network, reference, self.symmetries, self.batches
        )
        return permutations, float(sum(int(count_swaps(p)) for p in permutations))

    def pair(self, network: Params, reference: Params) -> dict[str, float]:
        """Measure two networks, as they are and matched."""
        permutations, swaps = self.match(network, reference)
        numbers = {"swaps": swaps}
        matched = permute(network, self.symmetries, permutations)
        for prefix, candidate in (("", network), ("matched ", matched)):
            difference = P.ravel(candidate)[0] - P.ravel(reference)[0]
            numbers[f"{prefix}distance"] = float(difference.norm())
            line = barrier(self.model, reference, candidate, self.batches, points=11)
            numbers[f"{prefix}barrier"] = line.height
        return numbers

    # -------------------------------------------------------- tables and figures
    def findings(self) -> Findings:
        """Return the tables and figures of the study."""
        generator = keyed_generator(self.seed, "starts")
        epochs = self.train(P.populate(self.model, 2, generator), "first")
        chosen = sorted({round(k) for k in torch.linspace(0, len(epochs) - 1, 11).tolist()})
        first, second = ([_member(stack, k) for stack in epochs] for k in (0, 1))
        training = {k: self.pair(second[k], first[k]) for k in chosen}
        sweep = self.sweep(generator)
        shares = torch.linspace(0, 1, 11).tolist()
        line = {w: self.match(interpolate(first[-1], second[-1], w), first[-1])[1] for w in shares}
        drift = {float(k): self.match(first[k], first[0])[1] for k in chosen}
        return Findings(
            "transpositions",
            f"Swaps, distances and barriers, {self.settings.hidden} units (P3, figures 1 and 2)",
            {
                "training": _table(
                    "Figure 1: two networks from different starts", "epoch", "swaps", training
                ),
                "sweep": _table(
                    "Figure 2: a start and its permuted copies, trained on other orders",
                    "swaps at the start",
                    "swaps after",
                    sweep,
                ),
                "line": _path("Swaps on the line between both", "position", line),
                "drift": _path("Swaps between a network and its start", "epoch", drift),
            },
            {
                "training": _curves(training, ("barrier (nats)", "distance", "swaps"), "epoch"),
                "sweep": _curves(
                    sweep,
                    ("swaps after training", "barrier (nats)", "distance"),
                    "swaps at the start",
                ),
            },
            [f"Data: {self.data}."],
            {"scale": self.settings.__dict__, "seed": self.seed},
        )

    def sweep(self, generator: torch.Generator) -> Pairs:
        """Compare networks with those that started from permuted copies, by the number of swaps."""
        units, points = self.settings.hidden, self.settings.points
        counts = sorted({round(k) for k in torch.linspace(1, units - 1, points).tolist()})
        start = P.populate(self.model, 1, generator)
        moves = torch.stack([permutation_with(k, units, generator) for k in counts])
        copies = {n: t.expand(len(counts), *t.shape[1:]).clone() for n, t in start.items()}
        permuted = permute(copies, self.symmetries, [moves])
        trained = _member(self.train(start, "first order")[-1], 0)
        others = self.train(permuted, "other order")[-1]
        return {k: self.pair(_member(others, m), trained) for m, k in enumerate(counts)}


class _Weights(L.Callback):
    """A callback that stores all networks at the start and after every epoch."""

    def __init__(self, stacks: list[Params]) -> None:
        self.stacks = stacks

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.stacks.append({n: t.clone() for n, t in pl_module.member_stack().items()})


def _member(stack: Params, index: int) -> Params:
    return {name: t[index] for name, t in stack.items()}


def _table(title: str, axis: str, swaps: str, pairs: Pairs) -> Table:
    names = ["distance", "matched distance", "barrier", "matched barrier"]
    rows: list[list[Cell]] = [
        [str(k), pair["swaps"], *(pair[n] for n in names)] for k, pair in pairs.items()
    ]
    return Table(title, [axis, swaps, *names], rows, 3)


def _path(title: str, axis: str, swaps: Mapping[float, float]) -> Table:
    return Table(title, [axis, "swaps"], [[f"{x:g}", swap] for x, swap in swaps.items()], 3)


def _curves(pairs: Pairs, titles: Sequence[str], axis: str) -> Any:
    """Plot a panel for each title: the measurement of its first word, unmatched and matched."""
    panels: dict[str, dict[str, Line]] = {title: {} for title in titles}
    for title in titles:
        word = title.split()[0]
        for text, name in (("as they are", word), ("matched", f"matched {word}")):
            if all(name in pair for pair in pairs.values()):
                values = torch.tensor([pair[name] for pair in pairs.values()])
                panels[title][text] = Line(torch.tensor([float(k) for k in pairs]), values)
    return lines_figure(panels, (axis, ""))
