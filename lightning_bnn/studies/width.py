"""P2, table 1: mean-field VI and symmetrized VI by the width of the hidden layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.comparison.tables import Cell, Measured, Table, spread
from lightning_bnn.metrics import nll
from lightning_bnn.modules import MFVI, SymmetrizedVI
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.quiet import quiet
from lightning_bnn.randomness import keyed_generator, keyed_randomness
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.predictions import accuracy, mean_probabilities
from lightning_bnn.studies.runs import Job, Run, run_jobs

__all__ = ["width"]

_DRAWN = "SGM, K={}"


@dataclass(frozen=True)
class Scale:
    """What is trained."""

    plain: str
    symmetrized: str
    data: str
    widths: Sequence[int]
    draws: Sequence[int]
    members: int
    epochs: int
    networks: int
    init_std: float


SCALES = {
    "small": Scale(
        "digits_mfvi", "digits_symmetrized_vi", "digits (a substitute for MNIST)",
        (5, 10, 20, 30, 100), (20,), 5, 60, 1000, 0.3,
    ),
    "paper": Scale(
        "mnist_p2_mfvi", "mnist_p2_symmetrized_vi", "MNIST",
        (5, 10, 20, 30), (5, 10, 20), 10, 10, 1000, 0.05,
    ),
}  # fmt: skip


def width(
    scale: Literal["small", "paper"] = "small",
    widths: list[int] | None = None,
    draws: list[int] | None = None,
    members: int | None = None,
    epochs: int | None = None,
    init_std: float | None = None,
    out: str = "studies/width",
) -> None:
    """Train both at several widths; accuracy of the mean of 1000 networks, and both ELBOs.

    SGM is the paper's estimate with K permutations, "ours" the Bethe bound of the permanent, which
    draws nothing. L^G is bounded from below by the capacity bound for all methods alike, so that it
    can be compared.

    Args:
        scale: small or paper.
        widths: of the hidden layer.
        draws: K of the paper's estimate.
        members: runs for every number, side by side.
        epochs: of training.
        init_std: where standard deviations start. The paper does not say; as long as units can be
            told apart, which small deviations make certain, all methods are the same.
        out: folder of the results.
    """
    folder = results_folder(out, "width")
    settings = settings_of(
        SCALES, scale, widths=widths, draws=draws, members=members, epochs=epochs, init_std=init_std
    )
    jobs = {(w, m): _job(settings, w, m) for w in settings.widths for m in _methods(settings)}
    runs = run_jobs(list(jobs.values()), folder / "runs")
    results = {key: _judged(runs[job.name], settings.networks) for key, job in jobs.items()}
    publish(_findings(results, settings, next(iter(jobs.values())).command), folder)


def _methods(settings: Scale) -> list[str]:
    return ["MFVI", *(_DRAWN.format(k) for k in settings.draws), "ours"]


def _job(settings: Scale, units: int, method: str) -> Job:
    overrides: dict[str, Any] = {
        "model.init_args.network.init_args.hidden": [units],
        "model.init_args.members": settings.members,
        "model.init_args.init_std": settings.init_std,
        "trainer.max_epochs": settings.epochs,
    }
    name = f"{method}_{units}".replace(", K=", "_").lower()
    if method == "MFVI":
        return Job(name, settings.plain, overrides)
    if method == "ours":
        overrides["model.init_args.estimator"] = "bethe"
    else:
        overrides["model.init_args.estimator"] = "uniform"
        overrides["model.init_args.draws"] = int(method.rpartition("=")[2])
    return Job(name, settings.symmetrized, overrides)


@torch.no_grad()
def _judged(run: Run, networks: int) -> dict[str, Tensor]:
    """Accuracy and ELBOs per example of every member."""
    module, around = run.module(), run.surroundings()
    assert isinstance(module, MFVI)
    test = around.inside()
    labels = test.targets()
    accuracies, losses = [], []
    for k, mode in enumerate(module.modes()):
        drawn = mode.sample(networks, keyed_generator("width", k))
        probs = mean_probabilities(around.template, drawn, test)
        accuracies.append(accuracy(probs, labels))
        losses.append(float(nll(probs, labels)))
    judge = SymmetrizedVI(
        around.template,
        estimator="capacity",
        members=module.members,
        prior_std=module.prior_std,
        num_data=getattr(around.source, "num_data", None),
        elbo_samples=20,
    )
    judge.load_state_dict(module.state_dict())
    judge.example_input_array = around.example()
    batches = list(around.training(50))
    with quiet(), keyed_randomness("width", "elbo"):
        found = [judge.losses((inputs,), targets) for inputs, targets in batches]
    assert judge.num_data is not None
    elbo, information = (
        torch.stack([terms[name] for terms in found]).mean(0) / judge.num_data
        for name in ("elbo", "permutation_info")
    )
    return {
        "acc": torch.tensor(accuracies),
        "nll": torch.tensor(losses),
        "elbo": elbo,
        "sym": elbo + information,
    }


def _findings(
    results: Mapping[tuple[int, str], Mapping[str, Tensor]], settings: Scale, command: str
) -> Findings:
    methods = _methods(settings)

    def table(title: str, key: str, digits: int) -> Table:
        rows: list[list[Cell]] = [
            [m, *(spread(results[w, m][key]) for w in settings.widths)] for m in methods
        ]
        return Table(title, ["", *(f"{w} units" for w in settings.widths)], rows, digits)

    x = torch.tensor([float(w) for w in settings.widths])

    def line(key: str, method: str) -> Line:
        found = [spread(results[w, method][key]) for w in settings.widths]
        return _line(x, found)

    return Findings(
        "width",
        f"Symmetrized VI by width, {settings.members} seeds (P2, table 1)",
        {
            "accuracy": table(f"Accuracy of the mean of {settings.networks} networks, %", "acc", 2),
            "nll": table("Its negative log-likelihood", "nll", 4),
            "elbo": table("ELBO per example", "elbo", 4),
            "symmetrized": table("L^G per example, by its lower bound", "sym", 4),
        },
        {
            "width": lines_figure(
                {
                    "accuracy (%)": {m: line("acc", m) for m in methods},
                    "negative log-likelihood": {m: line("nll", m) for m in methods},
                    "L^G per example": {m: line("sym", m) for m in methods},
                },
                ("hidden units", ""),
            )
        },
        [f"Data: {settings.data}. The first of the runs: {command}"],
        {"scale": settings.__dict__},
    )


def _line(x: Tensor, found: Sequence[Measured]) -> Line:
    mean, error = (torch.tensor([pair[k] for pair in found]) for k in (0, 1))
    return Line(x, mean, mean - error, mean + error)
