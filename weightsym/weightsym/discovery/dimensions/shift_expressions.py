"""Constants that may be added to tensor entries: sums of unknowns, and their equations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, eye_array, vstack
from torch import Tensor

from weightsym.discovery.dimensions.hashing import mix
from weightsym.discovery.dimensions.scales import connected
from weightsym.discovery.dimensions.values import Ints, compress

_MOST = 4_000_000
"""The number of sums that are followed; what would be in more of them is held fixed, and said."""
_Row: TypeAlias = dict[int, int | Fraction]
_Pattern: TypeAlias = frozenset[frozenset[tuple[int, int | Fraction]]]


class Read(NamedTuple):
    """A layer whose weight multiplies channels that may be shifted by constants.

    Attributes:
        weight: its name.
        dim: the dimension of the weight that is summed over.
        blocks: into how many blocks its rows fall.
        size: the size of a block along ``dim``.
        total: the number of rows of the whole weight.
        positions: by channel, where it lies along ``dim``, once for every block.
        rows: the rows that are used.
        incoming: by channel, the number of what is added to it.
        made: by row, the number of what the layer makes of that.
    """

    weight: str
    dim: int
    blocks: int
    size: int
    total: int
    positions: Ints
    rows: Ints
    incoming: Ints
    made: Ints


class Expressions:
    """Sums of unknown constants, identified by numbers. Number 0 stands for zero.

    A number is that of an unknown, of the sum or the difference of two other numbers, or of
    something that vanishes with other numbers, such as their product with an activation.

    Attributes:
        is_full: whether there were more sums than are followed.
    """

    def __init__(self) -> None:
        self.count = 1
        self.reads: list[Read] = []
        self.sums = [np.zeros((0, 4), np.int64)]
        self.sources = [np.zeros((0, 3), np.int64)]
        self.stops = [np.zeros(0, np.int64)]
        self._factors, self.is_full = 0, False
        self._zero, self._made, self._read = np.zeros((3, 1024), np.bool_)

    # -------------------------------------------------------------- numbers
    def fresh(self, *shape: int) -> Tensor:
        """Return new unknowns in a given shape."""
        size = int(np.prod(shape, dtype=np.int64))
        self.count += size
        if self.count > len(self._zero):
            more = (0, 2 * self.count - len(self._zero))
            self._zero, self._made, self._read = (
                np.pad(flags, more) for flags in (self._zero, self._made, self._read)
            )
        return torch.arange(self.count - size, self.count).reshape(shape)

    def stop(self, numbers: Tensor) -> None:
        """Require some sums to be zero."""
        stopped = np.unique(numbers.numpy())
        stopped = stopped[(stopped > 0) & ~self._zero[stopped]]
        self._zero[stopped] = True
        self.stops.append(stopped)

    def live(self, numbers: Tensor) -> Tensor | None:
        """Replace the stopped sums by zero. Return None if all are stopped."""
        left = numbers.masked_fill(torch.from_numpy(self._zero)[numbers], 0)
        return compress(left) if bool(left.any()) else None

    def combine(self, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
        """Return the numbers of ``a + sign * b``."""
        a, b = torch.broadcast_tensors(a, b)
        single = (b == 0) | ((a == 0) & (sign > 0))
        result = torch.where(b == 0, a, b)
        cancels = (a == b) & (sign < 0)
        two = ~single & ~cancels
        result = result.masked_fill(~single, 0)
        if bool(two.any()):
            result = result.masked_scatter(two, self._sum(a[two].numpy(), b[two].numpy(), sign))
        return compress(result)

    def _sum(self, a: Ints, b: Ints, sign: int) -> Tensor:
        keys, index = np.unique(a * self.count + b, return_inverse=True)
        first, second = np.divmod(keys, self.count)
        if self.count + len(keys) > _MOST:
            self.is_full = True
            self.stop(torch.from_numpy(np.concatenate([a, b])))
            return torch.zeros(len(a), dtype=torch.long)
        new = self.fresh(len(keys)).numpy()
        self.sums.append(np.column_stack([new, first, second, np.full(len(new), sign)]))
        self._made[new] = self._made[first] | self._made[second]
        self._read[new] = self._read[first] & self._read[second]
        return torch.from_numpy(new[index])

    def equate(self, numbers: Tensor, dims: Iterable[int]) -> Tensor:
        """Require the same constant along some dimensions, and reduce them to size 1."""
        for d in dims:
            first = numbers.narrow(d, 0, min(1, numbers.shape[d]))
            if numbers.shape[d] > 1:
                self.stop(self.combine(numbers, first, -1))
            numbers = first
        return numbers

    # -------------------------------------------------------------- what operations make of them
    def made_of(self, numbers: Tensor, *shape: int) -> Tensor:
        """Return new sums, known only to vanish if the given ones all do."""
        result, hub = self.fresh(*shape), self.fresh(1)
        self.depend(result, hub)
        self.depend(hub, torch.unique(numbers))
        return result

    def multiple(self, numbers: Tensor) -> Tensor:
        """Return the sums times an unknown nonzero factor."""
        distinct, index = torch.unique(numbers, return_inverse=True)
        result = self.fresh(len(distinct))
        self._factors += 1
        self.depend(result, distinct, self._factors)
        return result[index].masked_fill(numbers == 0, 0)

    def depend(self, results: Tensor, sources: Tensor, factor: int = 0) -> None:
        """Record that each result vanishes if its sources do."""
        self._made[results.numpy()] = True
        pairs = torch.stack(torch.broadcast_tensors(results, sources), -1).reshape(-1, 2)
        pairs = pairs[pairs[:, 1] > 0]
        self.sources.append(torch.nn.functional.pad(pairs, (0, 1), value=factor).numpy())

    def read(self, layer: Read) -> Tensor:
        """Return the sums that a layer makes of its input channels, by row."""
        result = self.made_of(torch.from_numpy(layer.incoming), len(layer.rows))
        self._read[result.numpy()] = True
        self.reads.append(layer._replace(made=result.numpy()))
        return result

    def is_made(self, numbers: Tensor) -> Tensor:
        """Return whether each sum is known only by when it vanishes."""
        return torch.from_numpy(self._made)[numbers]

    def is_read(self, numbers: Tensor) -> Tensor:
        """Return whether each sum stands for a layer's output and nothing else."""
        return torch.from_numpy(self._read)[numbers]


