"""P1's open question: are posteriors that are close to the reference better in use?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lightning_bnn.evaluation.comparison import collect
from lightning_bnn.evaluation.reference import Options
from lightning_bnn.plots import dots_figure, scatter_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.studies.compare import COLUMNS
from lightning_bnn.studies.demo import METHODS, REFERENCE, demo_jobs
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.runs import Job, reseeded, run_jobs
from lightning_bnn.tables import Cell, Measured, Table
from weightsym.randomness import keyed_generator

__all__ = ["correlation", "rank_correlation", "rank_correlations"]

Numbers = Mapping[str, float]
Groups = Mapping[str, Mapping[str, Numbers]]
"""For every architecture and kind of row, numbers by method."""
_DISTANCES = ("law", "ns_law", "mixture", "ns_mixture")
_QUALITIES = ("acc", "ece", "ace", "brier", "nll", "aupr", "fpr95")
_HIGH_IS_GOOD = ("acc", "aupr")


@dataclass(frozen=True)
class Scale:
    """Networks that are compared: sizes of hidden layers."""

    architectures: Sequence[Sequence[int]]
    size: str = "full"


SCALES = {
    "smallest": Scale(((4,),), "smallest"),
    "small": Scale(((8,), (16,), (16, 16))),
    "paper": Scale(((8,), (16,), (32,), (64,), (16, 16), (32, 32), (64, 64))),
}


def correlation(
    scale: Literal["smallest", "small", "paper"] = "small",
    samples: int = 100,
    seed: int = 0,
    out: str = "studies/correlation",
) -> None:
    """Correlate distances to a reference with every metric, over methods and networks.

    The seven posteriors of the demo are trained for each architecture and compared with a reference
    of their own, by law (several modes) and mixture (one mode, several modes). Ranks are taken
    within an architecture and a kind of row (one mode, multi mode), so that large networks do not
    count as close ones. Signs are turned so that a positive number always means: the closer, the
    better. Intervals are from a bootstrap over methods.

    Args:
        scale: smallest, to see that it runs; small; or paper, with more architectures (the papers'
            own need a GPU).
        samples: number of networks drawn from every posterior.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    folder = results_folder(out, "correlation")
    settings = settings_of(SCALES, scale)
    groups: dict[str, Mapping[str, Numbers]] = {}
    for hidden in settings.architectures:
        jobs = [reseeded(job, seed) for job in demo_jobs(settings.size, hidden)]
        with one_thread():
            groups |= _compared("-".join(map(str, hidden)), jobs, folder, samples)
    publish(_findings(groups), folder)


def _compared(title: str, jobs: Sequence[Job], folder: Path, samples: int) -> Groups:
    """Numbers of all methods, for one mode and for several, of one architecture."""
    runs = run_jobs(jobs, folder / "runs" / title)
    places = {text: str(runs[name].folder) for name, text in METHODS.items()}
    reference = str(runs[REFERENCE].folder)
    comparison = collect(
        reference, places, folder / title, options=Options(samples=samples)
    ).require_one()
    groups: dict[str, dict[str, Numbers]] = {}
    for row in comparison.rows:
        if "mixture" in row.numbers and "acc" in row.numbers:
            numbers = {name: number.value for name, number in row.numbers.items()}
            groups.setdefault(f"{title}, {row.mode} mode", {})[row.method] = numbers
    return groups


def rank_correlations(
    groups: Groups, distance: str, quality: str, methods: Sequence[str] | None = None
) -> Tensor:
    """Spearman's rho of every group in which it is known, see `rank_correlation`.

    Args:
        groups: for every group, numbers by method.
        distance: name of the one.
        quality: name of the other.
        methods: which count, perhaps several times; by default all.
    """
    of_groups = [
        rank_correlation([rows[m] for m in (methods or rows) if m in rows], distance, quality)
        for rows in groups.values()
    ]
    return torch.tensor([rho for rho in of_groups if math.isfinite(rho)])


def rank_correlation(rows: Sequence[Numbers], distance: str, quality: str) -> float:
    """Spearman's rho, or NaN of fewer than three different distances.

    Args:
        rows: numbers of every method.
        distance: name of the one.
        quality: name of the other; where high is good, the sign is turned.
    """
    from scipy.stats import spearmanr

    sign = -1.0 if quality in _HIGH_IS_GOOD else 1.0
    pairs = [
        (row[distance], sign * row[quality]) for row in rows if {distance, quality} <= set(row)
    ]
    varied = len({x for x, _ in pairs}) > 2 and len({y for _, y in pairs}) > 1
    return float(spearmanr(*zip(*pairs, strict=True)).statistic) if varied else math.nan


def _interval(groups: Groups, distance: str, quality: str) -> tuple[Measured, float, float]:
    """Mean over groups, its bootstrap deviation and 95 % interval.

    Methods are drawn again, the same for all groups: a method is as good in all of them.
    """
    whole = float(rank_correlations(groups, distance, quality).mean())
    names = sorted({name for rows in groups.values() for name in rows})
    generator = keyed_generator("correlation", distance, quality)
    means = []
    for _ in range(400):
        again = [names[k] for k in torch.randint(len(names), (len(names),), generator=generator)]
        correlations = rank_correlations(groups, distance, quality, again)
        if len(correlations):
            means.append(float(correlations.mean()))
    values = torch.tensor(means)
    low, high = values.quantile(torch.tensor([0.025, 0.975])).tolist()
    return Measured(whole, float(values.std())), low, high


def _findings(groups: Groups) -> Findings:
    intervals = {(d, q): _interval(groups, d, q) for d in _DISTANCES for q in _QUALITIES}
    rows: list[dict[str, Cell]] = [
        {"distance": COLUMNS[d].title, "metric": COLUMNS[q].title, "rank correlation": rho.value,
         "2.5 %": low, "97.5 %": high}
        for (d, q), (rho, low, high) in intervals.items()
    ]  # fmt: skip
    note = (
        f"Mean of Spearman's rho over {len(groups)} groups (architecture and kind of row). "
        "Positive: posteriors closer to the reference are better. Intervals: methods drawn again."
    )
    series = {COLUMNS[d].title: [intervals[d, q][0] for q in _QUALITIES] for d in _DISTANCES}
    metrics = [COLUMNS[q].title for q in _QUALITIES]
    panels = {COLUMNS[d].title: _points(groups, d) for d in _DISTANCES}
    return Findings(
        "correlation",
        "Does a better posterior predict better?",
        {"correlation": Table.of("Rank correlations with quality", rows, 2, note)},
        {
            "correlation": dots_figure({"": series}, metrics, label="rank correlation"),
            "points": scatter_figure(panels, ("distance x 100", "NLL (nats)")),
        },
        ["Perceptrons on scikit-learn's digits (a substitute for the papers' networks)."],
        {"groups": {name: dict(methods) for name, methods in groups.items()}},
    )


def _points(groups: Groups, distance: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Distances and NLL of the methods, by group."""
    points = {}
    for name, methods in groups.items():
        if all(distance in numbers for numbers in methods.values()):
            pairs = [[100 * numbers[distance], numbers["nll"]] for numbers in methods.values()]
            x, y = torch.tensor(pairs).T
            points[name] = (x, y)
    return points
