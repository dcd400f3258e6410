"""Scales and signs: two linear systems over labels, one over the rationals, one modulo 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from weightsym.discovery.dimensions.system import Equation
from weightsym.discovery.dimensions.values import Factor, Ints, distinct_rows

Field = Literal["rational", "two"]
Row = dict[int, Any]
"""A linear combination: coefficients by variable, integers where they can be, none of them zero."""

_Terms = tuple[Ints, Ints]
"""Labels, one equation a row, and their integer coefficients; label 0 stands for nothing."""


def connected(pairs: Sequence[Ints], count: int) -> Ints:
    """Label the connected components of a graph that is given by pairs."""
    both = np.concatenate([np.zeros((0, 2), np.int64), *pairs])
    graph = coo_matrix((np.ones(len(both), bool), (both[:, 0], both[:, 1])), (count, count))
    return connected_components(graph, directed=False)[1].astype(np.int64)


class Units:
    """The solutions of a system: every label as a combination of free variables.

    Labels that an equation makes equal, or opposite, are joined first, by connected components of a
    graph that has every label twice, once for each sign; what remains is shortened by that, and by
    differences, and joined again. The few equations that never become so short are eliminated with
    sparse rows: those of signs, of which a whole stream often shares one, each for what acts on the
    fewest labels of parameters.
    """

    def __init__(
        self, equations: Sequence[Equation], count: int, over: Field,
        parameters: Iterable[Sequence[Factor]] = (),
    ) -> None:  # fmt: skip
        self._over, self.count = over, count
        self._root, self._sign = np.arange(count), np.ones(count, np.int64)
        self._solved: dict[int, Row] = {}
        whole = _by_width(_terms(e, over) for e in equations if len(e.labels))
        left = [self._replaced(terms, self._root, self._sign) for terms in whole]
        while left:
            if not any(self._short(terms).any() for terms in left):
                left += [self._differences(terms) for terms in left if len(terms[0])]
                if not any(self._short(terms).any() for terms in left):
                    break
            left = self._joined(left)
        rows = {tuple(row.items()) for terms in left for row in self.rows(terms) if row}
        acting = (
            [p.labels.numpy().ravel() for factors in parameters for p in factors] if rows else []
        )
        acting.append(np.zeros(1, np.int64))
        self._acts = np.bincount(self._root[np.concatenate(acting)], minlength=count).tolist()
        for items in sorted(rows, key=lambda r: (len(r), r)):  # their labels are in order
            self._eliminate(self._reduced(dict(items)))
        self._solved = {v: self._reduced(row) for v, row in self._solved.items()}

    def of(self, label: int) -> Row:
        """Return a label's unit as a combination of free variables, empty for a unit of one."""
        root, sign = int(self._root[label]), int(self._sign[label])
        row = self._solved.get(root, {root: 1} if root else {})
        return row if sign > 0 else {v: -c for v, c in row.items()}

    def of_rows(self, labels: Iterable[Ints]) -> tuple[list[_Terms], list[Row]]:
        """Sum the units of the labels in each row: as tables, or as rows if a label is solved."""
        tables: list[_Terms] = []
        others: list[Row] = []
        for terms in _by_width((rows, np.ones_like(rows)) for rows in labels):
            variables, c = self._replaced(terms, self._root, self._sign)
            is_solved = self.is_solved(variables).any(1)
            tables.append((variables[~is_solved], c[~is_solved]))
            others += map(self._reduced, self.rows((variables[is_solved], c[is_solved])))
        return tables, others

    def is_solved(self, variables: Ints) -> NDArray[np.bool_]:
        """Return a mask of the eliminated variables."""
        return np.isin(variables, np.array([*self._solved], np.int64))

    def representatives(self, labels: Ints) -> tuple[Ints, Ints]:
        """Return the variable of which each label's unit is a power, and the power: 1 or -1."""
        return self._root[labels], self._sign[labels]

    def power_between(self, labels: Ints, others: Ints) -> int:
        """Return the power, 1 or -1, that maps units to others up to one factor, or else 0."""
        (roots, signs), (same, directions) = map(self.representatives, (labels, others))
        powers = signs * directions
        if (roots == same).all() and (powers == powers[0]).all():
            return int(powers[0]) if (roots != roots[0]).any() else 1
        pairs = [
            (self.of(x), self.of(y)) for x, y in zip(labels.tolist(), others.tolist(), strict=True)
        ]
        for power in (1, -1):
            remainders = [self.added([x, {v: -power * c for v, c in y.items()}]) for x, y in pairs]
            if all(row == remainders[0] for row in remainders):
                return power
        return 0

    def added(self, rows: Iterable[Row]) -> Row:
        """Return the sum of linear combinations."""
        total: Row = {}
        for row in rows:
            for v, c in row.items():
                self._add(total, v, c)
        return {v: c for v, c in total.items() if c}

    # -------------------------------------------------------------- labels that are joined
    def _short(self, terms: _Terms) -> NDArray[np.bool_]:
        """Return a mask of equations that make one label vanish, or two equal up to sign."""
        labels, sizes = terms[0], np.abs(terms[1])
        live = (labels > 0).sum(1)
        return (live == 1) | ((live == 2) & (sizes.max(1) * 2 == sizes.sum(1)))

    def _joined(self, left: Sequence[_Terms]) -> list[_Terms]:
        """Merge labels by all short equations, and return the remaining ones, shortened."""
        count = self.count
        edges = [np.array([[0, count]])]
        longer = []
        for labels, c in left:
            short = self._short((labels, c))
            longer.append((labels[~short], c[~short]))
            ends = np.sort(np.where(labels[short] > 0, np.arange(labels.shape[1]), -1), 1)[:, -2:]
            ends = np.concatenate([np.full((len(ends), 2 - ends.shape[1]), -1), ends], 1)
            rows = np.arange(len(ends))[:, None]
            targets = np.where(ends < 0, 0, labels[short][rows, ends])
            same = (np.where(ends < 0, 1, c[short][rows, ends]) > 0).sum(1) != 1
            same &= self._over == "rational"
            a, b = targets[:, 0], targets[:, 1]
            edges += [
                np.stack([a, b + count * same], 1),
                np.stack([a + count, b + count * ~same], 1),
            ]
        both = connected(edges, 2 * count)
        first = np.full(2 * count, 2 * count)
        np.minimum.at(first, both, np.arange(2 * count))
        plus, minus = first[both[:count]], first[both[count:]]
        is_zero = plus == minus
        root = np.where(is_zero, 0, np.minimum(plus, minus))
        sign = np.where(is_zero | (plus < minus), 1, -1)
        self._sign = self._sign * sign[self._root]
        self._root = root[self._root]
        return [self._replaced(terms, root, sign) for terms in longer if len(terms[0])]

    def _differences(self, terms: _Terms) -> _Terms:
        """Subtract equations with all but one label in common, as in tables."""
        labels, c = terms
        pairs = []
        for k in range(labels.shape[1]):
            beside = np.concatenate([np.delete(labels, k, 1), np.delete(c, k, 1)], 1)
            order = np.lexsort(beside.T)
            same = (beside[order[1:]] == beside[order[:-1]]).all(1)
            neighbours = np.stack([order[1:][same], order[:-1][same]], 1)
            pairs.append((labels[neighbours, k], c[neighbours, k] * np.array([1, -1])))
        differences = np.concatenate([x for x, _ in pairs]), np.concatenate([x for _, x in pairs])
        is_short = self._short(differences)
        return differences[0][is_short], differences[1][is_short]

    def _replaced(self, terms: _Terms, root: Ints, sign: Ints) -> _Terms:
        """Substitute the representatives, with one term for each, and drop duplicates."""
        labels, c = terms
        c = c * sign[labels]
        labels = root[labels]
        order = np.argsort(labels, 1, kind="stable")
        labels, c = np.take_along_axis(labels, order, 1), np.take_along_axis(c, order, 1)
        for k in range(1, labels.shape[1]):
            same = labels[:, k] == labels[:, k - 1]
            c[same, k] += c[same, k - 1]
            labels[same, k - 1] = 0
        c = c % 2 if self._over == "two" else c
        labels, c = np.where(c == 0, 0, labels), np.where(labels == 0, 0, c)
        rows = distinct_rows([*labels.T, *c.T])
        rows = rows[(rows[:, : labels.shape[1]] > 0).any(1)]
        return rows[:, : labels.shape[1]], rows[:, labels.shape[1] :]

    # -------------------------------------------------------------- elimination
    def rows(self, terms: _Terms) -> Iterable[Row]:
        """Yield the rows of a table as linear combinations."""
        for labels, c in zip(terms[0].tolist(), terms[1].tolist(), strict=True):
            yield {v: k for v, k in zip(labels, c, strict=True) if v}

    def _reduced(self, row: Row) -> Row:
        if self._solved.keys().isdisjoint(row):
            return row
        result: Row = {}
        pending = list(row.items())
        while pending:
            v, c = pending.pop()
            if v in self._solved:
                pending += [(w, c * d) for w, d in self._solved[v].items()]
            else:
                self._add(result, v, c)
        return {v: c for v, c in result.items() if c}

    def _add(self, row: Row, v: int, c: Any) -> None:
        value = row.get(v, 0) + c
        row[v] = value % 2 if self._over == "two" else value

    def _eliminate(self, row: Row) -> None:
        if row:
            is_odd = self._over == "two"
            v = min(row, key=lambda v: (self._acts[v], -v)) if is_odd else max(row)
            c = row.pop(v)
            self._solved[v] = row if is_odd else {w: ratio(-k, c) for w, k in row.items()}


