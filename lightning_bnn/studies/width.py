"""P2, table 1: mean-field VI and symmetrized VI by the width of the hidden layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.evaluation import class_numbers, predictions_of_stack
from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.modules import SymmetrizedVI
from lightning_bnn.plots import lines_figure
from lightning_bnn.quiet_runs import quiet
from lightning_bnn.randomness import keyed_generator, keyed_randomness
from lightning_bnn.studies.findings import (
    Findings,
    measured_line,
    publish,
    results_folder,
    settings_of,
)
from lightning_bnn.studies.runs import Job, Run, run_jobs
from lightning_bnn.tables import Measured, Table, spread

__all__ = ["width"]

_DRAWN = "SGM, K={}"
_TUNED, _FROM_THERE = "MFVI, tuned", "ours, as tuned MFVI"
_FIRST_OF_TUNING = 1000
"""Number of the first member on which a start is chosen: others than those that are shown."""


@dataclass(frozen=True)
class Scale:
    """The number of networks, their data, and the length of training."""

    plain: str
    symmetrized: str
    data: str
    widths: Sequence[int]
    draws: Sequence[int]
    members: int
    epochs: int
    networks: int
    init_std: float
    starts: Sequence[float]
    warmups: Sequence[float] = (0.0, 0.3)
    tuning: int = 2


SCALES = {
    "small": Scale(
        "digits_mfvi", "digits_symmetrized_vi", "digits (a substitute for MNIST)",
        (5, 10, 20, 30, 100), (20,), 5, 60, 1000, 0.3, (0.01, 0.05, 0.1, 0.3),
    ),
    "paper": Scale(
        "mnist_p2_mfvi", "mnist_p2_symmetrized_vi", "MNIST",
        (5, 10, 20, 30), (5, 10, 20), 10, 10, 1000, 0.05, (0.01, 0.05, 0.1),
    ),
}  # fmt: skip


def width(
    scale: Literal["small", "paper"] = "small",
    widths: list[int] | None = None,
    draws: list[int] | None = None,
    members: int | None = None,
    epochs: int | None = None,
    init_std: float | None = None,
    starts: list[float] | None = None,
    out: str = "studies/width",
) -> None:
    """Train symmetrized and mean-field VI at several widths. Print accuracy and both ELBOs.

    Accuracies are of the mean of 1000 networks. SGM is the paper's estimate with K permutations,
    "ours" the Bethe bound of the permanent, which draws nothing. L^G is bounded from below by the
    capacity bound for all methods alike, so that it can be compared. "MFVI, tuned" has the start
    and the warm-up (none, or 0.3 of the epochs) that are best for two other seeds: by the negative
    log-likelihood on validation data, or by the ELBO if nothing is held out. "ours, as tuned MFVI"
    has the same start and warm-up.

    Args:
        scale: small, which runs in minutes, or paper, the paper's recipe.
        widths: widths of the hidden layer.
        draws: numbers of permutations, K, of the paper's estimate.
        members: number of runs for every number, side by side.
        epochs: epochs of training.
        init_std: initial standard deviations of the weights. The paper does not state them; as long
            as units can be told apart, which small deviations make certain, all methods are the
            same.
        starts: initial standard deviations that tuned MFVI may choose from.
        out: folder for the results.
    """
    folder = results_folder(out, "width")
    settings = settings_of(
        SCALES, scale, widths=widths, draws=draws, members=members, epochs=epochs,
        init_std=init_std, starts=starts,
    )  # fmt: skip
    methods = ["MFVI", *(_DRAWN.format(k) for k in settings.draws), "ours"]
    jobs = {(m, w): _job(settings, w, m) for w in settings.widths for m in methods}
    chosen = {w: _chosen(settings, w, folder) for w in settings.widths}
    for w, options in chosen.items():
        for name, method in ((_TUNED, "MFVI"), (_FROM_THERE, "ours")):
            jobs[name, w] = _job(settings, w, method, "_tuned", options)
    methods += [_TUNED, _FROM_THERE]
    runs = run_jobs(list(jobs.values()), folder / "runs")
    results = {key: _results(runs[job.name], settings.networks) for key, job in jobs.items()}
    command = next(iter(jobs.values())).command
    publish(_findings(results, methods, settings, command, chosen), folder)


# ------------------------------------------------------------ runs
def _chosen(settings: Scale, units: int, folder: Path) -> dict[str, Any]:
    """The start and the warm-up of MFVI that are best for seeds that are not shown."""
    warmups = dict.fromkeys(round(share * settings.epochs) for share in settings.warmups)
    options = [
        {"model.init_args.init_std": start, "model.init_args.kl_warmup": epochs}
        for start in settings.starts
        for epochs in warmups
    ]
    if len(options) == 1:
        return options[0]
    others = {
        "model.init_args.members": settings.tuning,
        "model.init_args.first_member": _FIRST_OF_TUNING,
    }
    jobs = [
        _job(settings, units, "MFVI", f"_tuning_{k}", {**others, **some})
        for k, some in enumerate(options)
    ]
    runs = run_jobs(jobs, folder / "runs")
    criteria = [_criterion(runs[job.name], settings.networks) for job in jobs]
    return options[int(torch.tensor(criteria).argmin())]


@torch.no_grad()
def _criterion(run: Run, networks: int) -> float:
    """Negative log-likelihood on validation data, or minus the ELBO without such data."""
    module, problem = run.module(), run.problem()
    held_out = problem.validation_set()
    if held_out is None:
        return -float(_elbos(module, problem)[0].mean())
    return float(_judged(module, problem, held_out, networks)["nll"].mean())


def _job(settings: Scale, units: int, method: str, suffix: str = "", options: Any = None) -> Job:
    overrides: dict[str, Any] = {
        "model.init_args.network.init_args.hidden": [units],
        "model.init_args.members": settings.members,
        "model.init_args.init_std": settings.init_std,
        "trainer.max_epochs": settings.epochs,
    }
    overrides |= options or {}
    name = f"{method}_{units}{suffix}".replace(", K=", "_").lower()
    if method == "MFVI":
        return Job(name, settings.plain, overrides)
    overrides["model.init_args.estimator"] = "bethe" if method == "ours" else "uniform"
    if method != "ours":
        overrides["model.init_args.draws"] = int(method.rpartition("=")[2])
    return Job(name, settings.symmetrized, overrides)


@torch.no_grad()
def _results(run: Run, networks: int) -> dict[str, Tensor]:
    """Accuracy, NLL and both ELBOs per example of every member."""
    module, problem = run.module(), run.problem()
    elbo, information = _elbos(module, problem)
    judged = _judged(module, problem, problem.test_set(), networks)
    return {**judged, "elbo": elbo, "sym": elbo + information}


def _judged(module: Any, problem: Problem, data: Any, networks: int) -> dict[str, Tensor]:
    """Accuracy and NLL of every member."""
    likelihood, labels = problem.likelihood, data.targets()
    numbers = []
    for k, mode in enumerate(module.posterior().modes()):
        stack = mode.sample(networks, keyed_generator("width", k))
        averages = predictions_of_stack(problem.network, stack, likelihood, data)
        numbers.append(class_numbers(likelihood, [averages], labels))
    accuracies, losses = (torch.tensor([of[name] for of in numbers]) for name in ("acc", "nll"))
    return {"acc": 100 * accuracies, "nll": losses}


def _elbos(module: Any, problem: Problem) -> tuple[Tensor, Tensor]:
    """ELBO per example, and the capacity bound of the information, whatever it was trained by."""
    judge = SymmetrizedVI(
        problem.network,
        estimator="capacity",
        members=module.members,
        prior_std=module.method.prior.std,
        num_data=getattr(problem.source, "num_data", None),
        elbo_samples=20,
    )
    judge.load_state_dict(module.state_dict())
    judge.example_input_array = problem.example()
    batches = list(problem.training_set(50))
    with quiet(), keyed_randomness("width", "elbo"):
        terms = [judge.losses((inputs,), targets) for inputs, targets in batches]
    assert judge.num_data is not None
    elbo, information = (
        torch.stack([of_batch[name] for of_batch in terms]).mean(0) / judge.num_data
        for name in ("elbo", "permutation_info")
    )
    return elbo, information


def _findings(
    results: Mapping[tuple[str, int], Mapping[str, Tensor]],
    methods: Sequence[str],
    settings: Scale,
    command: str,
    chosen: Mapping[int, Mapping[str, Any]],
) -> Findings:
    def numbers(key: str, method: str) -> list[Measured]:
        return [spread(results[method, width][key]) for width in settings.widths]

    def table(title: str, key: str, digits: int) -> Table:
        header = ["", *(f"{width} units" for width in settings.widths)]
        return Table(title, header, [[m, *numbers(key, m)] for m in methods], digits)

    return Findings(
        "width",
        f"Symmetrized VI by width, {settings.members} seeds (P2, table 1)",
        {
            "accuracy": table(f"Accuracy of the mean of {settings.networks} networks, %", "acc", 2),
            "nll": table("Its negative log-likelihood", "nll", 4),
            "elbo": table("ELBO per example", "elbo", 4),
            "symmetrized": table("L^G per example, by its lower bound", "sym", 4),
        },
        {"width": _figure(results, methods, settings.widths)},
        [
            f"±: standard deviation over {settings.members} seeds. Data: {settings.data}. The "
            f"first of the runs: {command}",
            "Tuned MFVI starts at (and warms up for so many epochs): "
            + "; ".join(f"{w} units: {_in_words(of)}" for w, of in chosen.items()),
        ],
        {"scale": settings.__dict__},
    )


def _figure(
    results: Mapping[tuple[str, int], Mapping[str, Tensor]],
    methods: Sequence[str],
    widths: Sequence[int],
) -> Any:
    """One panel for each number, one curve for each method."""
    titles = {"acc": "accuracy (%)", "nll": "negative log-likelihood", "sym": "L^G per example"}
    panels = {
        title: {
            method: measured_line(widths, [spread(results[method, w][key]) for w in widths])
            for method in methods
        }
        for key, title in titles.items()
    }
    return lines_figure(panels, ("hidden units", ""), log="x")


def _in_words(options: Mapping[str, Any]) -> str:
    start, epochs = options.values()
    return f"{start:g} ({epochs})"
