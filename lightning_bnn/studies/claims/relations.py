"""The relations between numbers that claims are decided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from lightning_bnn.studies.claims import numbers
from lightning_bnn.studies.claims.derived import paired
from lightning_bnn.studies.claims.evidence import Quantities, Quantity
from lightning_bnn.studies.claims.numbers import Answer, Number, all_of, in_every_run, over_seeds

__all__ = ["BY", "RELATIONS", "By", "answer"]

By = Literal["number", "mean", "seeds", "run", "all"]
BY: Mapping[By, str] = {
    "number": "the number, beyond its doubt",
    "mean": "the number alone",
    "seeds": "the mean over seeds, beyond the doubt that these leave",
    "run": "every run; within the errors if some meet it and some do not",
    "all": "every run; not met if one does not meet it",
}


def _above(x: Number, y: Number) -> Answer:
    return numbers.compared(x, y)


def _below(x: Number, y: Number) -> Answer:
    return numbers.compared(y, x)


def _at_least(x: Number, y: Number) -> Answer:
    below = _below(x, y)
    return None if below is None or math.isnan(x.value) else not below


def _at_most(x: Number, y: Number) -> Answer:
    return _at_least(y, x)


def _within(x: Number, low: Number, high: Number) -> Answer:
    return numbers.within(x, low.value, high.value)


def _near(x: Number, wanted: Number, tolerance: Number) -> Answer:
    return numbers.near(x, wanted.value, tolerance.value)


def _agrees(x: Number, low: Number, high: Number) -> Answer:
    """Whether it may lie between two numbers, for claims that nothing is to be seen."""
    return numbers.meets(x, low.value - low.doubt, high.value + high.doubt)


Relation = Callable[..., Answer]
RELATIONS: Mapping[str, tuple[Relation, int]] = {
    "above": (_above, 2),
    "below": (_below, 2),
    "at_least": (_at_least, 2),
    "at_most": (_at_most, 2),
    "within": (_within, 3),
    "near": (_near, 3),
    "agrees": (_agrees, 3),
}
"""By the name that the table of claims uses, and of how many operands."""


def answer(
    relation: str, rows: Sequence[Sequence[Quantities]], by: By = "number", some: bool = False
) -> Answer:
    """Whether a relation holds between numbers, for all rows and columns or for some.

    Args:
        relation: its name.
        rows: operands; each row of them must meet the relation.
        by: what of the numbers is compared.
        some: one row or column is enough.
    """
    found = [
        _one(RELATIONS[relation][0], of_key, by)
        for operands in rows
        for of_key in paired(*operands).values()
    ]
    if some:
        return True if True in found else None if None in found else False
    return all_of(found)


def _one(relation: Relation, operands: Sequence[Quantity], by: By) -> Answer:
    if by == "number":
        return relation(*(q.number for q in operands))
    if by == "mean":
        return relation(*(Number(q.number.value) for q in operands)) is True
    if by == "seeds":
        return relation(*(over_seeds(q.values) for q in operands))
    runs = [(v, k) for k, v in enumerate(operands[0].values) if by == "all" or math.isfinite(v)]
    met = [relation(*(Number(_of_run(q, run)) for q in operands)) is True for _, run in runs]
    return all(met) if by == "all" else in_every_run(map(float, met), bool)


def _of_run(q: Quantity, run: int) -> float:
    """A number that is the same for all runs has one value."""
    return q.values[run] if len(q.values) > 1 else q.values[0]
