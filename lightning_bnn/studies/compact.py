"""P3, table 1 and figure 3: posteriors as one Gaussian, with and without matching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_bnn.comparison.problem import Surroundings
from lightning_bnn.comparison.stored_posteriors import contender_of, stack_of
from lightning_bnn.comparison.tables import Cell, Table
from lightning_bnn.metrics import agreement, total_variation
from lightning_bnn.params import Params
from lightning_bnn.plots import Line, histograms_figure, lines_figure
from lightning_bnn.posteriors import DiagonalGaussian
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.predictions import accuracy, mean_probabilities
from lightning_bnn.studies.runs import Job, run_jobs
from lightning_bnn.symmetry import Symmetries, discover

__all__ = ["compact"]

_KEPT = (100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 1)


@dataclass(frozen=True)
class Scale:
    """What is trained."""

    presets: Mapping[str, str]
    data: str
    hidden: int
    batches: int


SCALES = {
    "small": Scale(
        {"HMC": "digits_hmc", "Ensemble": "digits_prior_ensemble", "VI": "digits_mfvi"},
        "digits (a substitute for MNIST, and 32 units for 512)",
        32,
        10,
    ),
    "paper": Scale(
        {"HMC": "mnist_p3_hmc", "Ensemble": "mnist_p3_ensemble", "VI": "mnist_p3_mfvi"},
        "MNIST",
        512,
        600,
    ),
}


def compact(
    scale: Literal["small", "paper"] = "small",
    hidden: int | None = None,
    draws: int = 100,
    seed: int = 0,
    out: str = "studies/compact",
) -> None:
    """Summarise HMC, an ensemble and VI by means and standard deviations of their weights.

    Over networks as they are, that Gaussian (q_d) is worthless; with all networks matched to one of
    them (q_r) it predicts nearly as well as the networks. Weights are then pruned by their standard
    deviations, also by those of another method.

    Args:
        scale: small, or that of the paper.
        hidden: units of the hidden layer.
        draws: networks drawn from every Gaussian.
        seed: of the draws.
        out: folder of the results.
    """
    if draws < 1:
        raise ValueError(f"`draws` must be at least 1, got {draws}.")
    folder = results_folder(out, "compact")
    settings = settings_of(SCALES, scale, hidden=hidden)
    change = {"model.init_args.network.init_args.hidden": [settings.hidden]}
    jobs = [Job(name, preset, change) for name, preset in settings.presets.items()]
    runs = run_jobs(jobs, folder / "runs")
    around = runs["HMC"].surroundings()
    study = _Study(around, settings.batches, draws, seed)
    networks = {
        name: stack_of(contender_of(name, runs[name].module())) for name in ("HMC", "Ensemble")
    }
    vi = runs["VI"].module().posterior()
    assert isinstance(vi, DiagonalGaussian)
    findings = study.findings(networks, vi, [job.command for job in jobs])
    publish(findings, folder)


class _Study:
    """Everything that needs the network, the data and the draws."""

    def __init__(self, around: Surroundings, batches: int, draws: int, seed: int) -> None:
        self.model: nn.Module = around.template.eval()
        self.test, self.draws, self.seed = around.inside(), draws, seed
        self.labels = self.test.targets()
        self.symmetries: Symmetries = discover(self.model, around.example())
        self.inputs = [inputs for inputs, _ in around.training(batches)]

    def findings(
        self, networks: Mapping[str, Params], vi: DiagonalGaussian, commands: Sequence[str]
    ) -> Findings:
        """Table and figures."""
        hmc = self.probabilities(networks["HMC"])
        gaussians: dict[str, DiagonalGaussian] = {}
        rows = []
        for name, stack in networks.items():
            own = {
                f"{name} q_d": DiagonalGaussian.fit(stack),
                f"{name} q_r": DiagonalGaussian.fit(stack, align="activations", **self.matching),
            }
            gaussians |= own
            rows.append(self.row(f"{name} networks", self.probabilities(stack), None, hmc))
            rows += [self.gaussian_row(title, q, hmc) for title, q in own.items()]
        gaussians["VI"] = vi
        rows.append(self.gaussian_row("VI", vi, hmc))
        header = ["", "accuracy %", "of the mean %", "agreement", "total variation"]
        note = (
            "q_d: means and deviations of the weights as they are; q_r: of networks matched with "
            "the first by activations. Agreement and total variation with the HMC networks."
        )
        pruned = self.pruning(gaussians, networks["Ensemble"])
        deviations = {title: q.log_std.detach().exp() for title, q in gaussians.items()}
        return Findings(
            "compact",
            "Compact representations of posteriors (P3, table 1 and figure 3)",
            {
                "table1": Table(f"Table 1, {self.draws} draws", header, rows, 4, note),
                "pruning": _pruning_table(pruned),
            },
            {
                "deviations": histograms_figure(
                    {title: {"weights": values} for title, values in deviations.items()},
                    "standard deviation",
                ),
                "pruning": _pruning_figure(pruned),
            },
            ["Trained by:", *commands],
            {"commands": list(commands), "draws": self.draws, "seed": self.seed},
        )

    @property
    def matching(self) -> dict[str, Any]:
        """What activation matching needs."""
        return {"symmetries": self.symmetries, "model": self.model, "batches": self.inputs}

    def probabilities(self, networks: Params) -> Tensor:
        """Of a stack, or of one network."""
        return mean_probabilities(self.model, networks, self.test)

    def gaussian_row(self, title: str, q: DiagonalGaussian, hmc: Tensor) -> list[Cell]:
        """Predictions by draws, and by the mean alone."""
        with torch.no_grad():
            drawn = q.sample(self.draws, keyed_generator(self.seed, "compact", title))
        mean = accuracy(self.probabilities(q.centre), self.labels)
        return self.row(title, self.probabilities(drawn), mean, hmc)

    def row(self, title: str, probs: Tensor, mean: float | None, hmc: Tensor) -> list[Cell]:
        """One line of table 1."""
        return [
            title,
            accuracy(probs, self.labels),
            "" if mean is None else mean,
            float(agreement(probs, hmc).double().mean()),
            float(total_variation(probs, hmc).double().mean()),
        ]

    # -------------------------------------------------------- pruning
    def pruning(
        self, gaussians: Mapping[str, DiagonalGaussian], ensemble: Params
    ) -> dict[str, list[float]]:
        """Accuracy of means by the part of the weights that is kept."""
        single = {name: t[0] for name, t in ensemble.items()}
        mean, hmc = gaussians["Ensemble q_r"], gaussians["HMC q_r"]
        alone = DiagonalGaussian(single, mean.deviations)
        curves = {
            **{f"{name}, own deviations": gaussians[name] for name in _REBASED},
            "Ensemble q_r, deviations of HMC": self.mixed(mean, hmc),
            "Ensemble q_r, deviations of VI": self.mixed(mean, gaussians["VI"]),
            "one network, deviations of HMC": self.mixed(alone, hmc),
        }
        return {
            title: [
                accuracy(self.probabilities(q.prune(1 - kept / 100)), self.labels) for kept in _KEPT
            ]
            for title, q in curves.items()
        }

    def mixed(self, mean: DiagonalGaussian, std: DiagonalGaussian) -> DiagonalGaussian:
        """Means of one, deviations of another."""
        return mean.with_deviations_of(std, "activations", **self.matching)


_REBASED = ("HMC q_r", "Ensemble q_r", "VI")


def _pruning_table(curves: Mapping[str, Sequence[float]]) -> Table:
    rows: list[list[Cell]] = [[title, *curve] for title, curve in curves.items()]
    header = ["accuracy % of the mean with ... of the weights", *(f"{k} %" for k in _KEPT)]
    return Table("Figure 3: weights of the largest deviations removed", header, rows, 1)


def _pruning_figure(curves: Mapping[str, Sequence[float]]) -> Any:
    kept = torch.tensor([float(k) for k in _KEPT])
    lines = {title: Line(kept, torch.tensor(curve)) for title, curve in curves.items()}
    return lines_figure({"": lines}, ("weights kept (%)", "accuracy of the mean (%)"))
