"""Tangents of an orbit as a sparse matrix of fixed pattern, whose values follow the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from scipy import sparse
from scipy.linalg import cho_factor, cho_solve
from torch import Tensor

from weightsym.groups.axis_maps import along_axis
from weightsym.groups.placements import Placement, Reader, complex_matrices
from weightsym.groups.symmetries import LinearGroup, Symmetries

_MOST = 2_000_000
"""Entries of a matrix, above which products are derivatives instead."""
_RANKED = 1500
"""Generators up to which their rank is counted."""
_DENSE, _FEW = 300, 200_000
"""Generators, and entries, up to which the inner products of tangents are solved for."""
Entries = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Places of weights, generators, places of the weights that they multiply, and factors."""


class SparseTangents:
    r"""The matrix of directions at one network, :math:`T_{pu} = \sum_q c_{puq} w_q`.

    Args:
        pattern: of the symmetries.
        weights: all that may move, side by side.
    """

    def __init__(self, pattern: _Pattern, weights: np.ndarray) -> None:
        self._pattern, self._count = pattern, pattern.basis.shape[1]
        self._numbers = pattern.factors * np.append(weights, 1.0)[pattern.sources]

    @cached_property
    def _matrices(self) -> tuple[Any, Any]:
        """The matrix and its transpose."""
        pattern = self._pattern
        shape = len(pattern.starts) - 1, pattern.basis.shape[0]
        matrix = sparse.csr_matrix((self._numbers, pattern.columns, pattern.starts), shape)
        matrix = (matrix @ pattern.basis).tocsr() if pattern.mixes else matrix
        return matrix, matrix.T

    @property
    def matrix(self) -> Any:
        """The tangents as columns."""
        return self._matrices[0]

    def push(self, generators: np.ndarray) -> np.ndarray:
        """Return the direction of generators."""
        return self._matrices[0] @ generators

    def pull(self, directions: np.ndarray) -> np.ndarray:
        """Return the inner products of a direction with all tangents."""
        return self._matrices[1] @ directions

    @cached_property
    def inverse_lengths(self) -> np.ndarray:
        """The inverse length of every tangent, or zero."""
        columns, numbers = self._pattern.columns, self._numbers
        if self._pattern.mixes:
            columns, numbers = self._matrices[0].indices, self._matrices[0].data
        squares = np.bincount(columns, numbers * numbers, self._count)
        return np.divide(1, np.sqrt(squares), np.zeros(self._count), where=squares > 0)

    @cached_property
    def factor(self) -> Any:
        """A Cholesky factor of the Gram matrix of unit tangents, if few and independent."""
        scale, pattern = self.inverse_lengths, self._pattern
        small = self._count <= _DENSE and len(self._numbers) <= _FEW
        if not small or pattern.mixes or not scale.all():
            return None
        first, second, cells = pattern.pairs
        products = self._numbers[first] * self._numbers[second]
        gram = np.bincount(cells, products, self._count**2).reshape(self._count, -1)
        gram *= np.outer(scale, scale)
        try:
            root = cho_factor(gram, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            return None
        return root if root[0].diagonal().min() > 1e-4 else None

    def off(self, directions: np.ndarray) -> np.ndarray:
        """Project a direction onto the complement of the tangents."""
        pattern, scale, numbers = self._pattern, self.inverse_lengths, self._numbers
        for _ in range(2):  # the second time takes away what rounding has left
            along = numbers * directions[pattern.rows]
            slope = scale * np.bincount(pattern.columns, along, self._count)
            solution = scale * cho_solve(self.factor, slope, check_finite=False)
            step = np.bincount(pattern.rows, numbers * solution[pattern.columns], len(directions))
            directions = directions - step
        return directions


def sparse_tangents(sym: Symmetries, names: Sequence[str]) -> _Pattern | None:
    """Return the cached pattern of tangents, or None if it is large.

    Args:
        sym: what `discover` returned.
        names: tensors that may move.
    """
    patterns = _PATTERNS.setdefault(sym, {})
    key = tuple(names)
    if key not in patterns:
        patterns[key] = _pattern(sym, names) if _size(sym) < _MOST else None
    return patterns[key]


def generic_rank(sym: Symmetries) -> int | None:
    """Return the dimension of an orbit at random weights, or None if it is too large to compute."""
    pattern = sparse_tangents(sym, tuple(sym.shapes))
    if pattern is None or pattern.basis.shape[1] > _RANKED:
        return None
    count = sum(shape.numel() for shape in sym.shapes.values())
    weights = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tangents = SparseTangents(pattern, weights.numpy())
    lengths = sparse.diags(tangents.inverse_lengths)
    directions = tangents.matrix @ lengths
    return int(np.linalg.matrix_rank((directions.T @ directions).toarray(), 1e-10, hermitian=True))


@dataclass(frozen=True, eq=False)
class _Pattern:
    """The sparsity pattern: the multiples of weights at every position of a matrix.

    Its columns are the numbers of full matrices; ``basis`` makes these of generators.
    """

    starts: np.ndarray
    columns: np.ndarray
    sources: np.ndarray
    factors: np.ndarray
    basis: sparse.csr_matrix
    moving: tuple[str, ...]
    mixes: bool

    @cached_property
    def rows(self) -> np.ndarray:
        """The row of every entry."""
        counts = np.diff(self.starts)
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All pairs of entries of a row, and the cells of the Gram matrix that they add to."""
        partners, begin = np.diff(self.starts)[self.rows], self.starts[self.rows]
        first = np.repeat(np.arange(len(partners)), partners)
        ends = np.cumsum(partners)
        within = np.arange(len(first)) - np.repeat(ends - partners, partners)
        second = np.repeat(begin, partners) + within
        return first, second, self.columns[first] * self.basis.shape[0] + self.columns[second]


_PATTERNS: WeakKeyDictionary[Symmetries, dict[tuple[str, ...], _Pattern | None]]
_PATTERNS = WeakKeyDictionary()


def _size(sym: Symmetries) -> int:
    """Estimate the number of entries."""
    numbers = {name: math.prod(shape) for name, shape in sym.shapes.items()}
    mixed = sum(
        group.size * numbers.get(sym.axes[placement.axis].tensor, 0)
        for group in sym.linear
        for placement in group.placements
    )
    return mixed + 2 * sum(numbers.values())


def _pattern(sym: Symmetries, names: Sequence[str]) -> _Pattern | None:
    ends = np.cumsum([sym.shapes[n].numel() for n in names])
    places = {
        n: torch.arange(end - sym.shapes[n].numel(), end).reshape(sym.shapes[n])
        for n, end in zip(names, ends, strict=True)
    }
    first, bases = 0, []
    parts: list[Entries] = []
    if sym.scalings:
        parts += _of_scales(sym, places)
        first = sym.scale_powers[0].shape[1]
        bases.append(sparse.identity(first))
    for group in sym.linear:
        parts += (_of_matrices(sym, group, p, places, first) for p in group.placements)
        count = group.dimension // group.spaces
        lie = algebra(group, torch.eye(count).double()[:, None]).reshape(count, -1).T.numpy()
        bases.append(sparse.kron(sparse.identity(group.spaces), lie))
        first += group.spaces * group.size**2
    for shift in sym.shifts:
        parts += (_of_biases(sym, p, places, first) for p in shift.placements)
        parts += (_of_readers(sym, r, places, first) for r in shift.readers)
        bases.append(sparse.identity(shift.size))
        first += shift.size
    rows, columns, sources, factors = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    order = np.lexsort((columns, rows))
    moving = [n for n in names if np.isin(places[n].numpy(), rows).any()]
    moved = torch.cat([places[n].flatten() for n in moving]).numpy()
    starts = np.searchsorted(rows[order], np.append(moved, ends[-1]))
    return _Pattern(
        starts,
        columns[order],
        sources[order],
        factors[order].astype(float),
        sparse.block_diag(bases, "csr"),
        tuple(moving),
        any(group.kind != "general" for group in sym.linear),
    )


def _of_scales(sym: Symmetries, places: dict[str, Tensor]) -> Iterator[Entries]:
    for axis, powers in zip(sym.axes, sym.scale_powers, strict=True):
        if axis.tensor in places:
            rows = places[axis.tensor]
            labels = axis.labels(rows.shape).expand(rows.shape).reshape(-1).numpy()
            entries = powers[labels].tocoo()
            moved = rows.reshape(-1).numpy()[entries.row]
            yield moved, entries.col, moved, entries.data


def _of_matrices(
    sym: Symmetries, group: LinearGroup, placement: Placement, places: dict[str, Tensor], first: int
) -> Entries:
    """Return the entries for one side of a space, which a matrix or its transpose mixes."""
    axis, n = sym.axes[placement.axis], group.size
    if axis.tensor not in places:
        return _NONE
    channels = along_axis(places[axis.tensor], axis, 0)[..., placement.positions]
    channels = channels.movedim((-3, -2), (0, 1)).reshape(group.spaces, n, -1)
    rows = channels[:, :, None].expand(-1, -1, n, -1)
    sources = channels[:, None].expand(-1, n, -1, -1)
    numbers = first + torch.arange(group.spaces * n * n).reshape(-1, n, n)
    if placement.exponent != 1:
        numbers = numbers.mT
    return _flat(rows, numbers[..., None].expand(rows.shape), sources, placement.exponent)


def _of_biases(
    sym: Symmetries, placement: Placement, places: dict[str, Tensor], first: int
) -> Entries:
    axis = sym.axes[placement.axis]
    if axis.tensor not in places:
        return _NONE
    rows = along_axis(places[axis.tensor], axis, 0)[..., placement.positions]
    columns = first + torch.arange(len(placement.positions))[:, None]
    return _flat(rows, columns.expand(rows.shape), torch.full_like(rows, -1), placement.exponent)


def _of_readers(sym: Symmetries, reader: Reader, places: dict[str, Tensor], first: int) -> Entries:
    """Return the entries for a bias that absorbs a layer's response to a shift."""
    placement = reader.channels
    axis = sym.axes[placement.axis]
    if reader.bias not in places or axis.tensor not in places:
        return _NONE
    assert axis.dim is not None
    weights = places[axis.tensor].movedim(axis.dim, -1)
    weights = weights.reshape(len(weights), -1, axis.size)
    outgoing = torch.arange(len(weights)) if reader.rows is None else reader.rows
    block = outgoing // (len(weights) // axis.blocks)
    units, repeats = placement.positions.shape
    entries = []
    for unit in range(units):
        for position in placement.positions[unit].tolist():
            mine = block == position // axis.size
            sources = weights[outgoing[mine], :, position % axis.size]
            rows = places[reader.bias].reshape(-1)[mine][:, None].expand(sources.shape)
            columns = torch.full_like(rows, first + unit)
            entries.append(_flat(rows, columns, sources, -placement.exponent))
    return tuple(np.concatenate(column) for column in zip(*entries, strict=True))  # type: ignore[return-value]  # of four


def _flat(rows: Tensor, columns: Tensor, sources: Tensor, factor: int) -> Entries:
    flat = [t.reshape(-1).numpy() for t in (rows, columns, sources)]
    return flat[0], flat[1], flat[2], np.full(len(flat[0]), factor)


_NONE: Entries = tuple(np.zeros(0, dtype=np.int64) for _ in range(4))  # type: ignore[assignment]  # of four


def algebra(group: LinearGroup, numbers: Tensor) -> Tensor:
    """Return matrices of the Lie algebra of a group from ``(..., spaces, numbers)``."""
    if group.kind == "general":
        return numbers.unflatten(-1, (group.size, group.size))
    if group.kind == "complex":
        return complex_matrices(*numbers.unbind(-1))
    if group.kind == "unit complex":
        return complex_matrices(torch.zeros_like(numbers[..., 0]), numbers[..., 0])
    basis = group.basis.to(numbers)
    n = basis.shape[1]
    rows, columns = torch.tril_indices(n, n, -1)
    lower = numbers.new_zeros(*numbers.shape[:-1], n, n)
    lower[..., rows, columns] = numbers
    return basis @ (lower - lower.mT) @ basis.mT