def ratio(a: Any, b: Any) -> Any:
    """Return the quotient of rational numbers, as an integer where possible."""
    return a // b if a % b == 0 else Fraction(a) / b


def _terms(equation: Equation, over: Field) -> _Terms:
    """Return the rows of an equation with integer coefficients."""
    shared = np.lcm.reduce([c.denominator for c in equation.coefficients])
    whole = [int(c * int(shared)) for c in equation.coefficients]
    c = np.broadcast_to(np.array(whole, np.int64), equation.labels.shape)
    return equation.labels.astype(np.int64), c % 2 if over == "two" else c


def _by_width(terms: Iterable[_Terms]) -> list[_Terms]:
    """Group equations by their number of labels, as one table for each number."""
    tables: dict[int, list[_Terms]] = {}
    for row in terms:
        tables.setdefault(row[0].shape[1], []).append(row)
    return [
        (np.concatenate([labels for labels, _ in row]), np.concatenate([c for _, c in row]))
        for row in tables.values()
    ]


def units_at_entries(factors: Sequence[Factor], over: Field) -> Ints:
    """Return the labels of entries, one row per entry, covering every label of each factor."""
    acting = [x for x in factors if (x.power if over == "rational" else x.parity)]
    if not acting:
        return np.zeros((0, 1), np.int64)
    shape = torch.broadcast_shapes(*(x.labels.shape for x in acting))
    places = np.concatenate([_first_places(x) for x in acting])
    index = tuple(places.T)
    columns = [x.labels.expand(shape).numpy()[index].ravel() for x in acting]
    return np.stack(columns, 1)


def _first_places(factor: Factor) -> Ints:
    """Return the first position of each label of a factor."""
    first = np.unique(factor.labels.numpy(), return_index=True)[1]
    return np.stack(np.unravel_index(first, (1, *factor.labels.shape)), 1)[:, 1:]
