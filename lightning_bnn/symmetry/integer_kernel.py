"""All solutions of a sparse homogeneous linear system with integer coefficients, exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import gcd, lcm
from typing import TypeAlias

__all__ = ["Row", "integer_kernel"]

Row: TypeAlias = dict[int, int]
"""Coefficients of an equation, or numbers of a solution, by variable; zeros are left out."""


def integer_kernel(equations: Iterable[Mapping[int, int]], free: Collection[int] = ()) -> list[Row]:
    r"""A basis of the solutions of :math:`\sum_v a_{ev} x_v = 0`.

    Every solution of the basis has a variable of its own, which is zero in all others, and the
    least integers that there are.

    Args:
        equations: coefficients by variable; one with coefficient zero alone may be anything.
        free: variables that are to be such variables, as far as the equations allow.

    >>> integer_kernel([{0: 1, 1: 1, 2: -1}], free=(1,))  # x + y = z
    [{0: 1, 2: 1}, {1: 1, 2: 1}]
    """
    equations = list(equations)
    variables = sorted({v for row in equations for v in row})
    rows = [{v: a for v, a in row.items() if a} for row in equations]
    solved = _eliminated(rows, set(free))
    values: dict[int, dict[int, int | Fraction]] = {}
    for v, row in reversed(solved):
        total: dict[int, int | Fraction] = defaultdict(int)
        for w, a in row.items():
            share = -a * row[v] if abs(row[v]) == 1 else Fraction(-a, row[v])
            for e, c in values.get(w, {w: 1}).items() if w != v else ():
                total[e] += share * c
        values[v] = {e: c for e, c in total.items() if c}
    basis: dict[int, dict[int, int | Fraction]] = {v: {v: 1} for v in variables if v not in values}
    for v, combination in values.items():
        for e, c in combination.items():
            basis[e][v] = c
    return [_least_integers(solution) for solution in basis.values()]


def _least_integers(solution: Mapping[int, int | Fraction]) -> Row:
    common = lcm(*(c.denominator for c in solution.values()))
    return {v: int(c * common) for v, c in sorted(solution.items())}


def _eliminated(rows: list[Row], free: Collection[int]) -> list[tuple[int, Row]]:
    """Pivots with their equations, none of which has the pivot of one before it.

    The variable of fewest equations goes first, of these the last, those to be free at the end.
    """
    where: dict[int, set[int]] = defaultdict(set)
    for r, row in enumerate(rows):
        for v in row:
            where[v].add(r)
    queue = [(v in free, len(rs), -v) for v, rs in where.items()]
    heapify(queue)
    solved = []
    while queue:
        _, count, v = heappop(queue)
        here = where[-v]
        if count != len(here) or not here:  # it has another entry, or none is needed
            continue
        pivot = min(here, key=lambda r: len(rows[r]))
        row = rows[pivot]
        solved.append((-v, row))
        touched = set(row)
        for r in here - {pivot}:
            touched |= _subtract(rows, r, row, -v, where)
        for w in row:
            where[w].discard(pivot)
        for w in touched:
            heappush(queue, (w in free, len(where[w]), -w))
    return solved


def _subtract(
    rows: list[Row], r: int, pivot: Row, v: int, where: Mapping[int, set[int]]
) -> set[int]:
    """Rid an equation of one variable by another equation, and return the variables that it had."""
    old, a, b = rows[r], pivot[v], rows[r][v]
    new = {w: a * old.get(w, 0) - b * pivot.get(w, 0) for w in {*old, *pivot}}
    divisor = gcd(*new.values()) or 1
    rows[r] = {w: c // divisor for w, c in new.items() if c}
    for w in old.keys() - rows[r].keys():
        where[w].discard(r)
    for w in rows[r].keys() - old.keys():
        where[w].add(r)
    return set(old)
