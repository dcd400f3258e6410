"""Columns of tables for predictions: which there are, how they are shown, what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_bnn.comparison.tables import Measured
from lightning_bnn.metrics import quantile_calibration_floor

__all__ = [
    "CLASSES",
    "PREDICTIONS",
    "Column",
    "columns_of",
    "is_regression",
    "note_of",
    "predicted_and_calibrated",
    "to_reference",
]


@dataclass(frozen=True)
class Column:
    """A number of predictions.

    Attributes:
        title: in tables.
        unit: on axes of figures, with an arrow to where it is better.
        factor: what it is multiplied by to be shown.
        digits: behind the point.
    """

    title: str
    unit: str
    factor: int = 1
    digits: int = 3

    def shown(self, number: Measured) -> Measured:
        """A number in the unit of the column."""
        return Measured(number.value * self.factor, number.error * self.factor)


def _percent(title: str, unit: str) -> Column:
    return Column(title, unit, 100, 1)


CLASSES = {
    "acc": _percent("Acc", "% ↑"),
    "ece": _percent("ECE", "% ↓"),
    "ace": _percent("ACE", "% ↓"),
    "brier": _percent("Brier", "% ↓"),
    "nll": Column("NLL", "nats ↓"),
    "nll_t": Column("NLL (T)", "nats ↓"),
    "ece_t": _percent("ECE (T)", "% ↓"),
    "aurc": Column("AURC", "% ↓", 100, 2),
    "set90": Column("Set90", "classes ↓", digits=2),
    "held90": _percent("Held90", "%, 90 is right"),
    "agree": _percent("Agree", "% ↑"),
    "tv": _percent("TV", "% ↓"),
    "kl": Column("KL", "nats ↓", digits=4),
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
    "interval90": Column("Conf90", "at equal coverage ↓"),
    "held90": CLASSES["held90"],
    "calib": _percent("Calib", "% ↓"),
    "sharpness": Column("Sharpness", "mean sd"),
    "energy_f": Column("Energy (f)", "↓", digits=4),
    "energy": Column("Energy", "↓", digits=4),
    "w2_f": Column("W2 (f)", "↓"),
    "aupr": CLASSES["aupr"],
    "fpr95": CLASSES["fpr95"],
    "idvar": Column("IDVar", "variance", digits=4),
    "oodvar": Column("OODVar", "variance", digits=4),
}
PREDICTIONS = {**CLASSES, **_GAUSSIANS}
"""All columns, by the name of the number."""
_CALIBRATED = ("nll_t", "ece_t", "aurc", "set90", "interval90", "held90")
_TO_REFERENCE = ("agree", "tv", "kl", "energy_f", "energy", "w2_f")
_ON_TOP = (
    "NLL (T), ECE (T): after temperature scaling; Set90, Held90: size and coverage of conformal "
    "sets of 90 %; both calibrated on the validation data. AURC: error of the most confident "
    "predictions, averaged over all shares of them, x 100."
)


def is_regression(names: Iterable[str]) -> bool:
    """Whether numbers are those of predicted densities."""
    return "crps" in set(names)


def columns_of(names: Iterable[str]) -> dict[str, Column]:
    """The columns for the kind of numbers that there are; those of no number are left out.

    Args:
        names: of the numbers of all rows.
    """
    names = set(names)
    kind = _GAUSSIANS if is_regression(names) else CLASSES
    return {name: column for name, column in kind.items() if name in names}


def predicted_and_calibrated(names: Iterable[str]) -> tuple[dict[str, Column], dict[str, Column]]:
    """The columns of predictions as they are, and of what validation data add to them.

    Args:
        names: of the numbers of all rows.
    """
    columns = columns_of(names)
    on_top = {name: column for name, column in columns.items() if name in _CALIBRATED}
    others = {*on_top, *_TO_REFERENCE}
    return {name: column for name, column in columns.items() if name not in others}, on_top


def to_reference(names: Iterable[str]) -> dict[str, Column]:
    """The columns of what compares predictions with those of a reference.

    Args:
        names: of the numbers of all rows.
    """
    columns = columns_of(names)
    return {name: column for name, column in columns.items() if name in _TO_REFERENCE}


def note_of(names: Iterable[str], settings: Mapping[str, Any]) -> str:
    """What a reader must know about the columns of predictions.

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
    """Sentences on numbers of regression, each with the number that asks for it."""
    count = settings.get("test_examples")
    floor = "" if not count else (
        f"; a perfect forecaster has {100 * quantile_calibration_floor(int(count)):.1f} with "
        f"{count} test points"
    )  # fmt: skip
    return [
        ("rmse", "RMSE, CRPS, Width90, Sharpness in the unit of the targets as networks see them."),
        ("rmse_unit", "RMSE (unit): in the target's own unit."),
        ("nll", "NLL: of the mixture of the networks' Gaussians;"),
        ("nll_moments", "(moments): of the one Gaussian with its mean and variance."),
        ("cover90", "Cover90, Width90: of central intervals of 90 %."),
        ("interval90", "Conf90, Held90: width and coverage of conformal intervals of 90 %, "
                       "calibrated on the validation data."),
        ("calib", f"Calib: mean error of the share of targets below quantiles, %{floor}."),
        ("sharpness", "Sharpness: mean standard deviation of predictions, noise included."),
        ("aupr", "OOD examples are the positive class, found by the variance between networks."),
        ("idvar", "IDVar, OODVar: that variance."),
    ]  # fmt: skip
