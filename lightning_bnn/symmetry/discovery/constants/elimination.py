"""Solve integer equations between many unknowns: which are free, and what the others are then."""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import numpy as np
from scipy.sparse import csr_array, diags_array, eye_array
from scipy.sparse.csgraph import connected_components

from lightning_bnn.symmetry.discovery.constants.expressions import Ints

__all__ = ["solutions"]

_MOST_ROWS = 300
"""Equations left for the general way; with more of them, what is in them is held at zero."""


def solutions(equations: csr_array) -> csr_array:
    """All solutions of ``equations @ x = 0`` in integers, as ``x = found @ x``.

    The row of an unknown says what it is: itself if it is free, else zero or a combination of free
    ones. Earlier unknowns mostly stay free where there is a choice. What would be a fraction of
    others is zero, and so are they.

    Args:
        equations: integers, a column for every unknown.

    >>> solutions(csr_array([[1, 1, 0], [0, 0, 2]])).toarray()
    array([[ 1,  0,  0],
           [-1,  0,  0],
           [ 0,  0,  0]])
    """
    found = eye_array(equations.shape[1], dtype=np.int64, format="csr")
    left = _rows_that_say_something(equations)
    while left.shape[0]:
        for way in (_zeros, _last_alone, _equal, _alone, _eliminated):
            step = way(left)
            if step is not None:
                break
        assert step is not None
        found, left = csr_array(found @ step), _rows_that_say_something(left @ step)
    return found


def _rows_that_say_something(matrix: csr_array) -> csr_array:
    matrix = csr_array(matrix)
    matrix.eliminate_zeros()
    return matrix[np.flatnonzero(np.diff(matrix.indptr))]


# ------------------------------------------------------------ ways to get rid of unknowns
def _zeros(left: csr_array) -> csr_array | None:
    """Unknowns alone in an equation are zero."""
    single = np.flatnonzero(np.diff(left.indptr) == 1)
    if not single.size:
        return None
    return _all_but(left.indices[left.indptr[single]], left.shape[1])


def _all_but(zeros: Ints, count: int) -> csr_array:
    keep = np.ones(count, np.int64)
    keep[zeros] = 0
    return csr_array(diags_array(keep, dtype=np.int64))


def _alone(left: csr_array, last: bool = False) -> csr_array | None:
    """Unknowns that are in one equation only are what it says: the last of these in each."""
    entries = left.tocoo()
    rows, columns = entries.coords
    uses = np.bincount(columns, minlength=left.shape[1])
    fit = (uses[columns] == 1) & (np.abs(entries.data) == 1)
    if last:
        greatest = np.zeros(left.shape[0], np.int64)
        np.maximum.at(greatest, rows, columns)
        fit &= columns == greatest[rows]
    at = np.flatnonzero(fit)
    if not at.size:
        return None
    at = at[np.lexsort((columns[at], rows[at]))]
    at = at[np.r_[rows[at][1:] != rows[at][:-1], True]]
    return _replaced(left, rows[at], columns[at], entries.data[at])


def _last_alone(left: csr_array) -> csr_array | None:
    """The same, where the unknown is the last of all in its equation."""
    return _alone(left, last=True)


def _replaced(left: csr_array, rows: Ints, pivots: Ints, values: Ints) -> csr_array:
    """Pivots in terms of the other unknowns of their equations."""
    count = left.shape[1]
    place = csr_array((-values, (pivots, np.arange(len(rows)))), (count, len(rows)))
    said = csr_array(place @ left[rows])  # minus the other unknowns, and minus the pivot itself
    return csr_array(eye_array(count, dtype=np.int64, format="csr") + said)


def _equal(left: csr_array) -> csr_array | None:
    """Two unknowns that are equal, or opposite: the first of all that are stays."""
    pairs = np.flatnonzero(np.diff(left.indptr) == 2)
    first, second = left.indptr[pairs], left.indptr[pairs] + 1
    fit = np.abs(left.data[first]) == np.abs(left.data[second])
    first, second = first[fit], second[fit]
    if not first.size:
        return None
    count = left.shape[1]
    crossed = np.where(left.data[first] == left.data[second], count, 0)
    a, b = left.indices[first], left.indices[second]
    ends = np.concatenate([b + crossed, (b + count - crossed)])
    graph = csr_array(
        (np.ones(2 * len(a), np.bool_), (np.concatenate([a, a + count]), ends)), (2 * count,) * 2
    )
    part = connected_components(graph, directed=False)[1]
    plus, minus = part[:count], part[count:]
    least = np.full(part.max() + 1, count)
    np.minimum.at(least, part, np.arange(2 * count) % count)
    sign = np.where(plus == plus[least[plus]], 1, -1)
    sign[plus == minus] = 0
    return csr_array((sign, (np.arange(count), least[plus])), (count, count))


def _eliminated(left: csr_array) -> csr_array:
    """The general way, for few equations: reduced from the last unknown to the first."""
    used, count = np.unique(left.indices), left.shape[1]
    if left.shape[0] > _MOST_ROWS:
        return _all_but(used, count)
    reduced: dict[int, dict[int, Fraction]] = {}
    for k in range(left.shape[0]):
        at = slice(left.indptr[k], left.indptr[k + 1])
        row = {
            int(c): Fraction(int(v)) for c, v in zip(left.indices[at], left.data[at], strict=True)
        }
        _reduce(row, reduced)
    step = _all_but(np.array(list(reduced), np.int64), count).tolil()
    fractions: set[int] = set()
    for pivot, row in reduced.items():
        whole = lcm(*(v.denominator for v in row.values())) == 1 if row else True
        if not whole:
            fractions.update((pivot, *row))
        for column, value in row.items():
            step[pivot, column] = int(value) if whole else 0
    if fractions:
        return _all_but(np.array(sorted(fractions)), count)
    return csr_array(step)


def _reduce(row: dict[int, Fraction], reduced: dict[int, dict[int, Fraction]]) -> None:
    """Add an equation to a reduced system, in which pivots are what their rows say."""
    for pivot in [c for c in row if c in reduced]:
        _add(row, reduced[pivot], row.pop(pivot))
    if not row:
        return
    pivot = max(row)
    value = row.pop(pivot)
    said = {c: -v / value for c, v in row.items()}
    for other in reduced.values():
        if pivot in other:
            _add(other, said, other.pop(pivot))
    reduced[pivot] = said


def _add(row: dict[int, Fraction], other: dict[int, Fraction], times: Fraction) -> None:
    for column, value in other.items():
        total = row.get(column, Fraction(0)) + times * value
        if total:
            row[column] = total
        else:
            row.pop(column, None)
