"""Tables of how close posteriors are to one that was sampled, beside what noise alone makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_bnn.evaluation.comparison import Row
from lightning_bnn.evaluation.report import (
    Column,
    columns_of,
    is_regression,
    note_of,
    percent,
    reference_text,
)
from lightning_bnn.evaluation.report import to_reference as beside_reference
from lightning_bnn.plots import dots_figure
from lightning_bnn.tables import Cell, Measured, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "HALVES", "LAWS", "Numbers", "by_function_law", "laws_figure", "mixtures_table",
    "quality_columns", "scores_table",
]  # fmt: skip

LAWS = {"f_law": "function law", "ns_law": "NS law", "law": "law"}
"""Distances of a method's law to the reference, by what networks are compared as."""
HALVES = "half of the reference"
"""The name of the row of what cannot be told from the reference."""
_QUALITIES = ("acc", "rmse", "nll", "nll_moments", "crps", "ece", "cover90", "width90", "calib")
_MIXTURES = {
    f"{prefix}{which}": f"{title} {which}".strip()
    for prefix, title in (("f_", "function"), ("ns_", "NS"), ("", ""))
    for which in ("law", "mixture", "floor")
}
_NOTE = (
    "Laws: MMD² x 100 between the networks of a method, over runs and draws, and draws of the "
    "posterior: by what they predict, without symmetries (NS), and as they are; around zero for "
    "draws of the posterior itself. The other distances compare predictions of all modes with "
    f"those of the reference. {HALVES[0].upper()}{HALVES[1:]}: the second half of its chains, "
    "beside the first; what is not farther than that cannot be told from it. Gradients: of one "
    "network for all the data, of all networks together, and seconds of the processor: known of "
    "runs with the callback `TrainingCost`. ±: jackknife over modes and chains, over test examples "
    "for a single mode. /: not known, or one mode only, whose law is not known."
)
_MIXTURES_NOTE = (
    "MMD² x 100. Law: of the method, from pairs of different modes; mixture: of the modes that are "
    "there, a single network being an atom; floor: (1 - E B) / K, what the mixture of K single "
    "networks of the posterior itself would have, E B being the mean kernel between its draws."
)

Numbers = Mapping[str, Measured]


def by_function_law(numbers: Mapping[str, Numbers]) -> list[str]:
    """Names, the closest first; what has no law comes last."""
    return sorted(numbers, key=lambda name: _or_last(numbers[name].get("f_law")))


def _or_last(number: Measured | None) -> float:
    return math.inf if number is None or not math.isfinite(number.value) else number.value


def quality_columns(names: set[str]) -> dict[str, Column]:
    """The columns of what predictions are worth, of numbers that there are."""
    return {name: column for name, column in columns_of(names).items() if name in _QUALITIES}


def scores_table(
    title: str,
    numbers: Mapping[str, Numbers],
    costs: Mapping[str, Mapping[str, float]],
    halves: Numbers,
    settings: Mapping[str, Any],
) -> Table:
    """What every posterior has cost, how far it is from the reference, and what it is worth.

    Args:
        title: of the table.
        numbers: by posterior.
        costs: the same, as far as they are known.
        halves: of one half of the reference beside the other, if that is known.
        settings: of the comparison.
    """
    names = {name for of in numbers.values() for name in of}
    columns = {**beside_reference(names), **quality_columns(names)}
    with_halves = {**numbers, HALVES: halves} if halves else numbers
    rows: list[list[Cell]] = [
        [
            name,
            *(costs.get(name, {}).get(key, math.nan) for key in ("gradients", "seconds")),
            *(percent(of, law) for law in LAWS),
            *(column.shown(of.get(key, Measured(math.nan))) for key, column in columns.items()),
        ]
        for name, of in with_halves.items()
    ]
    digits = {"gradients": 0, "seconds": 0, **dict.fromkeys(LAWS.values(), 2)}
    digits |= {column.title: column.digits for column in columns.values()}
    header = ["posterior", "gradients", "seconds", *LAWS.values()]
    header += [column.title for column in columns.values()]
    about = [reference_text(settings), _NOTE]
    about += [note_of(columns, settings)] if is_regression(names) else []
    return Table(title, header, rows, digits, " ".join(about))


def mixtures_table(
    numbers: Mapping[str, Numbers], compared: Sequence[Row], halves: Numbers
) -> Table:
    """Laws beside mixtures of the modes that are there, and beside their floors.

    Args:
        numbers: by posterior.
        compared: says how many modes and networks there were.
        halves: of one half of the reference beside the other, if that is known.
    """
    counts = {row.method: (row.seeds, row.networks) for row in compared}
    rows: list[list[Cell]] = [
        [name, *counts[name], *(percent(of, key) for key in _MIXTURES)]
        for name, of in numbers.items()
    ]
    if halves:
        rows.append([HALVES, "", "", *(percent(halves, key) for key in _MIXTURES)])
    header = ["posterior", "modes", "networks", *_MIXTURES.values()]
    digits = dict.fromkeys(_MIXTURES.values(), 2)
    return Table("Laws, and the modes as they are", header, rows, digits, _MIXTURES_NOTE)


def laws_figure(numbers: Mapping[str, Numbers], halves: Numbers) -> Figure:
    """All laws, and as bands two errors around those of the halves of the reference."""
    panels = {
        title: {"": [percent(of, law) for of in numbers.values()]} for law, title in LAWS.items()
    }
    noise = {title: percent(halves, law) for law, title in LAWS.items()}
    bands = {
        title: (value, 2 * error)
        for title, (value, error) in noise.items()
        if math.isfinite(value + error)
    }
    return dots_figure(panels, list(numbers), bands, label="MMD² x 100")
