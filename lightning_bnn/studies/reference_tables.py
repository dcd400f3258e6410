"""Tables of how far chains agree, and of how far they are from those of other seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_bnn.evaluation.report import PREDICTIONS, percent
from lightning_bnn.references.diagnosis import SPACES, Diagnosis
from lightning_bnn.tables import Cell, Measured, Table

__all__ = ["agreement_table", "distances_table"]

_NUMBERS = {
    "rhat_median": "R-hat median",
    "rhat_max": "largest",
    "ess_min": "least ESS",
    "ess_tail_min": "of tails",
}
_LAWS = {"law": "law", "ns_law": "NS law", "f_law": "function law"}
_GOLD = (
    "R-hat: of ranks and folded ranks, the larger of both. Least ESS: effective draws of the worst "
    "number for its mean, and for its 5 and 95 % quantiles. Gold: R-hat of predictions at most "
    "1.01 in the median and 1.05 at the worst point, 400 effective draws there, four chains, laws "
    "of both halves of the chains within three errors of each other; all again from three seeds."
)
_DISTANCES = (
    "MMD² x 100 between laws, raw, without symmetries (NS), and of predictions, with jackknife "
    "errors; the others compare mean predictions."
)


def agreement_table(found: Mapping[str, Diagnosis]) -> Table:
    """R-hat and effective sizes in every space.

    Args:
        found: by what the chains are.
    """
    rows: list[list[Cell]] = [
        [name, of.chains, of.draws, SPACES[space], *(numbers[key] for key in _NUMBERS)]
        for name, of in found.items()
        for space, numbers in of.spaces.items()
    ]
    header = ["chains of", "chains", "draws", "compared by", *_NUMBERS.values()]
    digits = {"least ESS": 0, "of tails": 0}
    return Table("Do the chains agree?", header, rows, digits, _GOLD)


def distances_table(found: Diagnosis, again: Sequence[Mapping[str, Any]] = ()) -> Table:
    """Halves of the chains beside each other, and all of them beside those of other seeds.

    Args:
        found: of the chains.
        again: other seeds with their ``distances``.
    """
    every = {"halves of the chains": found.halves}
    every |= {f"seed {other['seed']}": other["distances"] for other in again}
    beside = {name: PREDICTIONS[name] for name in found.halves if name in PREDICTIONS}
    rows: list[list[Cell]] = [
        [name, *(percent(numbers, key) for key in _LAWS),
         *(column.shown(numbers.get(key, Measured(math.nan))) for key, column in beside.items())]
        for name, numbers in every.items()
    ]  # fmt: skip
    titles = [column.title for column in beside.values()]
    digits = dict.fromkeys(_LAWS.values(), 2) | {c.title: c.digits for c in beside.values()}
    header = ["beside", *_LAWS.values(), *titles]
    return Table("Are they draws of one law?", header, rows, digits, _DISTANCES)
