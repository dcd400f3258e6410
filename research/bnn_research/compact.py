"""P3, table 1 and figure 3: posteriors as one Gaussian, with and without matching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bnn_research.populations import study_job
from bnn_research.scales import settings_of
from lightning_bnn.commands.runs import reseeded, run_jobs
from lightning_bnn.evaluation import Predictions, predictions_of_mode
from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.evaluation.stored_posteriors import posterior_of
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import Line, histograms_figure, lines_figure
from lightning_bnn.posteriors import DiagonalGaussian, Empirical
from lightning_bnn.predictions import numbers
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome, align, match_activations, permute
from weightsym import params as P
from weightsym.params import Params, keyed_generator

KINDS = ("networks", "q_d", "q_r", "q_r joint")
_SETS = 10
"""Number of sets of draws whose numbers are averaged: single sets differ by some points."""
_KEPT = (100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 5, 1)


@dataclass(frozen=True)
class Scale:
    """The number of networks, their data, and the length of training."""

    presets: Mapping[str, str]
    hidden: int
    batches: int
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_PRESETS = {"HMC": "digits_hmc", "Ensemble": "digits_prior_ensemble", "VI": "digits_mfvi"}
_SHORT = {"trainer.max_epochs": 2}
_SHORT_CHAIN = {
    "model.init_args.members": 2,
    "model.init_args.burn_in": 0,
    "model.init_args.every_n_steps": 1,
    "model.init_args.optimizer.init_args.leapfrog_steps": 2,
    "model.init_args.optimizer.init_args.adapt_steps": 0,
    "trainer.max_epochs": 3,
}
SCALES = {
    "smallest": Scale(_PRESETS, 4, 2, {"HMC": _SHORT_CHAIN, "Ensemble": _SHORT, "VI": _SHORT}),
    "small": Scale(  # digits as a substitute for MNIST, and 32 units for 512
        _PRESETS, 32, 10
    ),
    "paper": Scale(
        {"HMC": "mnist_p3_hmc", "Ensemble": "mnist_p3_ensemble", "VI": "mnist_p3_mfvi"}, 512, 600
    ),
}


def compact(
    scale: Literal["smallest", "small", "paper"] = "small",
    hidden: int | None = None,
    draws: int = 100,
    seed: int = 0,
    out: str = "studies/compact",
) -> Outcome:
    """Summarise HMC, an ensemble and VI by means and standard deviations of their weights.

    For networks as they are, that Gaussian (q_d) is useless. If all networks are matched to one of
    them (q_r), it predicts nearly as well as the networks. Weights are then pruned by their
    standard deviations, also by those of another method.

    Args:
        scale: smallest, to test that it runs; small; or paper, the paper's recipe.
        hidden: number of hidden units.
        draws: number of networks in a set of draws from a Gaussian; their predictions are averaged.
        seed: random seed of the initial weights and the draws.
        out: folder for the results.
    """
    if draws < 1:
        raise ValueError(f"`draws` must be at least 1, got {draws}.")
    folder = results_folder(out, "compact")
    settings = settings_of(SCALES, scale, hidden=hidden)
    change = {"model.init_args.network.init_args.hidden": [settings.hidden]}
    jobs = [
        reseeded(study_job(name, preset, {**change, **settings.changes.get(name, {})}), seed)
        for name, preset in settings.presets.items()
    ]
    runs = run_jobs(jobs, folder / "runs")
    study = CompactStudy(runs["HMC"].problem(), settings.batches, draws, seed)
    networks = {
        name: posterior_of(name, runs[name].module()).networks() for name in ("HMC", "Ensemble")
    }
    vi = runs["VI"].module().posterior()
    assert isinstance(vi, DiagonalGaussian)
    return publish(study.findings(networks, vi, [job.command for job in jobs]), folder)


class CompactStudy:
    """Everything that depends on the network, the data and the draws."""

    def __init__(self, problem: Problem, batches: int, draws: int, seed: int) -> None:
        self.problem, self.draws, self.seed = problem, draws, seed
        self.test = problem.test_set()
        self.symmetries, self.model = problem.symmetries(), problem.network.eval()
        self.batches = [inputs for inputs, _ in problem.training_set(batches)]

    def matched(self, networks: Params, reference: Params) -> list[Tensor]:
        """Return permutations that match activations to those of a reference."""
        return match_activations(self.model, networks, reference, self.symmetries, self.batches)

    def findings(
        self, networks: Mapping[str, Params], vi: DiagonalGaussian, commands: Sequence[str]
    ) -> Findings:
        """Return the table and figures of the study."""
        gaussians: dict[str, DiagonalGaussian] = {}
        for name, stack in networks.items():
            gaussians[f"{name} q_d"] = DiagonalGaussian.fit(stack)
            first = {name: t[0] for name, t in stack.items()}
            by_activations = permute(stack, self.symmetries, self.matched(stack, first))
            gaussians[f"{name} q_r"] = DiagonalGaussian.fit(by_activations)
            jointly = align(stack, self.symmetries).element(stack)
            gaussians[f"{name} q_r joint"] = DiagonalGaussian.fit(jointly)
        gaussians["VI"] = vi
        header = ["", "accuracy %", "of the mean %", "agreement", "total variation"]
        note = (
            "q_d: means and deviations of the weights as they are; q_r: of networks matched with "
            "the first by activations, or jointly by weights. Agreement and total variation with "
            "the HMC networks."
        )
        ensemble = networks["Ensemble"]
        curves = {k: self.pruning(gaussians, ensemble, k) for k in ("q_r", "q_r joint")}
        rows = self.rows(networks, gaussians)
        deviations = {
            title: {"weights": q.log_std.detach().exp()} for title, q in gaussians.items()
        }
        return Findings(
            "compact",
            "Compact representations of posteriors (P3, table 1 and figure 3)",
            {
                "table1": Table(
                    f"Table 1, {self.draws} draws in the mean of {_SETS} sets",
                    header,
                    rows,
                    4,
                    note,
                ),
                "pruning": _pruning_table(curves["q_r"], "with the first by activations"),
                "pruning_joint": _pruning_table(curves["q_r joint"], "jointly by weights"),
            },
            {
                "deviations": histograms_figure(deviations, "standard deviation"),
                "pruning": _pruning_figure(curves),
            },
            ["Trained by:", *commands],
            {"commands": list(commands), "draws": self.draws, "seed": self.seed},
        )

    # -------------------------------------------------------- table 1
    def rows(
        self, networks: Mapping[str, Params], gaussians: Mapping[str, DiagonalGaussian]
    ) -> list[list[Cell]]:
        """Return rows of networks, then of draws and mean of their Gaussians, compared with HMC."""
        hmc = self.predictions(networks["HMC"])
        rows = {f"{name} networks": self.row([stack], "", hmc) for name, stack in networks.items()}
        for title, gaussian in gaussians.items():
            rows[title] = self.row(self.drawn(gaussian, title), self.accuracy(gaussian.centre), hmc)
        order = [f"{name} {form}" for name in networks for form in KINDS]
        return [[title, *rows[title]] for title in (*order, "VI")]

    @torch.no_grad()
    def drawn(self, gaussian: DiagonalGaussian, title: str) -> Iterator[Params]:
        """Return sets of draws.

        Args:
            gaussian: distribution of the draws.
            title: seeds the random numbers, together with the seed.
        """
        for k in range(_SETS):
            generator = keyed_generator(self.seed, "compact", title, k)
            yield gaussian.sample(self.draws, generator)

    def row(self, sets: Iterable[Params], of_mean: Cell, hmc: Predictions) -> list[Cell]:
        """Return one row of table 1, without its title: the mean over sets of networks."""
        rows = []
        for networks in sets:
            predictions = self.predictions(networks)
            scores = predictions.scores() | predictions.distances(hmc)
            rows.append([*numbers(scores, ("acc", "agree", "tv")).values()])
        accuracy, *others = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
        return [100 * accuracy, of_mean, *others]

    def predictions(self, networks: Params) -> Predictions:
        """Return predictions of a stack, or of one network."""
        network, likelihood = self.problem.network, self.problem.likelihood
        stacked = P.is_stacked(networks, P.of(network))
        mode = Empirical(networks if stacked else {n: t[None] for n, t in networks.items()})
        sets, counts = [self.test], (mode.size,)
        return predictions_of_mode(mode, network, likelihood, sets, counts, 0)[0][0]

    def accuracy(self, networks: Params) -> float:
        """Return the accuracy of the mean prediction on the test set, in per cent."""
        return 100 * self.predictions(networks).numbers("acc")["acc"]

    # -------------------------------------------------------- pruning
    def pruning(
        self, gaussians: Mapping[str, DiagonalGaussian], ensemble: Params, form: str = "q_r"
    ) -> dict[str, list[float]]:
        """Return the accuracy of means by the fraction of remaining weights.

        Args:
            gaussians: by their titles in table 1.
            ensemble: a stack, whose first network is also pruned alone.
            form: of the Gaussians of networks that were matched: q_r or q_r joint.
        """
        mean, hmc, vi = (gaussians[name] for name in (f"Ensemble {form}", f"HMC {form}", "VI"))
        alone = DiagonalGaussian({name: t[0] for name, t in ensemble.items()}, mean.deviations)
        curves = {
            f"HMC {form}, own deviations": hmc,
            f"Ensemble {form}, own deviations": mean,
            "VI, own deviations": vi,
            f"Ensemble {form}, deviations of HMC": self.mixed(mean, hmc),
            f"Ensemble {form}, deviations of VI": self.mixed(mean, vi),
            "one network, deviations of HMC": self.mixed(alone, hmc),
        }
        return {
            title: [self.accuracy(q.prune(1 - share / 100)) for share in _KEPT]
            for title, q in curves.items()
        }

    def mixed(self, mean: DiagonalGaussian, std: DiagonalGaussian) -> DiagonalGaussian:
        """Combine the means of one Gaussian with deviations of another, matched to these means."""
        moves = self.matched(std.centre, mean.centre)
        return DiagonalGaussian(mean.centre, permute(std.deviations, self.symmetries, moves))


# ------------------------------------------------------------ figure 3
def _pruning_table(curves: Mapping[str, list[float]], matched: str) -> Table:
    header = ["accuracy % of the mean with ... of the weights", *(f"{k} %" for k in _KEPT)]
    title = f"Figure 3: weights of the largest deviations removed; networks matched {matched}"
    rows: list[list[Cell]] = [[name, *curve] for name, curve in curves.items()]
    return Table(title, header, rows, 1)


def _pruning_figure(curves: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """Plot one panel for each way of matching, whose curves have the same names in both."""
    share = torch.tensor([float(k) for k in _KEPT])
    titles = {"q_r": "q_r: by activations", "q_r joint": "q_r: joint"}
    panels = {
        titles[form]: {
            name.replace(form, "q_r"): Line(share, torch.tensor(curve))
            for name, curve in some.items()
        }
        for form, some in curves.items()
    }
    return lines_figure(panels, ("weights kept (%)", "accuracy of the mean (%)"))
