"""Tables of distances to a reference: laws, single modes, mixtures, and what a reader must know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_bnn.comparison.collect import FAILED, Comparison
from lightning_bnn.comparison.columns import to_reference
from lightning_bnn.comparison.convergence import have_converged
from lightning_bnn.comparison.protocols import PROTOCOLS
from lightning_bnn.comparison.rows import Row
from lightning_bnn.comparison.tables import Cell, Measured, Table

__all__ = ["DISTANCES", "distances_by_kernel", "distances_table", "percent", "reference_text"]

DISTANCES = {
    ("multi", "law"): "law", ("multi", "ns_law"): "NS law",
    ("one", "mixture"): "one mode", ("one", "ns_mixture"): "NS one mode",
    ("multi", "mixture"): "mixture", ("multi", "ns_mixture"): "NS mixture",
    ("multi", "floor"): "floor", ("multi", "ns_floor"): "NS floor",
}  # fmt: skip
"""Columns: of the row of one mode or of all modes, by name of the number."""
_BY_KERNEL = {
    f"{prefix}law{suffix}": f"{title} {reduction}"
    for prefix, title in (("", "law"), ("ns_", "NS law"))
    for suffix, reduction in (("", "median"), ("_mean", "mean"), ("_max", "max"))
}
_OF_NOISE = {"law": "mmd", "ns_law": "ns"}
"""The law of single networks is what the noise floor measures."""
_EXPLAINED = (
    "MMD² x 100. Law: a method's networks over runs and draws, from pairs of different modes only "
    "(unbiased, so about zero if the reference has the same law). One mode, mixture: the modes as "
    "they are, where a single network is a point. Floor: the mixture of as many single networks "
    "from the reference's own law. ±: deviation over modes (one mode), jackknife over modes and "
    "chains of the reference (two modes, or two chains, have no error), deviation over splits of "
    "the reference (noise). /: not defined."
)
_OF_PREDICTIONS = {
    "agree": "Agree, TV, KL: of the mean prediction of all modes with that of the reference, per "
    "cent, and nats from the reference's.",
    "energy": "Energy, W2: energy and Wasserstein distance of all modes to predictions of the "
    "reference, of what networks compute (f) and of the densities that they predict.",
}
_OF_MAXIMA = (
    "MMD² x 100 between laws, with the median, the mean and the maximum over twenty kernels. "
    "Medians and means are around zero for networks from the reference's own law. A maximum is "
    "not, since it is the largest of twenty noisy numbers: compare it with the row of the noise."
)


def distances_table(comparison: Comparison) -> Table:
    """One row for every posterior: its law, its single modes, and the mixture of all modes."""
    names = {name for row in comparison.rows for name in row.numbers}
    beside = to_reference(names)
    rows: list[list[Cell]] = [
        [name, max(row.seeds for row in of.values()), max(row.networks for row in of.values()),
         *(percent(of[mode].numbers if mode in of else {}, key) for mode, key in DISTANCES),
         *(c.shown(_of_all(of).get(key, Measured(math.nan))) for key, c in beside.items())]
        for name, of in _by_method(comparison.rows).items()
    ]  # fmt: skip
    for count, floor in _floors(comparison):
        noise = (percent(floor, _OF_NOISE.get(key, "")) for _, key in DISTANCES)
        rows.append(["Noise of the reference", count, count, *_blank(noise), *[""] * len(beside)])
    parts = [reference_text(comparison.settings), _EXPLAINED, _symmetries(comparison.settings)]
    note = " ".join([*parts, *(text for name, text in _OF_PREDICTIONS.items() if name in names)])
    titles = [column.title for column in beside.values()]
    digits = dict.fromkeys(DISTANCES.values(), 2) | {c.title: c.digits for c in beside.values()}
    header = ["method", "modes", "networks", *DISTANCES.values(), *titles]
    made = comparison.settings["reference_made"]
    title = f"Distance to the {made} reference" if made else "Distance to the reference"
    return Table(title, header, rows, digits, note)


def distances_by_kernel(comparison: Comparison) -> Table:
    """Distances of the laws by the reduction over kernels."""
    rows: list[list[Cell]] = [
        [name, *(percent(of["multi"].numbers, key) for key in _BY_KERNEL)]
        for name, of in _by_method(comparison.rows).items()
        if "multi" in of
    ]
    for count, floor in _floors(comparison):
        names = (key.replace("ns_law", "ns").replace("law", "mmd") for key in _BY_KERNEL)
        rows.append([f"Noise, {count} networks", *(percent(floor, name) for name in names)])
    header = ["method", *_BY_KERNEL.values()]
    return Table("Distance of the law over kernels", header, rows, 2, _OF_MAXIMA)


def reference_text(settings: Mapping[str, Any]) -> str:
    """What the reference is: how many networks, and whether they were trained or sampled."""
    chains, made = settings["reference_chains"], settings["reference_made"]
    count = f"{settings['reference_networks']} networks"
    count += f" of {chains} chains" if chains else ""
    about = {
        "trained": "trained: the law of training runs, close to whatever is trained likewise",
        "sampled": "sampled: draws of the posterior itself",
    }
    made_how = about.get(made, "trained or sampled, which was not said")
    agreement = _agreement(settings["reference_rhat"]) if chains else ""
    return f"Reference: {count}, {made_how}.{agreement}"


def _agreement(rhat: Sequence[float] | None) -> str:
    """Whether the chains of the reference agree."""
    if rhat is None:
        return " R-hat of its predictions: too few draws, it is NOT KNOWN whether chains agree."
    median, largest = rhat
    verdict = "" if have_converged(rhat) else ": NOT CONVERGED"
    return f" R-hat of its predictions: median {median:.3f}, largest {largest:.3f}{verdict}."


def percent(numbers: Mapping[str, Measured], name: str) -> Measured:
    """A number times a hundred; NaN where there is none."""
    value, error = numbers.get(name, Measured(math.nan))
    return Measured(value * 100, error * 100)


def _of_all(of: Mapping[str, Row]) -> Mapping[str, Measured]:
    """Numbers of all modes together, or of the only one."""
    return list(of.values())[-1].numbers


def _by_method(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows that have distances, or have failed, by posterior and by mode."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "mixture" in row.numbers or row.mode == FAILED:
            found.setdefault(row.method, {})[row.mode] = row
    return found


def _floors(comparison: Comparison) -> list[tuple[int, Mapping[str, Measured]]]:
    """Noise of as many single networks as some posterior has modes."""
    modes = {row.seeds for row in comparison.rows}
    return [(count, floor) for count, floor in comparison.floors.items() if count in modes]


def _blank(cells: Any) -> list[Cell]:
    return [cell if math.isfinite(cell.value) else "" for cell in cells]


def _symmetries(settings: Mapping[str, Any]) -> str:
    return f"NS: {PROTOCOLS[settings['protocol']].about}."
