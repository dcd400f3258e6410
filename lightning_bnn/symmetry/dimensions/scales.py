"""Scales and signs: two linear systems over labels, over the rationals and over two elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from lightning_bnn.symmetry.dimensions.system import Equation
from lightning_bnn.symmetry.dimensions.values import Ints, Part

__all__ = ["Field", "Row", "Units", "connected", "degrees_of_freedom", "rank"]

Field = Literal["rational", "two"]
Row = dict[int, Fraction]
"""A linear combination: coefficients by variable, none of them zero."""


def connected(pairs: Sequence[Ints], count: int) -> Ints:
    """A number for every label that labels connected by pairs share."""
    both = np.concatenate([np.zeros((0, 2), np.int64), *pairs])
    graph = coo_matrix((np.ones(len(both), bool), (both[:, 0], both[:, 1])), (count, count))
    return connected_components(graph, directed=False)[1].astype(np.int64)


class Units:
    """The solutions of a system: every label in terms of free variables.

    Labels that an equation makes equal are joined first, by connected components; the few equations
    that remain are eliminated with sparse rows.
    """

    def __init__(self, equations: Sequence[Equation], count: int, over: Field) -> None:
        self._over = over
        fixed = Equation(np.zeros((1, 1), np.int64), (Fraction(1),), -1)
        equations = [e for e in (*equations, fixed) if len(e.labels)]
        self._root = connected([e.labels for e in equations if self._joins(e)], count)
        self._solved: dict[int, Row] = {}
        self._known: dict[int, Row] = {}
        rows = {
            frozenset(row.items())
            for e in equations
            if not self._joins(e)
            for row in self._rows(e)
            if row
        }
        for items in sorted(rows, key=lambda r: (len(r), sorted(v for v, _ in r))):
            self._eliminate(self._reduced(dict(items)))

    def of(self, label: int) -> Row:
        """The unit of a label in terms of free variables; empty where it is one."""
        root = int(self._root[label])
        if root not in self._known:
            self._known[root] = self._reduced({root: Fraction(1)})
        return self._known[root]

    def _joins(self, equation: Equation) -> bool:
        c = equation.coefficients
        return len(c) == 2 and (self._over == "two" or c[0] + c[1] == 0)

    def _rows(self, equation: Equation) -> Iterable[Row]:
        for labels in np.unique(self._root[equation.labels], axis=0).tolist():
            yield self.added({v: c} for v, c in zip(labels, equation.coefficients, strict=True))

    def added(self, rows: Iterable[Row]) -> Row:
        """The sum of linear combinations."""
        total: Row = {}
        for row in rows:
            for v, c in row.items():
                value = total.get(v, Fraction(0)) + c
                total[v] = value % 2 if self._over == "two" else value
        return {v: c for v, c in total.items() if c}

    def _reduced(self, row: Row) -> Row:
        result: Row = {}
        pending = list(row.items())
        while pending:
            v, c = pending.pop()
            if v in self._solved:
                pending += [(w, c * d) for w, d in self._solved[v].items()]
            else:
                result = self.added([result, {v: c}])
        return result

    def _eliminate(self, row: Row) -> None:
        if row:
            newest = max(row)
            c = row.pop(newest)
            self._solved[newest] = {w: -k / c for w, k in row.items()}


def rank(rows: Iterable[Row], over: Field) -> int:
    """The number of independent linear combinations."""
    pivots: dict[int, Row] = {}
    for start in rows:
        row = dict(start)
        while row:
            v = min(row)
            if v not in pivots:
                pivots[v] = row
                break
            factor = row[v] / pivots[v][v]
            for w, k in pivots[v].items():
                value = row.get(w, Fraction(0)) - factor * k
                row[w] = value % 2 if over == "two" else value
                if not row[w]:
                    del row[w]
    return len(pivots)


def degrees_of_freedom(parameters: Iterable[Sequence[Part]], units: Units, over: Field) -> int:
    """In how many independent ways a system acts on the entries of the parameters."""
    rows = set()
    for parts in parameters:
        full = [t.numpy().ravel() for t in torch.broadcast_tensors(*(x.labels for x in parts))]
        at = np.unique(np.concatenate([np.unique(t, return_index=True)[1] for t in full]))
        for labels in np.unique(np.stack([t[at] for t in full], 1), axis=0).tolist():
            acts = [x for x in parts if (x.power if over == "rational" else x.parity)]
            own = [v for v, x in zip(labels, parts, strict=True) if x in acts]
            rows.add(frozenset(units.added(units.of(v) for v in own).items()))
    ordered = sorted(rows, key=lambda r: (len(r), sorted(v for v, _ in r)))
    return rank([dict(r) for r in ordered if r], over)