class Solution:
    """The constants that may be added, in terms of free unknowns.

    Attributes:
        reads: the layers, without those that read the same as another one.
        count: how many numbers there are.
    """

    def __init__(self, expressions: Expressions) -> None:
        self.count = count = expressions.count
        sums = np.concatenate(expressions.sums)
        self._is_sum = np.zeros(count, np.bool_)
        self._is_sum[sums[:, 0]] = True
        plain = np.flatnonzero(~self._is_sum)
        self._parts = self._matrix(
            np.r_[plain, sums[:, 0], sums[:, 0]], np.r_[plain, sums[:, 1], sums[:, 2]],
            np.r_[np.ones(len(plain)), np.ones(len(sums)), sums[:, 3]],
        )  # fmt: skip
        self._same = eye_array(count, dtype=np.int64, format="csr")
        self.reads = self._distinct(expressions.reads)
        self._sources = np.concatenate(expressions.sources)

    def solve(self, stops: Ints) -> None:
        """Solve for the constants, given the sums that must be zero."""
        is_zero, equations = self._equations(stops)
        entries, is_bound = _solved(equations, is_zero)
        free = np.flatnonzero(~is_bound & ~self._is_sum)
        self._solved = self._matrix(
            np.r_[free, entries[:, 0]], np.r_[free, entries[:, 1]],
            np.r_[np.ones(len(free)), entries[:, 2]],
        )  # fmt: skip

    def _matrix(
        self, rows: Ints, columns: Ints, values: NDArray[np.generic], height: int | None = None
    ) -> csr_array:
        shape = self.count if height is None else height, self.count
        return csr_array((values.astype(np.int64), (rows, columns)), shape)

    def terms(self, numbers: Ints) -> csr_array:
        """Return the linear combination that each number stands for."""
        ones = np.ones(len(numbers))
        return self._expanded(self._matrix(np.arange(len(numbers)), numbers, ones, len(numbers)))

    def of(self, numbers: Ints) -> csr_array:
        """Return the coefficients of the free unknowns in each number."""
        solved = csr_array(self.terms(numbers) @ self._solved)
        solved.eliminate_zeros()
        return solved

    def _expanded(self, rows: csr_array) -> csr_array:
        while self._is_sum[rows.indices].any():
            rows = csr_array(rows @ self._parts)
        rows = csr_array(rows @ self._same)
        rows.data[rows.indices == 0] = 0
        rows.eliminate_zeros()
        return rows

    def _distinct(self, reads: Sequence[Read]) -> list[Read]:
        """Merge repeated reads of a layer with equal inputs, whose outputs are then equal."""
        distinct: dict[object, Read] = {}
        same = np.arange(self.count)
        incoming = self.terms(_joined(r.incoming for r in reads))
        incoming.sort_indices()
        start = 0
        for layer in reads:
            rows = incoming[start : start + len(layer.incoming)]
            start += len(layer.incoming)
            arrays = (layer.positions, layer.rows, rows.indptr, rows.indices, rows.data)
            key = (layer.weight, layer.dim, *(x.tobytes() for x in arrays))
            same[layer.made] = distinct.setdefault(key, layer).made
        self._same = self._matrix(np.arange(self.count), same, np.ones(self.count))
        return list(distinct.values())

    def _equations(self, stops: Ints) -> tuple[NDArray[np.bool_], csr_array]:
        """Return a mask of the vanishing sums, and the equations of the others.

        Something made of constants vanishes, and they do, where it is in an equation or reaches a
        layer. But multiples by one number fulfil the equations of what they are multiples of.
        """
        sources = self._sources
        factor, is_made = np.zeros(self.count, np.int64), np.zeros(self.count, np.bool_)
        factor[sources[:, 0]], is_made[sources[:, 0]] = sources[:, 2], True
        source = self._matrix(sources[:, 0], sources[:, 1], np.ones(len(sources)))
        is_zero = np.zeros(self.count, np.bool_)
        incoming = self.terms(_joined(r.incoming for r in self.reads)).indices
        vanishing = np.unique(incoming[is_made[incoming]])
        equations = self.terms(stops)
        while True:
            is_zero[vanishing] = True
            stopped = np.unique(sources[np.isin(sources[:, 0], vanishing), 1])
            equations = _without(vstack([equations, self.terms(stopped)], format="csr"), is_zero)
            if not is_made[equations.indices].any():
                return is_zero, equations
            mixed = np.logical_or.reduceat(is_made[equations.indices], equations.indptr[:-1])
            left, equations = equations[np.flatnonzero(mixed)], equations[np.flatnonzero(~mixed)]
            low, high = (
                bound.reduceat(factor[left.indices], left.indptr[:-1])
                for bound in (np.minimum, np.maximum)
            )
            is_multiple = (low == high) & (low > 0)
            scaled = self._expanded(csr_array(left[np.flatnonzero(is_multiple)] @ source))
            left = left[np.flatnonzero(~is_multiple)]
            vanishing = np.unique(left.indices[is_made[left.indices]])
            equations = vstack([equations, scaled, left], format="csr")


