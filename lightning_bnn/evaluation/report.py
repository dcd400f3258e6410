"""Tables of a comparison: distances to a reference, scores of predictions, notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightning_bnn.evaluation.comparison import FAILED, Comparison, Row
from lightning_bnn.evaluation.protocols import PROTOCOLS
from lightning_bnn.evaluation.reference_networks import have_converged
from lightning_bnn.metrics import quantile_calibration_floor
from lightning_bnn.tables import Cell, Measured, Table


@dataclass(frozen=True)
class Column:
    """A table column for a metric of predictions.

    Attributes:
        title: in tables.
        unit: on axes of figures, with an arrow to where it is better.
        factor: of the number that is shown.
        digits: number of decimals.
        group: whether it is of predictions as they are, or ``"calibrated"``, or compares them
            with those of a ``"reference"``.
    """

    title: str
    unit: str
    factor: int = 1
    digits: int = 3
    group: Literal["predicted", "calibrated", "reference"] = "predicted"

    def cell(self, numbers: Mapping[str, Any], name: str) -> Any:
        """Return a number in the unit of the column, NaN if missing, and text unchanged."""
        number = numbers.get(name, Measured(math.nan))
        return number if isinstance(number, str) else Measured(*(self.factor * v for v in number))


_percent = partial(Column, factor=100, digits=1)
_calibrated, _beside = partial(Column, group="calibrated"), partial(Column, group="reference")


def distance(title: str) -> Column:
    """Return the column of an MMD², shown times a hundred."""
    return Column(title, "x 100 ↓", 100, 2)


CLASSES = {
    "acc": _percent("Acc", "% ↑"),
    "ece": _percent("ECE", "% ↓"),
    "ace": _percent("ACE", "% ↓"),
    "brier": _percent("Brier", "% ↓"),
    "nll": Column("NLL", "nats ↓"),
    "nll_t": _calibrated("NLL (T)", "nats ↓"),
    "ece_t": _calibrated("ECE (T)", "% ↓", 100, 1),
    "aurc": _calibrated("AURC", "% ↓", 100, 2),
    "set90": _calibrated("Set90", "classes ↓", digits=2),
    "held90": _calibrated("Held90", "%, 90 is right", 100, 1),
    "agree": _beside("Agree", "% ↑", 100, 1),
    "tv": _beside("TV", "% ↓", 100, 1),
    "kl": _beside("KL", "nats ↓", digits=4),
    "aupr": _percent("AUPR", "% ↑"),
    "fpr95": _percent("FPR95", "% ↓"),
    "idmi": _percent("IDMI", "nats x 100"),
    "oodmi": _percent("OODMI", "nats x 100"),
}
_GAUSSIANS = {
    "rmse": Column("RMSE", "↓"),
    "rmse_unit": Column("RMSE (unit)", "unit of the target ↓"),
    "nll": CLASSES["nll"],
    "nll_moments": Column("NLL (moments)", "nats ↓"),
    "crps": Column("CRPS", "↓"),
    "cover90": _percent("Cover90", "%, 90 is right"),
    "width90": Column("Width90", "at equal coverage ↓"),
    "interval90": _calibrated("Conf90", "at equal coverage ↓"),
    "held90": CLASSES["held90"],
    "calib": _percent("Calib", "% ↓"),
    "sharpness": Column("Sharpness", "mean sd"),
    "energy_f": _beside("Energy (f)", "↓", digits=4),
    "energy": _beside("Energy", "↓", digits=4),
    "aupr": CLASSES["aupr"],
    "fpr95": CLASSES["fpr95"],
    "idvar": Column("IDVar", "variance", digits=4),
    "oodvar": Column("OODVar", "variance", digits=4),
}
PREDICTIONS = {**CLASSES, **_GAUSSIANS}
"""All columns, by the name of the number."""
_ON_TOP = (
    "NLL (T), ECE (T): after temperature scaling; Set90, Held90: size and coverage of conformal "
    "sets of 90 %; both calibrated on the validation data. AURC: error of the most confident "
    "predictions, averaged over all shares of them, x 100."
)


def is_regression(names: Iterable[str]) -> bool:
    """Return whether metrics are those of predicted densities."""
    return "crps" in set(names)


def columns_of(names: Iterable[str], group: str | None = None) -> dict[str, Column]:
    """Select the columns of the available metrics.

    Args:
        names: of the numbers of all rows.
        group: of the columns, by default all.
    """
    names = set(names)
    columns = _GAUSSIANS if is_regression(names) else CLASSES
    return {n: c for n, c in columns.items() if n in names and group in (None, c.group)}


def note_of(names: Iterable[str], settings: Mapping[str, Any]) -> str:
    """Explain the columns of predictions.

    Args:
        names: of the columns.
        settings: of the comparison.
    """
    names = set(names)
    if "nll_t" in names:
        return _ON_TOP
    if "acc" in names:
        return (
            "All columns in per cent, except NLL (nats) and mutual information (nats x 100). OOD "
            f"examples are the positive class, found by {settings['score']}."
        )
    return " ".join(text for name, text in _about(settings) if name in names)


def _about(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return sentences on regression metrics, each with the metric that requires it."""
    count = settings.get("test_examples")
    floor = "" if not count else (
        f"; a perfect forecaster has {100 * quantile_calibration_floor(int(count)):.1f} with "
        f"{count} test points"
    )  # fmt: skip
    return [
        ("rmse", "RMSE, CRPS, Width90, Sharpness in the unit of the targets as networks see them."),
        ("rmse_unit", "RMSE (unit): in the target's own unit."),
        ("nll", "NLL: of the mixture of all networks, nats for a whole example;"),
        ("nll_moments", "(moments): of the one Gaussian with its mean and variance."),
        ("cover90", "Cover90, Width90: of central intervals of 90 %."),
        ("interval90", "Conf90, Held90: width and coverage of conformal intervals of 90 %, "
                       "calibrated on the validation data."),
        ("calib", f"Calib: mean error of the share of targets below quantiles, %{floor}."),
        ("sharpness", "Sharpness: mean standard deviation of predictions, noise included."),
        ("aupr", "OOD examples are the positive class, found by the variance between networks."),
        ("idvar", "IDVar, OODVar: that variance."),
    ]  # fmt: skip


