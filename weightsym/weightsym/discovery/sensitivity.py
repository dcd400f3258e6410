"""Sensitivity of the outputs to the weights at each place of a group, from one gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weightsym.discovery.products import Matrix, Weights
from weightsym.groups.axis_maps import along_axis
from weightsym.groups.placements import LinearGroup, Placement, ShiftGroup
from weightsym.groups.symmetries import Group, PermutationGroup, Symmetries

Place = Placement | str
"""Positions along an axis, or a whole tensor."""
KINDS = ("permutations", "scalings", "signs", "linear", "shifts")


def places_of(sym: Symmetries) -> Iterator[Place]:
    """Yield all places that groups move, without biases that have no effect."""
    dead: dict[str, Tensor] = {}
    for placement in (p for group in sym.shifts if group.is_dead for p in group.placements):
        name, mask = tensor_at(placement, sym), _numbers_at(placement, sym)
        dead[name] = dead[name] | mask if name in dead else mask
    for place in (p for kind in KINDS for group in getattr(sym, kind) for p in places_in(group)):
        unfelt = None if isinstance(place, str) else dead.get(tensor_at(place, sym))
        if unfelt is None or bool((_numbers_at(place, sym) & ~unfelt).any()):
            yield place


def _numbers_at(place: Place, sym: Symmetries) -> Tensor:
    """Return the mask of a place on its tensor."""
    assert not isinstance(place, str)
    axis = sym.axes[place.axis]
    chosen = torch.zeros(axis.length, dtype=torch.bool)
    chosen[place.positions.reshape(-1).cpu()] = True
    return axis.spread(chosen, sym.shapes[axis.tensor]).expand(sym.shapes[axis.tensor])


def places_in(group: Group | LinearGroup | ShiftGroup) -> Iterator[Place]:
    """Yield all places that a group moves."""
    if isinstance(group, PermutationGroup):
        yield from (name for row in group.tensors for name in row)
    yield from group.placements


def tensor_at(place: Place, sym: Symmetries) -> str:
    """Return the tensor that contains a place."""
    return place if isinstance(place, str) else sym.axes[place.axis].tensor


class OutputMoves:
    r"""The change of a random sum of the outputs under changes of the weights.

    .. math:: s_P = \Big( \sum_{i \in P} \big( w_i \, \partial_i
        \sum_k r_k f_k(w) / |f| \big)^2 \Big)^{1/2}

    Args:
        run: from how weights are read to outputs.
        read: how they are read, in memory of their own.
        sym: the groups.
        sizes: of outputs, by tensor; those of size 0 do not count.
        fixed: tensors of which there is no derivative, such as statistics. They count as moving it.
    """

    def __init__(
        self,
        run: Callable[[Weights], list[Tensor]],
        read: Weights,
        sym: Symmetries,
        sizes: Sequence[float],
        fixed: Collection[str] = (),
    ) -> None:
        self._sym, self._fixed = sym, fixed
        self._squares: dict[str, dict[int | None, Tensor]] = {}
        groups = (group for kind in KINDS for group in getattr(sym, kind))
        moved = {tensor_at(place, sym) for group in groups for place in places_in(group)} - {*fixed}
        weights = _Reread(read, moved, self._note, self._matrix)
        with torch.enable_grad(), saved_tensors_hooks(weights.pack, weights.unpack):
            results = zip(run(weights.of), sizes, strict=True)
            pairs = [(t, size) for t, size in results if t.requires_grad and size]
            if pairs:
                inputs = [weights.anchor]
                torch.autograd.backward([t for t, _ in pairs], _directions(pairs), inputs=inputs)

    def _note(self, name: str, t: Tensor, slope: Tensor) -> None:
        """Record the squares of gradients times weights, by position on every axis."""
        moves = slope if slope.dtype.itemsize > 2 else slope.float()
        moves = moves.mul(t).square_()
        squares: dict[int | None, Tensor] = {}
        for a in self._sym.axes_of.get(name, ()):
            rows = along_axis(moves, self._sym.axes[a], 0)
            others = tuple(range(rows.ndim - 1))
            squares[a] = (rows.sum(others) if others else rows.clone()).cpu()
        squares[None] = next(iter(squares.values()), moves).sum()
        self._add(name, squares)

    def _add(self, name: str, squares: Mapping[int | None, Tensor]) -> None:
        before = self._squares.get(name, {})  # a weight that was let go of, and read once more
        self._squares[name] = {a: t + before[a] if before else t for a, t in squares.items()}

    def _matrix(self, name: str, matrix: Matrix, anchor: Tensor) -> Matrix | None:
        """Return a matrix that records its gradient. None unless its axes are rows and columns."""
        axes = {a: self._sym.axes[a] for a in self._sym.axes_of.get(name, ())}
        if any(axis.dim is None or axis.blocks > 1 for axis in axes.values()):
            return None

        def note(rows: slice, block: Tensor, slope: Tensor) -> None:
            moves = slope.mul(block).square_()
            squares: dict[int | None, Tensor] = {None: moves.sum()}
            for a, axis in axes.items():
                squares[a] = moves.new_zeros(matrix.shape[axis.dim or 0])
                squares[a][slice(None) if axis.dim else rows] = moves.sum(1 - (axis.dim or 0))
            self._add(name, squares)

        return replace(matrix, note=note, anchor=anchor)

    def at(self, place: Place) -> float:
        """Return the sensitivity of the outputs to the weights at a place."""
        squares = self._squares.get(tensor_at(place, self._sym))
        if squares is None:
            return 1.0 if tensor_at(place, self._sym) in self._fixed else 0.0
        if isinstance(place, str):
            return math.sqrt(float(squares[None]))
        return math.sqrt(float(squares[place.axis].double()[place.positions.flatten().cpu()].sum()))

    def without_any(self, axis: int) -> Tensor:
        """Return a mask of the positions of an axis to which the outputs are insensitive."""
        squares = self._squares.get(self._sym.axes[axis].tensor)
        if squares is None:
            is_fixed = self._sym.axes[axis].tensor in self._fixed
            return torch.full((self._sym.axes[axis].length,), not is_fixed)
        return squares[axis] == 0


class _Reread:
    """Weights with gradients that are freed after use and read again in the backward pass.

    Args:
        read: gives a weight.
        moved: the names of those with a derivative.
        note: takes a name, the weight and its derivative as soon as that is known.
        matrix: gives a large matrix that notes its derivatives itself, if it can.
    """

    def __init__(
        self,
        read: Weights,
        moved: Collection[str],
        note: Callable[[str, Tensor, Tensor], None],
        matrix: Callable[[str, Matrix, Tensor], Matrix | None],
    ) -> None:
        self._weights, self._moved, self._note, self._matrix = read, moved, note, matrix
        self._alive: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self.anchor = torch.zeros((), requires_grad=True)

    def _read(self, name: str) -> Tensor:
        weight = self._weights(name)
        return weight.whole() if isinstance(weight, Matrix) else weight

    def of(self, name: str) -> Tensor | Matrix:
        """Return one weight."""
        if name not in self._moved:
            return self._weights(name)
        weight: Tensor | None = self._alive.get(name)
        if weight is None:
            original = self._weights(name)
            matrix = (
                self._matrix(name, original, self.anchor) if isinstance(original, Matrix) else None
            )
            if matrix is not None:
                return matrix
        if weight is None:
            weight = self._alive[name] = _Leaf.apply(self.anchor, name, self._read, self._note)
        assert weight is not None
        return weight

    def pack(self, t: Tensor) -> Tensor | tuple[str, torch.Size, tuple[int, ...]]:
        """Save a tensor for autograd: a weight by its name and layout."""
        start = t.untyped_storage().data_ptr()
        for name, weight in self._alive.items():
            if weight.untyped_storage().data_ptr() == start and weight.numel() == t.numel():
                return name, t.shape, t.stride()
        return t

    def unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor."""
        if isinstance(saved, Tensor):
            return saved
        name, shape, stride = saved
        return self._read(name).as_strided(shape, stride)


class _Leaf(torch.autograd.Function):
    """A weight whose gradient is recorded as soon as it is known."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, name: str, lookup: Any, note: Any) -> Tensor:
        """Read the weight."""
        ctx.known = name, lookup, note
        weight: Tensor = lookup(name)
        return weight

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        """Record the gradient of the weight."""
        name, lookup, note = ctx.known
        note(name, lookup(name), slope)
        return None, None, None, None


def _directions(pairs: Sequence[tuple[Tensor, float]]) -> list[Tensor]:
    """Draw weights of the outputs in inverse proportion to their sizes and their number."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(t.shape, generator=generator, dtype=torch.float64) for t, _ in pairs]
    return [
        (r / (size * math.sqrt(t.numel()))).to(t) for r, (t, size) in zip(draws, pairs, strict=True)
    ]
