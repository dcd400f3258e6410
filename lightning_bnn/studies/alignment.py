"""Many networks in one frame: loss and accuracy of their mean, by architecture and method."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bnn import params as P
from lightning_bnn.comparison.tables import Cell, Measured, Table, spread
from lightning_bnn.datamodules.base import DataModule, Splits
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.params import Params, stack_size
from lightning_bnn.plots import lines_figure
from lightning_bnn.posteriors import DiagonalGaussian
from lightning_bnn.randomness import keyed_generator, keyed_randomness
from lightning_bnn.studies.alignment_methods import (
    MATRICES,
    PERMUTATIONS,
    Kind,
    aligned,
    without_gains,
)
from lightning_bnn.studies.alignment_networks import ARCHITECTURES, Architecture
from lightning_bnn.studies.findings import (
    Findings,
    measured_line,
    publish,
    results_folder,
    settings_of,
)
from lightning_bnn.studies.runs import fit_quietly
from lightning_bnn.symmetry.matching.alignment import distance_to_mean
from lightning_bnn.symmetry.matching.repair import reestimated

__all__ = ["alignment"]

DRAWS = 100
_ABOVE = "excess loss (nats)"


@dataclass(frozen=True)
class Scale:
    """Which networks, how many, and into how many sets they are cut."""

    architectures: tuple[str, ...]
    sizes: tuple[int, ...]
    sets: int
    share: float = 1.0


SCALES = {
    "smallest": Scale(("MLP, 2 x 16",), (2,), 2, 0.05),
    "small": Scale(tuple(ARCHITECTURES), (2, 5, 10), 5),
    "paper": Scale(tuple(ARCHITECTURES), (2, 5, 10, 20, 50), 10),
}


def alignment(
    scale: Literal["smallest", "small", "paper"] = "small",
    only: str | None = None,
    seed: int = 0,
    out: str = "studies/alignment",
) -> None:
    """Average N networks after bringing them into one frame, by method, architecture and N.

    Networks of seven kinds are trained from different starts. Disjoint sets of N are averaged as
    they are, matched to the first (by coordinate ascent, by the better of ascent and Frank-Wolfe,
    by activations), and aligned jointly. The norms of transformers are folded, and transformers are
    also matched by permutations and matrices together. The tables show the loss of the mean network
    above that of the networks (for two of them the barrier at the midpoint), its accuracy, and the
    squared distance to the mean, also as a share of that without alignment. BatchNorm statistics
    are estimated anew. If networks were trained with a prior, single draws of the Gaussian that has
    the means and deviations of the weights are judged as well.

    Args:
        scale: smallest (a trial), small (up to 10 networks) or paper (up to 50).
        only: part of the names of the architectures to use.
        seed: random seed of the initial weights and of the order of the data.
        out: folder for the results; networks that were trained before are taken from there.
    """
    folder = results_folder(out, "alignment")
    settings = settings_of(SCALES, scale)
    names = [n for n in settings.architectures if only is None or only in n]
    if not names:
        raise ValueError(
            f"`only` must be part of one of {', '.join(settings.architectures)}, got {only!r}."
        )
    with tqdm(total=len(names), desc="alignment", unit="kind") as bar:
        found = {}
        for name in names:
            bar.set_postfix_str(name)
            found[name] = _Population(ARCHITECTURES[name], name, settings, seed, folder).measured()
            bar.update()
    publish(_findings(found, settings, seed), folder)


Numbers = dict[str, dict[int, dict[str, Measured]]]
"""By method and by the number of networks: what was measured, over disjoint sets."""


class _Population:
    """Trained networks of one kind, and what becomes of their means."""

    def __init__(
        self, kind: Architecture, name: str, settings: Scale, seed: int, folder: Path
    ) -> None:
        self.kind, self.name, self.settings, self.seed = kind, name, settings, seed
        self.examples = kind.examples()
        with keyed_randomness(seed, name):
            self.model: nn.Module = kind.build(self.examples.classes).eval()
        self.inputs = self.examples.train[0]
        self.plain = Kind.of(self.model, self.inputs)
        self.batches = [x for x, _ in zip(self.inputs.split(64), range(20), strict=False)]
        self.members = max(max(settings.sizes), 2 * min(settings.sizes))
        self.stack = self._trained(folder / "networks")
        self.mixed = Kind.folded(self.model, self.inputs) if self.plain.symmetries.linear else None
        self.methods = PERMUTATIONS + (MATRICES if self.mixed else ())

    def _trained(self, folder: Path) -> Params:
        """The networks, trained or as an earlier run has left them."""
        epochs = max(1, round(self.settings.share * self.kind.epochs))
        key = f"{self.name} {epochs} {self.kind.lr} {self.members} {self.seed} {self.model}"
        file = folder / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.safetensors"
        if file.exists():
            return load_file(file)
        generator = keyed_generator(self.seed, "starts", self.name)
        module = DeepEnsemble(
            self.model,
            members=self.members,
            prior_std=self.kind.prior_std,
            optimizer=lambda p: torch.optim.Adam(p, self.kind.lr),
        )
        module.networks.load_state_dict(P.populate(self.model, self.members, generator))
        fit_quietly(module, _Shuffled(*self.examples.train, self.seed), epochs)
        stack = {n: t.detach().contiguous().clone() for n, t in module.member_stack().items()}
        folder.mkdir(exist_ok=True)
        save_file(stack, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        return stack

    def measured(self) -> Numbers:
        """All methods on all sets of all sizes."""
        found: Numbers = {method: {} for method in self.methods}
        for size in self.settings.sizes:
            count = min(self.settings.sets, self.members // size)
            sets = [
                {n: t[k * size : (k + 1) * size] for n, t in self.stack.items()}
                for k in range(count)
            ]
            rows = [self._one_set(networks) for networks in sets]
            for method in self.methods:
                numbers = [row[method] for row in rows]
                found[method][size] = {
                    key: spread(
                        torch.tensor([number[key] for number in numbers], dtype=torch.float64)
                    )
                    for key in numbers[0]
                }
        return found

    @torch.no_grad()
    def _one_set(self, networks: Params) -> dict[str, dict[str, float]]:
        """What every method makes of one set."""
        losses = [self._judged(self.plain, network)[0] for network in P.unstack(networks)]
        ends = sum(losses) / len(losses)
        result = {m: self._measured(self.plain, networks, m, ends) for m in PERMUTATIONS}
        if self.mixed is not None:
            folded = without_gains(self.model, networks, self.inputs)
            result |= {m: self._measured(self.mixed, folded, m, ends) for m in MATRICES}
        return result

    def _measured(self, kind: Kind, networks: Params, method: str, ends: float) -> dict[str, float]:
        """What one method makes of one set."""
        start = time.process_time()
        moved = aligned(kind, networks, method, self.batches, self.seed)
        seconds = time.process_time() - start
        loss, accuracy = self._judged(kind, self._mean(kind, moved))
        distance = distance_to_mean(moved, kind.compared)
        result = {
            "excess": loss - ends,
            "accuracy": accuracy,
            "distance": distance / distance_to_mean(networks, kind.compared),
            "per_network": distance / stack_size(networks),
            "seconds": seconds,
        }
        if self.kind.prior_std is not None:
            result["draws"] = self._of_draws(kind, moved)
        return result

    def _mean(self, kind: Kind, networks: Params) -> Params:
        """The mean network, with statistics of BatchNorm of its own."""
        floating = {n: t for n, t in networks.items() if t.is_floating_point()}
        mean = {n: floating[n].mean(0) if n in floating else t[0] for n, t in networks.items()}
        return reestimated(kind.model, mean, self.batches)

    def _of_draws(self, kind: Kind, networks: Params) -> float:
        """Mean accuracy of single draws of the Gaussian with the same means and deviations."""
        generator = keyed_generator(self.seed, "draws", self.name)
        drawn = P.unstack(DiagonalGaussian.fit(networks).sample(DRAWS, generator))
        return sum(self._judged(kind, network)[1] for network in drawn) / DRAWS

    def _judged(self, kind: Kind, network: Params) -> tuple[float, float]:
        """Loss and accuracy on the test set."""
        inputs, labels = self.examples.test
        logits = torch.cat([P.apply(kind.model, network, x) for x in inputs.split(500)])
        loss = float(nn.functional.cross_entropy(logits, labels))
        return loss, 100 * float((logits.argmax(-1) == labels).double().mean())


class _Shuffled(DataModule):
    """Examples in an order that the seed decides."""

    def __init__(self, inputs: Tensor, labels: Tensor, seed: int) -> None:
        super().__init__(batch_size=64, seed=seed)
        self.examples = (inputs, labels)

    def load(self) -> Splits:
        return Splits(self.examples, None, self.examples)


# ------------------------------------------------------------ tables and figures
def _findings(found: Mapping[str, Numbers], settings: Scale, seed: int) -> Findings:
    titles = {
        "excess": "Loss of the mean above the mean loss of the networks (nats)",
        "accuracy": "Accuracy of the mean network (%)",
        "draws": f"Mean accuracy of {DRAWS} single draws of one Gaussian for all networks (%)",
        "distance": "Squared distance to the mean, as a share of that without alignment",
        "per_network": "Squared distance to the mean, per network",
        "seconds": "CPU seconds per set",
    }
    note = (
        "Mean and standard deviation over disjoint sets of networks"
        if max(settings.sizes) <= 10
        else "Mean and standard deviation over disjoint sets; the largest is one set"
    )
    tables = {
        key: _table(title, key, found, settings, note)
        for key, title in titles.items()
        if _having(key, found)
    }
    return Findings(
        "alignment",
        "Averages of networks that are brought into one frame",
        tables,
        _figures(found),
        ["Data: scikit-learn's digits; GPT: characters of a module of Python's standard library."],
        {"scale": settings.__dict__, "seed": seed},
    )


def _figures(found: Mapping[str, Numbers]) -> dict[str, Any]:
    """One panel for each architecture, one curve for each method."""

    def figure(key: str, label: str, log: Literal["x", "xy"]) -> Any:
        panels = {
            name: {
                method: measured_line(list(numbers), [n[key] for n in numbers.values()])
                for method, numbers in methods.items()
            }
            for name, methods in found.items()
        }
        return lines_figure(panels, ("networks", label), log=log)

    return {
        "excess": figure("excess", "excess loss (nats)", "xy"),
        "distance": figure("distance", "share of the distance", "x"),
    }


def _table(title: str, key: str, found: Mapping[str, Numbers], settings: Scale, note: str) -> Table:
    header = ["", "method", *(f"N = {size}" for size in settings.sizes)]
    rows: list[list[Cell]] = [
        [name, method, *(number[key] for number in numbers.values())]
        for name, methods in _having(key, found).items()
        for method, numbers in methods.items()
    ]
    return Table(title, header, rows, 1 if key in ("accuracy", "draws", "per_network") else 3, note)


def _having(key: str, found: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """The architectures of which something was measured."""
    return {
        name: methods
        for name, methods in found.items()
        if all(key in number for numbers in methods.values() for number in numbers.values())
    }
