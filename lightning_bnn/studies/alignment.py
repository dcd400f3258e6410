"""Averages of networks that are brought into one frame, by architecture, method and number."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bnn import params as P
from lightning_bnn.arguments import check_count
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.params import Params
from lightning_bnn.plots import lines_figure
from lightning_bnn.posteriors import DiagonalGaussian
from lightning_bnn.randomness import keyed_generator, keyed_randomness
from lightning_bnn.studies.alignment_networks import ARCHITECTURES
from lightning_bnn.studies.findings import (
    Findings,
    measured_line,
    publish,
    results_folder,
    settings_of,
)
from lightning_bnn.studies.runs import GivenExamples, fit_quietly
from lightning_bnn.symmetry import Symmetries, align, discover, fold_norms, match, match_all
from lightning_bnn.symmetry.matching.repair import reestimated
from lightning_bnn.tables import Cell, Measured, Table, interval, spread

__all__ = ["MATRICES", "PERMUTATIONS", "aligned", "alignment", "without_gains"]

PERMUTATIONS = ("as they are", "first, best", "first, activations", "first, learned", "joint")
LEARNED = "first, learned"
"""The method that takes hundreds of gradients of the loss half way: for pairs."""
MATRICES = ("first, matrices", "first, matrices by activations", "joint, matrices")
DRAWS = 100
TITLES = {
    "excess": "Loss of the mean above the mean loss of the networks (nats)",
    "accuracy": "Accuracy of the mean network (%)",
    "draws": f"Mean accuracy of {DRAWS} single draws of one Gaussian for all networks (%)",
    "distance": "Squared distance to the mean, per network",
}
Numbers = dict[str, dict[int, dict[str, Measured]]]
"""Measurements by method and number of networks."""


@dataclass(frozen=True)
class Scale:
    """Architectures, sizes of the sets that are averaged, and how many sets of each size."""

    architectures: tuple[str, ...]
    sizes: tuple[int, ...]
    sets: int
    share: float = 1.0
    """Of the epochs of training."""


SCALES = {
    "smallest": Scale(("MLP, 2 x 16",), (2,), 2, 0.05),
    "small": Scale(tuple(ARCHITECTURES), (2, 5, 10), 5),
    "paper": Scale(tuple(ARCHITECTURES), (2, 5, 10, 20, 50), 10),
}


def alignment(
    scale: Literal["smallest", "small", "paper"] = "small",
    only: str | None = None,
    seed: int = 0,
    seeds: int = 1,
    out: str = "studies/alignment",
) -> None:
    """Average N networks after bringing them into one frame, by method, architecture and N.

    Networks of seven kinds are trained from different starts. Disjoint sets of N are averaged as
    they are, matched to the first (by weights or activations; pairs also by gradients of the loss
    half way), and aligned jointly. Transformers, with their norms folded, are also matched by
    permutations and matrices together. The tables show the loss of the mean network above that of
    the networks, its accuracy, and the squared distance to the mean. BatchNorm statistics are
    estimated anew. If networks were trained with a prior, single draws of the Gaussian that has the
    means and deviations of the weights are evaluated as well.

    Args:
        scale: smallest (a trial), small (up to 10 networks) or paper (up to 50).
        only: part of the names of the architectures to use.
        seed: random seed of the initial weights and of the order of the data.
        seeds: number of populations, from this seed and the next ones; tables then have 95 %
            intervals over them.
        out: folder for the results; networks that were trained before are taken from there.
    """
    check_count("seeds", seeds, least=1)
    folder = results_folder(out, "alignment")
    settings = settings_of(SCALES, scale)
    names = [n for n in settings.architectures if only is None or only in n]
    if not names:
        raise ValueError(
            f"`only` must be part of one of {', '.join(settings.architectures)}, got {only!r}."
        )
    numbers = {
        name: _summary(
            [_Population(name, settings, s, folder).measure() for s in range(seed, seed + seeds)]
        )
        for name in tqdm(names, desc="alignment", unit="kind")
    }
    publish(_findings(numbers, settings, seed, seeds), folder)


# ------------------------------------------------------------ frames
def aligned(
    model: nn.Module,
    sym: Symmetries,
    networks: Params,
    method: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    seed: int,
) -> Params:
    """Bring a stack into one frame.

    Args:
        model: computes the networks.
        sym: its symmetries.
        networks: a stack.
        method: one of `PERMUTATIONS` or `MATRICES`.
        batches: pairs of inputs and labels, for methods that look at data.
        seed: of the search.
    """
    first = {n: t[0] for n, t in networks.items()}
    frame, _, way = method.partition(", ")
    if frame == "as they are":
        return networks
    if frame == "joint":
        return align(networks, sym, mixing=way == "matrices", seed=seed).apply(networks, sym)
    by_data: dict[str, Any] = {"model": model, "batches": batches}
    if way.startswith("matrices"):
        options = {"by": "activations", **by_data} if way.endswith("activations") else {}
        return match_all(networks, first, sym, **options).apply(networks, sym)
    options = {"method": way, "seed": seed}
    if way != "best":
        options |= by_data | {"loss": nn.functional.cross_entropy}
    return match(networks, first, sym, **options).apply(networks, sym)


def without_gains(model: nn.Module, networks: Params, inputs: Tensor) -> Params:
    """Fold the gains of norms of every network of a stack."""
    model, folded = copy.deepcopy(model), []
    for network in P.unstack(networks):
        model.load_state_dict(network)
        folded.append(P.of(fold_norms(model, inputs[:2])))
    return P.stack(folded)


class _Population:
    """Trained networks of one architecture, and measurements of their means."""

    def __init__(self, name: str, settings: Scale, seed: int, folder: Path) -> None:
        self.kind, self.name, self.settings, self.seed = ARCHITECTURES[name], name, settings, seed
        self.examples = self.kind.examples()
        with keyed_randomness(seed, name):
            self.model = self.kind.build(self.examples.classes).eval()
        self.example = self.examples.train[0][:2]
        self.symmetries = discover(self.model, self.example)
        self.batches = list(zip(*(t.split(64) for t in self.examples.train), strict=True))[:20]
        self.members = max(max(settings.sizes), 2 * min(settings.sizes))
        epochs = max(1, round(settings.share * self.kind.epochs))
        file = folder / "networks" / f"{name} {seed} {self.members} {epochs}.safetensors"
        self.stack = load_file(file) if file.exists() else self._train(epochs, file)

    def _train(self, epochs: int, file: Path) -> Params:
        generator = keyed_generator(self.seed, "starts", self.name)
        module = DeepEnsemble(
            self.model,
            members=self.members,
            prior_std=self.kind.prior_std,
            optimizer=lambda p: torch.optim.Adam(p, self.kind.lr),
        )
        module.networks.load_state_dict(P.populate(self.model, self.members, generator))
        fit_quietly(module, GivenExamples(*self.examples.train, self.seed), epochs)
        stack = {n: t.detach().contiguous().clone() for n, t in module.member_stack().items()}
        file.parent.mkdir(exist_ok=True)
        save_file(stack, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        return stack

    def measure(self) -> dict[str, dict[int, list[dict[str, float]]]]:
        """Measure all methods on all sets, by method and size."""
        numbers: dict[str, dict[int, list[dict[str, float]]]] = {}
        for size in self.settings.sizes:
            for k in range(min(self.settings.sets, self.members // size)):
                networks = {n: t[k * size : (k + 1) * size] for n, t in self.stack.items()}
                for method, measured in self._measure_set(networks, size).items():
                    numbers.setdefault(method, {}).setdefault(size, []).append(measured)
        return numbers

    @torch.no_grad()
    def _measure_set(self, networks: Params, size: int) -> dict[str, dict[str, float]]:
        losses = [self._evaluate(self.model, network)[0] for network in P.unstack(networks)]
        ends = sum(losses) / size
        cases: list[tuple[nn.Module, Symmetries, Params, Sequence[str]]]
        cases = [(self.model, self.symmetries, networks, PERMUTATIONS)]
        if self.symmetries.linear:
            folded = fold_norms(self.model, self.example)
            stack = without_gains(self.model, networks, self.example)
            cases.append((folded, discover(folded, self.example), stack, MATRICES))
        return {
            method: self._measure(model, sym, aligned(model, sym, stack, method, self.batches,
                                                      self.seed), ends)
            for model, sym, stack, methods in cases
            for method in methods
            if method != LEARNED or size == 2
        }  # fmt: skip

    def _measure(
        self, model: nn.Module, sym: Symmetries, networks: Params, ends: float
    ) -> dict[str, float]:
        """Evaluate the mean of a stack that is in one frame."""
        floating = {n: t for n, t in networks.items() if t.is_floating_point()}
        mean = {n: floating[n].mean(0) if n in floating else t[0] for n, t in networks.items()}
        loss, accuracy = self._evaluate(
            model, reestimated(model, mean, [x for x, _ in self.batches])
        )
        moved = [t - mean[n] for n, t in floating.items() if n in sym.touched]
        distances = [float(t.double().square().sum()) / len(t) for t in moved]
        numbers = {"excess": loss - ends, "accuracy": accuracy, "distance": math.fsum(distances)}
        if self.kind.prior_std is not None:
            generator = keyed_generator(self.seed, "draws", self.name)
            drawn = P.unstack(DiagonalGaussian.fit(networks).sample(DRAWS, generator))
            numbers["draws"] = sum(self._evaluate(model, network)[1] for network in drawn) / DRAWS
        return numbers

    def _evaluate(self, model: nn.Module, network: Params) -> tuple[float, float]:
        """Loss and accuracy on the test set."""
        inputs, labels = self.examples.test
        logits = torch.cat([P.apply(model, network, x) for x in inputs.split(500)])
        loss = float(nn.functional.cross_entropy(logits, labels))
        return loss, 100 * float((logits.argmax(-1) == labels).double().mean())


# ------------------------------------------------------------ tables and figures
def _summary(of_seeds: Sequence[dict[str, dict[int, list[dict[str, float]]]]]) -> Numbers:
    """Mean and interval over seeds, or mean and deviation over the sets of one seed."""

    def summed(rows: Iterable[Sequence[dict[str, float]]], key: str) -> Measured:
        sets = [torch.tensor([numbers[key] for numbers in row]).double() for row in rows]
        means = torch.stack([s.mean() for s in sets])
        return spread(sets[0]) if len(sets) == 1 else interval(means)

    return {
        method: {
            size: {key: summed((of[method][size] for of in of_seeds), key) for key in rows[0]}
            for size, rows in sizes.items()
        }
        for method, sizes in of_seeds[0].items()
    }


def _findings(every: Mapping[str, Numbers], settings: Scale, seed: int, seeds: int) -> Findings:
    note = (
        f"Mean and half of the 95 % interval (Student's t) over {seeds} seeds, each the mean over "
        "disjoint sets of its networks"
        if seeds > 1
        else "Mean and standard deviation over disjoint sets of networks"
    )
    curves = {
        name: {
            method: measured_line(list(numbers), [n["excess"] for n in numbers.values()])
            for method, numbers in methods.items()
            if method != LEARNED
        }
        for name, methods in every.items()
    }
    return Findings(
        "alignment",
        "Averages of networks that are brought into one frame",
        {key: table for key in TITLES if (table := _table(key, every, settings, note)).rows},
        {"excess": lines_figure(curves, ("networks", "excess loss (nats)"), log="xy")},
        ["Data: scikit-learn's digits; GPT: characters of a module of Python's standard library."],
        {"scale": settings.__dict__, "seed": seed, "seeds": seeds},
    )


def _table(key: str, every: Mapping[str, Numbers], settings: Scale, note: str) -> Table:
    header = ["", "method", *(f"N = {size}" for size in settings.sizes)]
    rows: list[list[Cell]] = [
        [name, method, *(numbers[s][key] if s in numbers else math.nan for s in settings.sizes)]
        for name, methods in every.items()
        for method, numbers in methods.items()
        if all(key in number for number in numbers.values())
    ]
    return Table(TITLES[key], header, rows, 3 if key == "excess" else 1, note)
