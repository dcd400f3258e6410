"""Any posterior on disk, calibrated: its numbers on the test data before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from lightning_bnn import metrics as M
from lightning_bnn.calibration.calibrated import LEVELS, CalibratedClasses, levels_reached
from lightning_bnn.evaluation.calibration import CalibratedTest, calibrate_posterior
from lightning_bnn.evaluation.problem import read_problem
from lightning_bnn.evaluation.run_settings import has_other_data
from lightning_bnn.evaluation.stored_posteriors import Location, read_posterior
from lightning_bnn.plots import Line, histograms_figure, lines_figure
from lightning_bnn.plots.predictions import reliability_figures, sizes_figure
from lightning_bnn.quiet_runs import quiet
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.tables import Cell, Table

__all__ = ["calibrate", "findings_of"]

Method = Literal["temperature", "network_temperature", "vector", "spread", "moments"]
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
) -> None:
    """Calibrate a posterior on the validation data, and judge it on the test data.

    Reads a run (a folder that `fit` has written), a checkpoint, a bank, or a folder of checkpoints;
    rows in brackets select some of its modes or networks: runs/bank[0:10]. One part of the
    validation data fits the calibrator. The other makes conformal prediction sets (of classes) or
    intervals (of numbers) that miss the truth for at most a share alpha of new examples. The
    command prints numbers of the test data before and after. It writes them with reliability
    diagrams, risk-coverage curves and a histogram of set sizes, also for TensorBoard, and the
    calibration itself (calibration.pt), which `lightning_bnn.calibration.Calibrated.load` reads.
    Before calibration, sets and intervals are those that the predicted probabilities ask for.

    Args:
        posterior: a run, a checkpoint, a bank, or a folder of checkpoints.
        data: a configuration with network and data, as for `fit`; by default that of the run.
        method: calibrator. For classes: temperature (of the mean prediction, the default),
            network_temperature (of every network) or vector; for numbers: spread (the
            default) or moments.
        alpha: how often a set or an interval may miss the truth.
        score: score of conformal prediction. For sets: thr (smallest sets, the default), aps or
            raps; for intervals: split or cqr.
        by_class: whether sets have the coverage for every class, and not only for all together.
        held_out: the share of the validation data that makes the sets and is not used in the fit.
        samples: number of networks that predict, of all modes together.
        seed: random seed of the draws and splits.
        out: folder for the results.
    """
    if samples < 1:
        raise ValueError(f"`samples` must be at least 1, got {samples}.")
    location = Location.of(posterior)
    config = location.config() if data is None else Path(data)
    if config is None:
        raise ValueError(
            f"{posterior} has no `config.yaml`: pass a configuration with network and data as "
            "`--data`."
        )
    if has_other_data(location, config):
        raise ValueError(
            f"`--data` {config} has other settings of the data than {posterior} was trained with: "
            "its training examples may be among those that calibrate it."
        )
    problem = read_problem(config)
    options = {"alpha": alpha, "score": score, "by_class": by_class, "held_out": held_out}
    with quiet():
        stored = read_posterior(location.path.name, location, problem, samples)
        tested = calibrate_posterior(stored, problem, method, samples, seed, **options)
    folder = results_folder(out, "calibrate")
    settings = {**stored.origin, "config": str(config), "samples": samples, "seed": seed, **options}
    tested.calibration.save(folder / "calibration.pt")
    publish(findings_of(tested, settings), folder)


def findings_of(tested: CalibratedTest, settings: dict[str, Any]) -> Findings:
    """The table before and after on the test data, and its figures.

    Args:
        tested: a calibration, and predictions of the test data.
        settings: everything that decides the numbers.
    """
    calibration = tested.calibration
    of_classes = isinstance(calibration, CalibratedClasses)
    columns = _CLASS_COLUMNS if of_classes else _GAUSSIAN_COLUMNS
    rows: list[list[Cell]] = [
        [name, *(numbers[key] for key in columns)] for name, numbers in tested.numbers().items()
    ]
    note = (
        f"{len(tested.targets)} examples. Before: {'sets' if of_classes else 'intervals'} of "
        f"{1 - calibration.alpha:.4g} as the probabilities ask for; after: conformal."
    )
    table = Table("Test data", ["", *columns.values()], rows, 4, note)
    figures = (_class_figures if of_classes else _gaussian_figures)(tested)
    title = f"Calibration: {calibration.headline()}"
    settings = {**settings, "method": calibration.method}
    return Findings("calibrate", title, {"calibrate": table}, figures, (), settings)


# ------------------------------------------------------------ figures
def _class_figures(tested: CalibratedTest) -> dict[str, Any]:
    labels = tested.targets.long()
    curves, diagrams = {}, {}
    for name, probs in tested.predictions.items():
        confidence, predicted = probs.max(-1)
        curve = M.risk_coverage(confidence, predicted == labels)
        curves[name] = Line(curve.coverage, curve.risk)
        diagrams[name] = M.reliability(confidence, predicted == labels)
    sizes = {name: sets.sum(-1) for name, sets in tested.regions.items()}
    axes = ("share of examples that are answered", "share of errors among them")
    return {
        "reliability": reliability_figures(diagrams),
        "risk_coverage": lines_figure({"": curves}, axes),
        "set_sizes": sizes_figure(sizes, "classes in a set"),
    }


def _gaussian_figures(tested: CalibratedTest) -> dict[str, Any]:
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    lines = {"perfect": Line(levels, levels)}
    for name, (means, stds) in tested.predictions.items():
        lines[name] = Line(levels, levels_reached(means, stds, tested.targets))
    every = {name: intervals.width for name, intervals in tested.regions.items()}
    widths = {name: width[width.isfinite()] for name, width in every.items()}
    return {
        "quantiles": lines_figure({"": lines}, ("level", "share of targets below its quantile")),
        "widths": histograms_figure({"": widths}, "width of intervals"),
    }
