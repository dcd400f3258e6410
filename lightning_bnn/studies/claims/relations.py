"""The relations between numbers that claims are decided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from lightning_bnn.studies.claims.derived import paired
from lightning_bnn.studies.claims.evidence import Quantities, Quantity
from lightning_bnn.studies.claims.numbers import (
    Answer,
    Number,
    above,
    agrees,
    over_seeds,
    within,
)

__all__ = ["BY", "RELATIONS", "By", "answer"]

By = Literal["number", "mean", "seeds", "run", "all"]
BY: Mapping[By, str] = {
    "number": "the number, beyond its doubt",
    "mean": "the number alone",
    "seeds": "the mean over seeds, beyond the doubt that these leave",
    "run": "every run; within the errors if some meet it and some do not",
    "all": "every run; not met if one does not meet it",
}


def _at_least(x: Number, y: Number) -> Answer:
    smaller = above(y, x)
    return None if smaller is None else not smaller


def _near(x: Number, wanted: Number, tolerance: Number) -> Answer:
    low, high = wanted.value - tolerance.value, wanted.value + tolerance.value
    return within(x, Number(low), Number(high))


Relation = Callable[..., Answer]
RELATIONS: Mapping[str, tuple[Relation, int]] = {
    "above": (above, 2),
    "below": (lambda x, y: above(y, x), 2),
    "at_least": (_at_least, 2),
    "at_most": (lambda x, y: _at_least(y, x), 2),
    "within": (within, 3),
    "near": (_near, 3),
    "agrees": (agrees, 3),
}
"""Relations by their names in the table of claims, and their numbers of operands."""


def answer(
    relation: str, rows: Sequence[Sequence[Quantities]], by: By = "number", some: bool = False
) -> Answer:
    """Tell whether a relation holds between numbers, for all rows and columns or for some.

    Args:
        relation: its name.
        rows: operands; each row of them must meet the relation.
        by: the numbers that are compared, see `BY`.
        some: one row or column is enough.
    """
    answers = [
        _one(RELATIONS[relation][0], of_key, by)
        for operands in rows
        for of_key in paired(*operands).values()
    ]
    decisive = some  # one yes is enough for some, one no for all
    if decisive in answers:
        return decisive
    return None if None in answers else not decisive


def _one(relation: Relation, operands: Sequence[Quantity], by: By) -> Answer:
    if by == "number":
        return relation(*(q.number for q in operands))
    if by == "mean":
        return relation(*(Number(q.number.value) for q in operands)) is True
    if by == "seeds":
        return relation(*(over_seeds(q.values) for q in operands))
    runs = [k for k, v in enumerate(operands[0].values) if by == "all" or math.isfinite(v)]
    met = {relation(*(Number(_of_run(q, run)) for q in operands)) is True for run in runs}
    if by == "all":
        return False not in met
    return met.pop() if len(met) == 1 else None


def _of_run(q: Quantity, run: int) -> float:
    """A number that is the same for all runs has one value."""
    return q.values[run] if len(q.values) > 1 else q.values[0]
