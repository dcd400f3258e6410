"""Calibration of any posterior on disk, and its effect on the test data."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.calibration import Calibrated, calibrated
from lightning_bnn.calibration.calibrated import (
    CLASS_NUMBERS,
    CalibratedClasses,
    diagram,
    gaussian_numbers,
    shares_below,
)
from lightning_bnn.calibration.calibrators import method_of
from lightning_bnn.evaluation.draws import predictions_of_mode
from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.run_settings import has_other_data
from lightning_bnn.evaluation.stored_posteriors import Location, StoredPosterior, read_posterior
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots.predictions import quantiles_figure, reliability_figures
from lightning_bnn.predictions import numbers
from lightning_bnn.quiet_runs import quiet
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome

Test = tuple[dict[str, dict[str, float]], dict[str, Any]]
"""Numbers before and after calibration, and figures."""
Method = Literal["temperature", "vector", "spread", "moments"]
Score = Literal["thr", "aps", "raps", "split", "cqr"]
_CLASS_COLUMNS = {
    "nll": "NLL", "ece": "ECE", "brier": "Brier", "acc": "Acc", "aurc": "AURC", "size": "set size",
    "coverage": "coverage",
}  # fmt: skip
_GAUSSIAN_COLUMNS = {"nll": "NLL", "qce": "QCE", "width": "width", "coverage": "coverage"}


def calibrate(
    posterior: str,
    data: str | None = None,
    method: Method | None = None,
    alpha: float = 0.1,
    score: Score | None = None,
    by_class: bool = False,
    held_out: float = 0.5,
    samples: int = 100,
    seed: int = 0,
    out: str = "studies/calibrate",
) -> Outcome:
    """Calibrate a posterior on the validation data, and evaluate it on the test data.

    Reads a run (a folder written by `fit`), a checkpoint, a bank, or a folder of checkpoints; rows
    in brackets select some of its modes or networks: runs/bank[0:10]. One part of the validation
    data fits the calibrator. The other makes conformal prediction sets (of classes) or intervals
    (of numbers) that miss the truth for at most a fraction alpha of new examples. The command
    prints numbers of the test data before and after. It writes them with a reliability diagram, and
    the calibration itself (calibration.pt) for `lightning_bnn.calibration.Calibrated.load`. Before
    calibration, sets and intervals follow from the predicted probabilities.

    Args:
        posterior: a run, a checkpoint, a bank, or a folder of checkpoints.
        data: a configuration with network and data, as for `fit`; by default that of the run.
        method: calibrator of the mean prediction. For classes: temperature (the default) or vector;
            for numbers: spread (the default) or moments.
        alpha: rate at which a set or an interval may miss the truth.
        score: score of conformal prediction. For sets: thr (smallest sets, the default), aps or
            raps; for intervals: split or cqr.
        by_class: whether the coverage holds for every class, and not only over all.
        held_out: fraction of the validation data for the sets, not used in the fit.
        samples: number of networks that predict, over all modes.
        seed: random seed of the draws and splits.
        out: folder for the results.
    """
    if samples < 1:
        raise ValueError(f"`samples` must be at least 1, got {samples}.")
    location = Location.of(posterior)
    config = location.config_or(data)
    if has_other_data(location, config):
        raise ValueError(
            f"`--data` {config} configures other data than those that {posterior} was "
            "trained on: its training examples may be among those for calibration."
        )
    problem = read_problem(config)
    options = {"alpha": alpha, "score": score, "by_class": by_class, "held_out": held_out}
    with quiet():
        stored = read_posterior(location.path.name, location, problem, samples)
        fitted, predicted = _fitted(stored, problem, method, samples, seed, **options)
    folder = results_folder(out, "calibrate")
    settings = {**stored.origin, "config": str(config), "samples": samples, "seed": seed, **options}
    fitted.save(folder / "calibration.pt")
    return publish(_findings(fitted, predicted, settings), folder)


def _findings(calibration: Calibrated, predicted: Any, settings: dict[str, Any]) -> Findings:
    """Return the table before and after on the test data, with its figures."""
    of_classes = isinstance(calibration, CalibratedClasses)
    columns = _CLASS_COLUMNS if of_classes else _GAUSSIAN_COLUMNS
    test, figures = (_classes if of_classes else _gaussians)(calibration, predicted)
    rows: list[list[Cell]] = [
        [name, *(values[key] for key in columns)] for name, values in test.items()
    ]
    note = (
        f"{predicted.examples} examples. Before: {'sets' if of_classes else 'intervals'} of "
        f"{1 - calibration.alpha:.4g} from the probabilities; after: conformal."
    )
    table = Table("Test data", ["", *columns.values()], rows, 4, note)
    title = f"Calibration: {calibration.headline()}"
    settings = {**settings, "method": calibration.method}
    return Findings("calibrate", title, {"calibrate": table}, figures, (), settings)


def _classes(calibration: Any, predicted: Any) -> Test:
    before, after = predicted, predicted.calibrated(calibration.calibrator)
    credible = credible_sets(before.probs, calibration.alpha)
    sizes = numbers(calibration.scores(predicted), ("size", "coverage"))
    plain = {
        "size": float(M.set_size(credible)),
        "coverage": float(M.set_coverage(credible, before.truth)),
    }
    test = {
        "before": {**before.numbers(*CLASS_NUMBERS), **plain},
        "after": {**after.numbers(*CLASS_NUMBERS), **sizes},
    }
    diagrams = {"before": diagram(before), "after": diagram(after)}
    return test, {"reliability": reliability_figures(diagrams)}


def _gaussians(calibration: Any, predicted: Any) -> Test:
    after = predicted.calibrated(calibration.calibrator)
    both = {"before": predicted, "after": after}
    test = {name: gaussian_numbers(p, calibration.alpha) for name, p in both.items()}
    test["after"] |= numbers(calibration.scores(predicted), ("width", "coverage"))
    return test, {"quantiles": quantiles_figure({n: shares_below(p) for n, p in both.items()})}


def _fitted(
    posterior: StoredPosterior,
    problem: Problem,
    method: str | None,
    samples: int,
    seed: int,
    **options: Any,
) -> tuple[Calibrated, Any]:
    """Fit a calibrator to the validation data, and predict the test data."""
    method = method_of(posterior.likelihood, method)
    sets = [problem.validation_data(), problem.test_set()]
    share = max(1, samples // len(posterior.predictors))
    of_modes = [
        predictions_of_mode(mode, posterior.network, posterior.likelihood, sets, (share,), seed, k)
        for k, mode in enumerate(posterior.predictors)
    ]
    validated, predicted = (
        parts[0].stacked(parts).mean()
        for parts in ([counted[0] for counted in of_set] for of_set in zip(*of_modes, strict=True))
    )
    return calibrated(validated, method, seed=seed, **options), predicted


def credible_sets(probs: Tensor, alpha: float) -> Tensor:
    """Take the likeliest classes until their probabilities reach the requested coverage.

    Args:
        probs: ``(batch, classes)``.
        alpha: fraction that may be missed.

    >>> credible_sets(torch.tensor([[0.25, 0.5, 0.25]]), 0.5)
    tensor([[False,  True, False]])
    """
    values, order = probs.sort(stable=True, dim=-1, descending=True)
    needed = values.cumsum(-1) - values < 1 - alpha
    return torch.zeros_like(needed).scatter(-1, order, needed)
