"""P2, table 1: mean-field VI and symmetrized VI by the width of the hidden layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bnn_research.populations import study_job
from bnn_research.scales import settings_of
from lightning_bnn.commands.runs import Job, StoredRun, run_jobs
from lightning_bnn.evaluation import predictions_of_mode
from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.modules import SymmetrizedVI
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.posteriors import Empirical
from lightning_bnn.quiet_runs import quiet
from lightning_bnn.tables import Measured, Table, spread
from weightsym import Outcome
from weightsym.params import keyed_generator, keyed_randomness


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
    init_std: float
    networks: int = 1000


SCALES = {
    "small": Scale(
        "digits_mfvi", "digits_symmetrized_vi", "digits (a substitute for MNIST)",
        (5, 10, 20, 30, 100), (20,), 5, 60, 0.3,
    ),
    "paper": Scale(
        "mnist_p2_mfvi", "mnist_p2_symmetrized_vi", "MNIST",
        (5, 10, 20, 30), (5, 10, 20), 10, 10, 0.05,
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
) -> Outcome:
    """Train symmetrized and mean-field VI at several widths. Print accuracy and both ELBOs.

    Accuracies are of the mean of 1000 networks. SGM is the paper's estimate with K permutations,
    "ours" the Bethe bound of the permanent, which needs no draws. L^G is bounded from below by the
    capacity bound for all methods, so that it is comparable.

    Args:
        scale: small, which runs in minutes, or paper, the paper's recipe.
        widths: widths of the hidden layer.
        draws: numbers of permutations, K, of the paper's estimate.
        members: number of runs for every number, side by side.
        epochs: number of training epochs.
        init_std: initial standard deviations of the weights, which the paper does not state. While
            units are distinguishable, as small deviations ensure, all methods are equal.
        out: folder for the results.
    """
    folder = results_folder(out, "width")
    settings = settings_of(
        SCALES, scale, widths=widths, draws=draws, members=members, epochs=epochs,
        init_std=init_std,
    )  # fmt: skip
    methods = {"MFVI": {}, **{f"SGM, K={k}": _symmetrized("uniform", k) for k in settings.draws}}
    methods["ours"] = _symmetrized("bethe")
    jobs = {
        (method, units): _job(settings, units, method, options)
        for units in settings.widths
        for method, options in methods.items()
    }
    runs = run_jobs(list(jobs.values()), folder / "runs")
    results = {key: _results(runs[job.name], settings.networks) for key, job in jobs.items()}
    command = next(iter(jobs.values())).command
    return publish(_findings(results, list(methods), settings, command), folder)


def _symmetrized(estimator: str, draws: int | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"model.init_args.estimator": estimator}
    return options if draws is None else {**options, "model.init_args.draws": draws}


def _job(settings: Scale, units: int, method: str, options: Mapping[str, Any]) -> Job:
    overrides: dict[str, Any] = {
        "model.init_args.network.init_args.hidden": [units],
        "model.init_args.members": settings.members,
        "model.init_args.init_std": settings.init_std,
        "trainer.max_epochs": settings.epochs,
    }
    name = f"{method}_{units}".replace(", K=", "_").lower()
    preset = settings.symmetrized if options else settings.plain
    return study_job(name, preset, {**overrides, **options})


@torch.no_grad()
def _results(run: StoredRun, networks: int) -> dict[str, Tensor]:
    """Return accuracy, NLL and both ELBOs per example of every member."""
    module, problem = run.module(), run.problem()
    data, likelihood = problem.test_set(), problem.likelihood
    numbers = []
    for k, mode in enumerate(module.posterior().modes()):
        stack = mode.sample(networks, keyed_generator("width", k))
        ((predictions,),) = predictions_of_mode(
            Empirical(stack), problem.network, likelihood, [data], (networks,), "width", k
        )
        numbers.append(predictions.numbers("acc", "nll"))
    accuracies, losses = (torch.tensor([row[name] for row in numbers]) for name in ("acc", "nll"))
    return {"acc": 100 * accuracies, "nll": losses, **_elbos(module, problem)}


def _elbos(module: Any, problem: Problem) -> dict[str, Tensor]:
    """Return the ELBO per example, without and with the capacity bound, for any method."""
    source: Any = problem.source
    judge = SymmetrizedVI(
        problem.network,
        estimator="capacity",
        members=module.members,
        prior_std=module.method.prior.std,
        num_data=source.num_data,
        elbo_samples=20,
    )
    judge.load_state_dict(module.state_dict())
    judge.example_input_array = problem.example()
    batches = list(problem.training_set(50))
    with quiet(), keyed_randomness("width", "elbo"):
        terms = [judge.losses((inputs,), targets) for inputs, targets in batches]
    elbo, information = (
        torch.stack([of_batch[name] for of_batch in terms]).mean(0) / source.num_data
        for name in ("elbo", "permutation_info")
    )
    return {"elbo": elbo, "sym": elbo + information}


def _findings(
    results: Mapping[tuple[str, int], Mapping[str, Tensor]],
    methods: Sequence[str],
    settings: Scale,
    command: str,
) -> Findings:
    titles = {
        "acc": f"Accuracy of the mean of {settings.networks} networks, %",
        "nll": "Its negative log-likelihood",
        "elbo": "ELBO per example",
        "sym": "L^G per example, by its lower bound",
    }
    numbers = {
        key: {m: [spread(results[m, w][key]) for w in settings.widths] for m in methods}
        for key in titles
    }
    header = ["", *(f"{units} units" for units in settings.widths)]
    tables = [
        Table(
            title, header, [[m, *row] for m, row in numbers[key].items()], 2 if key == "acc" else 4
        )
        for key, title in titles.items()
    ]
    axes = {"acc": "accuracy (%)", "nll": "negative log-likelihood", "sym": "L^G per example"}

    def line(row: Sequence[Measured]) -> Line:
        value, error = torch.tensor(row).unbind(1)
        return Line(torch.tensor(settings.widths), value, value - error, value + error)

    panels = {axis: {m: line(row) for m, row in numbers[key].items()} for key, axis in axes.items()}
    note = (
        f"±: standard deviation over {settings.members} seeds. Data: {settings.data}. The first of "
        f"the runs: {command}"
    )
    return Findings(
        "width",
        f"Symmetrized VI by width, {settings.members} seeds (P2, table 1)",
        dict(zip(("accuracy", "nll", "elbo", "symmetrized"), tables, strict=True)),
        {"width": lines_figure(panels, ("hidden units", ""), log="x")},
        [note],
        {"scale": settings.__dict__},
    )