DISTANCES = {
    ("multi", "law"): "law", ("multi", "ns_law"): "NS law",
    ("one", "mixture"): "one mode", ("one", "ns_mixture"): "NS one mode",
    ("multi", "mixture"): "mixture", ("multi", "ns_mixture"): "NS mixture",
    ("multi", "floor"): "floor", ("multi", "ns_floor"): "NS floor",
}  # fmt: skip
"""Columns: of the row of one mode or of all modes, by name of the number."""
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
    "energy": "Energy: energy distance of all modes to predictions of the reference, of what "
    "networks compute (f) and of the densities that they predict.",
}


def distances_table(comparison: Comparison) -> Table:
    """Return a table with a row per posterior: its law, single modes, and mixture of modes."""
    names = {name for row in comparison.rows for name in row.numbers}
    columns = {f"{mode} {key}": distance(title) for (mode, key), title in DISTANCES.items()}
    columns |= columns_of(names, "reference")
    rows: list[tuple[dict[str, Cell], dict[str, Any]]] = []
    for name, modes in _by_method(comparison.rows).items():
        seeds, networks = (
            max(getattr(row, size) for row in modes.values()) for size in ("seeds", "networks")
        )
        numbers = {f"{m} {key}": n for m, row in modes.items() for key, n in row.numbers.items()}
        first: dict[str, Cell] = {"method": name, "modes": seeds, "networks": networks}
        rows.append((first, {**numbers, **_of_all(modes)}))
    for count, floor in _floors(comparison):
        noise = {f"multi {key}": floor[name] for key, name in _OF_NOISE.items() if name in floor}
        first = {"method": "Noise of the reference", "modes": count, "networks": count}
        rows.append((first, {**dict.fromkeys(columns, ""), **noise}))
    without = f"NS: {PROTOCOLS[comparison.settings['protocol']].about}."
    parts = [reference_text(comparison.settings), _EXPLAINED, without]
    note = " ".join([*parts, *(text for name, text in _OF_PREDICTIONS.items() if name in names)])
    origin = comparison.settings["reference_made"]
    title = f"Distance to the {origin} reference" if origin else "Distance to the reference"
    return numbers_table(title, rows, columns, note)


def numbers_table(
    title: str,
    rows: Sequence[tuple[Mapping[str, Cell], Mapping[str, Any]]],
    columns: Mapping[str, Column],
    note: str,
) -> Table:
    """Return a table of metrics by name, each in the unit of its column.

    Args:
        title: of the table.
        rows: first cells by their headings, and numbers; text stays as it is.
        columns: by the name of the number.
        note: below the table.
    """
    cells = [
        {**first, **{c.title: c.cell(numbers, name) for name, c in columns.items()}}
        for first, numbers in rows
    ]
    return Table.of(title, cells, {c.title: c.digits for c in columns.values()}, note)


def reference_text(settings: Mapping[str, Any]) -> str:
    """Describe the number and origin of the reference's networks."""
    chains, origin = settings["reference_chains"], settings["reference_made"]
    count = f"{settings['reference_networks']} networks"
    count += f" of {chains} chains" if chains else ""
    about = {
        "trained": "trained: the law of training runs, close to whatever is trained likewise",
        "sampled": "sampled: draws of the posterior itself",
    }
    made_how = about.get(origin, "trained or sampled (say which: `reference_is`)")
    agreement = _agreement(settings["reference_rhat"]) if chains else ""
    return f"Reference: {count}, {made_how}.{agreement}"


def _agreement(rhat: Sequence[float] | None) -> str:
    """State whether the chains of the reference agree."""
    if rhat is None:
        return " R-hat of its predictions: too few draws, it is NOT KNOWN whether chains agree."
    median, largest = rhat
    verdict = "" if have_converged(rhat) else ": NOT CONVERGED"
    return f" R-hat of its predictions: median {median:.3f}, largest {largest:.3f}{verdict}."


