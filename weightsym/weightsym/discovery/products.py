r"""Products with large weight matrices that are read a few rows at a time.

To move the axes of a matrix is to move the signals before and after it:

.. math:: (A W B^T)\, x = A\, (W\, (B^T x))

So a network runs under many elements of its group while every weight is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weightsym.discovery.dimensions.nodes import operation_of
from weightsym.groups.axis_maps import AxisMap, Mixing
from weightsym.groups.element import Element
from weightsym.groups.placements import Axis
from weightsym.networks.forward import in_precision

LARGE = 2**20
"""The number of weights from which on a matrix is read by rows."""
_AT_ONCE = 2**18
_OPERANDS = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "mm": (0, 1, None), "matmul": (0, 1, None)}
"""By operation, which argument is the signal, which the matrix, and which the bias."""

Weights = Callable[[str], "Tensor | Matrix"]
Note = Callable[[slice, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that is read a few rows at a time, and whose axes are then moved.

    Attributes:
        shape: of the matrix.
        read: gives some of its rows.
        maps: what happens to its two axes.
        note: takes rows, their weights and their derivatives; nothing is noted where it is None.
        anchor: a number that requires a gradient, where something is noted.
    """

    shape: torch.Size
    read: Callable[[slice], Tensor]
    maps: Mapping[int, AxisMap] = field(default_factory=dict)
    note: Note | None = None
    anchor: Tensor | None = None

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows of the original matrix."""
        step = max(1, _AT_ONCE // self.shape[1])
        for start in range(0, self.shape[0], step):
            rows = slice(start, min(start + step, self.shape[0]))
            yield rows, self.read(rows)

    def whole(self) -> Tensor:
        """Return the moved matrix."""
        if self.note is not None:
            return _NotedWhole.apply(self.anchor, replace(self, note=None), self.note)
        w = torch.cat([block for _, block in self.parts()])
        for dim, axis_map in self.maps.items():
            w = axis_map.act(w, _axis(dim, w), owned=True)
        return w

    def to(self, precision: torch.dtype | None) -> Matrix:
        """Return the matrix in another precision."""
        return self.changed(lambda rows, block: in_precision(block, precision))

    def changed(self, function: Callable[[slice, Tensor], Tensor]) -> Matrix:
        """Return the matrix with a function applied to each block of rows."""
        return replace(self, read=lambda rows: function(rows, self.read(rows)))


def moved_matrix(element: Element, name: str, matrix: Matrix) -> Matrix | None:
    """Apply an element to a matrix. None if it does more than move two axes."""
    sym, maps = element.sym, dict[int, AxisMap]()
    for step in element.steps:
        axes = [a for a in sym.axes_of.get(name, ()) if a in step.axes]
        shifted = (p for k in step.shifts for p in sym.shifts[k].placements)
        if (
            len(element.steps) > 1
            or step.sources.get(name, name) != name
            or name in step.constants
            or any(sym.axes[p.axis].tensor == name for p in shifted)
            or {(sym.axes[a].dim in (0, 1), sym.axes[a].blocks) for a in axes} > {(True, 1)}
            or len({sym.axes[a].dim for a in axes}) < len(axes)
        ):
            return None
        maps = {sym.axes[a].dim or 0: step.axes[a] for a in axes}
    return replace(matrix, maps=maps)


# ------------------------------------------------------------ products
def products(node: Node, operands_by_run: Sequence[tuple[Any, Any]]) -> Iterator[Tensor] | None:
    """Yield the products of a signal with differently moved matrices. None for other operations.

    Args:
        node: the operation.
        operands_by_run: by run of the graph, its arguments and its keywords.
    """
    operands = _OPERANDS.get(operation_of(node))
    args, kwargs = operands_by_run[0]
    if operation_of(node) == "embedding" and isinstance(args[0], Matrix):
        return _chosen(operands_by_run)
    if operands is None or kwargs or not isinstance(args[operands[1]], Matrix):
        return None
    signal, matrix, bias = operands
    summed = 1 if operation_of(node) == "linear" else 0
    matrices = [args[matrix] for args, _ in operands_by_run]
    signals = [args[signal] for args, _ in operands_by_run]
    before = [_transposed(m, summed, x) for m, x in zip(matrices, signals, strict=True)]
    rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in before])
    first = matrices[0]
    noted = (rows, first.anchor, first, summed)
    product = _product(rows, first, summed) if first.note is None else _Noted.apply(*noted)
    pieces = product.split([x[..., 0].numel() for x in before])
    results = []
    for m, x, y, (args, _) in zip(matrices, before, pieces, operands_by_run, strict=True):
        y = y.reshape(*x.shape[:-1], -1)
        if 1 - summed in m.maps:
            y = m.maps[1 - summed].act(y, _axis(y.ndim - 1, y))
        has_bias = bias is not None and len(args) > bias and args[bias] is not None
        results.append(y + args[bias] if has_bias else y)
    return iter(results)


def _chosen(operands_by_run: Sequence[tuple[Any, Any]]) -> Iterator[Tensor] | None:
    """Yield the rows of differently moved matrices at some places. None if rows move, too."""
    if any(0 in args[0].maps for args, _ in operands_by_run):
        return None
    results = []
    for (m, places, *_), _ in operands_by_run:
        distinct, index = places.unique(return_inverse=True)
        if m.note is None:
            rows = _rows(m, distinct.tolist())
        else:
            rows = _NotedRows.apply(m.anchor, m, distinct.tolist())
        y = rows[index]
        results.append(m.maps[1].act(y, _axis(y.ndim - 1, y)) if 1 in m.maps else y)
    return iter(results)


def _rows(matrix: Matrix, places: Sequence[int]) -> Tensor:
    return torch.cat([matrix.read(slice(k, k + 1)) for k in places])


def _product(x: Tensor, matrix: Matrix, summed: int) -> Tensor:
    if summed == 1:
        return torch.cat([x @ block.mT for _, block in matrix.parts()], 1)
    return torch.stack([x[:, rows] @ block for rows, block in matrix.parts()]).sum(0)


def _transposed(matrix: Matrix, dim: int, x: Tensor) -> Tensor:
    """Apply the transposed axis map of a matrix to a signal."""
    axis_map = matrix.maps.get(dim)
    if axis_map is None:
        return x
    for mixing in reversed(axis_map.mixings):
        is_reflection = mixing.matrices.ndim == 2
        turned = mixing if is_reflection else Mixing(mixing.positions, mixing.matrices.mT)
        x = turned.act(x)
    return axis_map.monomial.map(torch.reciprocal).inverse.act(x, _axis(x.ndim - 1, x), 0, False)


def _axis(dim: int, t: Tensor) -> Axis:
    return Axis("", dim, t.shape[dim], "raw")


class _Noted(torch.autograd.Function):
    """A product with a matrix whose gradient is recorded a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, matrix: Matrix, summed: int) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(x)
        ctx.known = matrix, summed
        return _product(x, matrix, summed)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        """Record the gradient of the matrix, and return that of the signal."""
        (x,) = ctx.saved_tensors
        matrix, summed = ctx.known
        outer, inner = (slope, x) if summed == 1 else (x, slope)
        pieces = []
        for rows, block in matrix.parts():
            matrix.note(rows, block, outer[:, rows].mT @ inner)
            pieces.append(slope[:, rows] @ block if summed == 1 else slope @ block.mT)
        back = torch.stack(pieces).sum(0) if summed == 1 else torch.cat(pieces, 1)
        return back, None, None, None


class _NotedRows(torch.autograd.Function):
    """Rows of a matrix whose gradients are recorded."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, matrix: Matrix, places: Sequence[int]) -> Tensor:
        """Return the rows."""
        ctx.known = matrix, places
        return _rows(matrix, places)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        """Record their gradients."""
        matrix, places = ctx.known
        for k, row in zip(places, slope.split(1), strict=True):
            rows = slice(k, k + 1)
            matrix.note(rows, matrix.read(rows), row)
        return None, None, None


class _NotedWhole(torch.autograd.Function):
    """A whole matrix whose gradient is recorded."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, matrix: Matrix, note: Note) -> Tensor:
        """Return the matrix."""
        ctx.known = matrix, note
        return matrix.whole()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        """Record its gradient."""
        matrix, note = ctx.known
        for rows, block in matrix.parts():
            note(rows, block, slope[rows])
        return None, None, None