def _joined(arrays: Iterable[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _without(equations: csr_array, is_zero: NDArray[np.bool_]) -> csr_array:
    """Drop the unknowns that are zero, and then the empty equations."""
    equations = csr_array(equations.multiply(~is_zero))
    equations.eliminate_zeros()
    return equations[np.flatnonzero(np.diff(equations.indptr))]


# ------------------------------------------------------------ elimination
def _solved(equations: csr_array, is_zero: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """Return entries (unknown, free unknown, coefficient), and a mask of bound unknowns.

    Equations that share no unknown are solved apart, and those of one form, such as the equations
    of all channels of a layer, once.
    """
    is_bound = is_zero.copy()
    is_bound[0] = True
    while (single := np.flatnonzero(np.diff(equations.indptr) == 1)).size:
        is_bound[equations.indices[equations.indptr[single]]] = True
        equations = _without(equations, is_bound)
    entries = [np.zeros((0, 3), np.int64)]
    for pattern, unknowns in _patterns(equations):
        for pivot, row in _eliminated(pattern):
            bound = unknowns[:, pivot]
            is_bound[bound] = True
            for v, k in row.items():
                entries.append(np.stack([bound, unknowns[:, v], np.full(len(bound), int(k))], 1))
    return np.concatenate(entries), is_bound


def _patterns(equations: csr_array) -> Iterator[tuple[_Pattern, Ints]]:
    """Group systems of equations by their pattern, and yield the unknowns of each as rows."""
    rows, columns = (x.astype(np.int64) for x in equations.tocoo().coords)
    height, count = equations.shape
    component = connected([np.stack([rows, columns + height], 1)], height + count)
    unknowns = np.unique(columns)
    unknowns = unknowns[np.argsort(component[unknowns + height], kind="stable")]
    members, rank = component[unknowns + height], np.zeros(count, np.int64)
    rank[unknowns] = np.arange(len(members)) - _first(members)
    order = np.lexsort((columns, rows, component[rows]))
    rows, ranks, numbers = rows[order], rank[columns[order]], equations.data[order]
    line = np.cumsum(np.r_[True, rows[1:] != rows[:-1]][: len(rows)])
    line -= line[_first(component[rows])]
    form = np.zeros(height + count, np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(form, component[rows], mix(line, ranks, numbers))
    present = np.unique(members)
    for pattern in np.unique(form[present]):
        alike = present[form[present] == pattern]
        by_line: dict[int, _Row] = defaultdict(dict)
        for k in np.flatnonzero(component[rows] == alike[0]).tolist():
            by_line[int(line[k])][int(ranks[k])] = int(numbers[k])
        size = int((members == alike[0]).sum())
        table = unknowns[np.searchsorted(members, alike)[:, None] + np.arange(size)]
        yield frozenset(frozenset(row.items()) for row in by_line.values()), table


def _first(runs: Ints) -> Ints:
    """Return the start of the run of equal numbers that contains each position."""
    starts = np.r_[True, runs[1:] != runs[:-1]][: len(runs)]
    return np.maximum.accumulate(np.where(starts, np.arange(len(runs)), 0))


def _eliminated(pattern: _Pattern) -> list[tuple[int, _Row]]:
    """Express unknowns by earlier ones. All are zero if some coefficients would be fractions."""
    solved: dict[int, _Row] = {}
    for items in sorted(pattern, key=lambda row: (len(row), sorted(row))):
        row = _reduced(dict(items), solved)
        if row:
            pivot = max((v for v, c in row.items() if abs(c) == 1), default=max(row))
            c = row.pop(pivot)
            solved[pivot] = {v: -k * c if abs(c) == 1 else -Fraction(k) / c for v, k in row.items()}
    rows = {v: _reduced(row, solved) for v, row in solved.items()}
    if any(c != int(c) for row in rows.values() for c in row.values()):
        return [(v, {}) for v in {v for items in pattern for v, _ in items}]
    return list(rows.items())


def _reduced(row: _Row, solved: dict[int, _Row]) -> _Row:
    """Substitute the solved unknowns in a row."""
    result: _Row = {}
    pending = list(row.items())
    while pending:
        v, c = pending.pop()
        if v in solved:
            pending += [(w, c * k) for w, k in solved[v].items()]
        else:
            result[v] = result.get(v, 0) + c
    return {v: c for v, c in result.items() if c}