def percent(numbers: Mapping[str, Measured], name: str) -> Measured:
    """Multiply a number by a hundred, NaN if it is missing."""
    value, error = numbers.get(name, Measured(math.nan))
    return Measured(value * 100, error * 100)


def _of_all(rows: Mapping[str, Row]) -> Mapping[str, Measured]:
    """Return the metrics of all modes together, or of the only one."""
    return list(rows.values())[-1].numbers


def _by_method(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Group the rows with distances or failures by posterior and mode."""
    rows_of: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "mixture" in row.numbers or row.mode == FAILED:
            rows_of.setdefault(row.method, {})[row.mode] = row
    return rows_of


def _floors(comparison: Comparison) -> list[tuple[int, Mapping[str, Measured]]]:
    """Return the noise floors of single networks for each number of modes in the table."""
    modes = {row.seeds for row in comparison.rows}
    return [(count, floor) for count, floor in comparison.floors.items() if count in modes]


# ------------------------------------------------------------ what follows from the numbers
NEEDS = {
    "acc": "the right class",
    "rmse": "the smallest errors",
    "nll": "probabilities to act on",
    "ece": "confidence that is right as often as it says",
    "crps": "a distribution of every number",
    "aupr": "warnings of inputs that are unlike the training data",
    "tv": "the mean prediction of the reference",
    "energy": "the predictions of the reference",
    "ns_law": "networks that vary as those of the reference",
}
"""The need that each number serves."""
_DIFFERENT = 2
"""Standard errors by which two posteriors must differ to count as different."""


def advice_table(comparison: Comparison) -> Table:
    """Name the best posterior for every purpose, and those not significantly worse.

    Args:
        comparison: of two posteriors at least; else the table has no rows.
    """
    rows: list[list[Cell]] = []
    numbers = {
        name: _of_all(modes)
        for name, modes in _by_method(comparison.rows).items()
        if FAILED not in modes
    }
    columns = {**columns_of(name for row in numbers.values() for name in row)}
    columns["ns_law"] = distance("NS law")
    for key, need in NEEDS.items():
        values = {m: row[key] for m, row in numbers.items() if key in row}
        values = {m: value for m, value in values.items() if math.isfinite(value.value)}
        if key in columns and len(values) > 1:
            rows.append([need, *_best(values, columns[key])])
    note = (
        f"Level: within {_DIFFERENT} standard errors of the difference, or of unknown error. All "
        "modes together."
    )
    return Table(
        "What to take", ["if you need", "take", "level with it", "number"], rows, note=note
    )


def _best(values: Mapping[str, Measured], column: Column) -> list[Cell]:
    """Return the best of some posteriors, those not significantly worse, and its value."""
    sign = -1 if column.unit.endswith("↑") else 1
    order = sorted(values, key=lambda name: sign * values[name].value)
    best, *others = order
    level = [name for name in others if not _differ(values[best], values[name])]
    if len(level) == len(others) and len(level) > 1:
        level = ["all others"]
    value = column.cell(values, best)
    text = Table("", ["n"], [[value]], column.digits).cells()[0][0]
    unit = column.unit.rstrip("↑↓ ")
    return [best, ", ".join(level) or "none", f"{column.title} {text} {unit}".rstrip()]


def _differ(first: Measured, second: Measured) -> bool:
    """Return whether two numbers differ by more than their errors, which must be known."""
    return abs(first.value - second.value) > _DIFFERENT * math.hypot(first.error, second.error)


_FEW_EXAMPLES = 100
"""Examples below which a temperature, or a calibration error, is mostly noise."""


def cautions_of(comparison: Comparison) -> list[str]:
    """List cautions for readers of the tables.

    Args:
        comparison: any.
    """
    settings, rows = comparison.settings, comparison.rows
    texts = [f"{name} failed: {reason}" for name, reason in comparison.failures().items()]
    texts += [
        f"{name} was trained with other settings of the data than it is judged by: it may have "
        "seen test examples, and is not calibrated on validation data."
        for name, origin in settings["posteriors"].items()
        if origin.get("other_data")
    ]
    modes = {row.method: row.seeds for row in rows if row.mode != FAILED}
    for count, text in (
        (1, "one mode: its law is not known, and its errors are over test examples only"),
        (2, "two modes have no error: train a third to see whether differences are noise"),
    ):
        names = [name for name, seeds in modes.items() if seeds == count]
        texts += [f"{', '.join(names)}: {text}."] if names else []
    for key, caution, use in (
        ("test_examples", "test", "for differences between posteriors"),
        ("validation_examples", "validation", "for a temperature or sets"),
    ):
        size = settings.get(key)
        if size is not None and size < _FEW_EXAMPLES:
            texts.append(f"{size} {caution} examples are too few {use}.")
    if settings["reference_networks"] < 4:
        texts.append(
            f"A reference of {settings['reference_networks']} networks has no noise floor."
        )
    return texts
