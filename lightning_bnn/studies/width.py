"""P2, table 1: mean-field VI and symmetrized VI by the width of the hidden layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.comparison.problem import Problem
from lightning_bnn.comparison.tables import Measured, Table, spread
from lightning_bnn.judging import averages_of_stack, class_numbers
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

__all__ = ["width"]

_DRAWN = "SGM, K={}"


@dataclass(frozen=True)
class Scale:
    """How many networks are trained, on what, and for how long."""

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
    methods = ["MFVI", *(_DRAWN.format(k) for k in settings.draws), "ours"]
    jobs = {(m, w): _job(settings, w, m) for w in settings.widths for m in methods}
    runs = run_jobs(list(jobs.values()), folder / "runs")
    results = {key: _results(runs[job.name], settings.networks) for key, job in jobs.items()}
    command = next(iter(jobs.values())).command
    publish(_findings(results, methods, settings, command), folder)


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
    overrides["model.init_args.estimator"] = "bethe" if method == "ours" else "uniform"
    if method != "ours":
        overrides["model.init_args.draws"] = int(method.rpartition("=")[2])
    return Job(name, settings.symmetrized, overrides)


@torch.no_grad()
def _results(run: Run, networks: int) -> dict[str, Tensor]:
    """Accuracy, NLL and both ELBOs per example of every member."""
    module, problem = run.module(), run.problem()
    test, likelihood = problem.test_set(), problem.likelihood
    labels = test.targets()
    numbers = []
    for k, mode in enumerate(module.posterior().modes()):
        stack = mode.sample(networks, keyed_generator("width", k))
        averages = averages_of_stack(problem.network, stack, likelihood, test)
        numbers.append(class_numbers(likelihood, [averages], labels))
    accuracies, losses = (torch.tensor([of[name] for of in numbers]) for name in ("acc", "nll"))
    elbo, information = _elbos(module, problem)
    return {"acc": 100 * accuracies, "nll": losses, "elbo": elbo, "sym": elbo + information}


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
) -> Findings:
    def numbers(key: str, method: str) -> list[Measured]:
        return [spread(results[method, width][key]) for width in settings.widths]

    def table(title: str, key: str, digits: int) -> Table:
        header = ["", *(f"{width} units" for width in settings.widths)]
        return Table(title, header, [[m, *numbers(key, m)] for m in methods], digits)

    titles = {"acc": "accuracy (%)", "nll": "negative log-likelihood", "sym": "L^G per example"}
    panels = {
        title: {m: measured_line(settings.widths, numbers(key, m)) for m in methods}
        for key, title in titles.items()
    }
    return Findings(
        "width",
        f"Symmetrized VI by width, {settings.members} seeds (P2, table 1)",
        {
            "accuracy": table(f"Accuracy of the mean of {settings.networks} networks, %", "acc", 2),
            "nll": table("Its negative log-likelihood", "nll", 4),
            "elbo": table("ELBO per example", "elbo", 4),
            "symmetrized": table("L^G per example, by its lower bound", "sym", 4),
        },
        {"width": lines_figure(panels, ("hidden units", ""))},
        [f"Data: {settings.data}. The first of the runs: {command}"],
        {"scale": settings.__dict__},
    )
