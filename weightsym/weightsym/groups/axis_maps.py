"""The action of an element on one axis: a monomial matrix, then mixing matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weightsym.groups.placements import Axis

Change = Callable[[Tensor], Tensor]


# ------------------------------------------------------------ monomial matrices
@dataclass(frozen=True, eq=False)
class Monomial:
    """A permutation with factors: new unit k is ``factor[k]`` times old unit ``index[k]``.

    Both are ``(units,)`` or ``(members, units)``. Without an index units stay, without a factor
    they keep their size.
    """

    index: Tensor | None = None
    factor: Tensor | None = None

    def __matmul__(self, first: Monomial) -> Monomial:
        index = self.index if first.index is None else _taken(first.index, self.index)
        factor, before = self.factor, _taken(first.factor, self.index)
        if factor is None or before is None:
            return Monomial(index, before if factor is None else factor)
        return Monomial(index, factor * before)

    @cached_property
    def inverse(self) -> Monomial:
        """The inverse monomial matrix."""
        back = None if self.index is None else self.index.argsort(-1)
        return Monomial(back, _taken(self.factor, back)).map(torch.reciprocal)

    def map(self, function: Change) -> Monomial:
        """Return the same permutation with other factors."""
        return Monomial(self.index, None if self.factor is None else function(self.factor))

    def act(self, w: Tensor, axis: Axis, offset: int, owned: bool) -> Tensor:
        """Apply the matrix to one axis of a tensor, in place if the tensor is owned."""
        if self.index is not None:
            moved = permute_axis(w, axis, self.index.to(w.device), offset, owned)
            w, owned = moved, True
        if self.factor is None:
            return w
        factor = axis.spread(self.factor.to(w), w.shape[offset:])
        in_place = owned and factor.ndim <= w.ndim and not factor.requires_grad
        return w.mul_(factor) if in_place else w * factor


def _taken(values: Tensor | None, index: Tensor | None) -> Tensor | None:
    return values if values is None or index is None else take_along_last(values, index)


def take_along_last(values: Tensor, index: Tensor) -> Tensor:
    """Gather along the last dimension, broadcasting the leading dimensions."""
    if values.ndim == index.ndim == 1:
        return values[index]
    lead = max(values.shape[:-1], index.shape[:-1])
    return values.expand(*lead, -1).gather(-1, index.expand(*lead, -1))


_SMALL = 2**12
"""Numbers that are faster copied than looked at."""


def permute_axis(
    w: Tensor, axis: Axis, index: Tensor, offset: int = 0, owned: bool = False
) -> Tensor:
    """Permute one axis of a tensor: position k receives position ``index[k]``.

    Args:
        w: a tensor of one network or of a stack.
        axis: of the tensor.
        index: one order for all members or one for each.
        offset: the number of leading dimensions.
        owned: whether the memory of the tensor may be written to.
    """
    index = index[0] if index.ndim == 2 and len(index) == 1 else index
    if axis.dim is None:
        return _select(w.flatten(offset), index, offset).reshape(w.shape)
    if axis.blocks > 1:
        # columns within every row block: whole blocks have already moved with their rows
        columns = axis.spread(index % axis.size, w.shape[offset:])
        return w.gather(axis.dim + offset, columns.expand(w.shape))
    if index.ndim == 1 and w.numel() > _SMALL:
        moved = (index != torch.arange(len(index), device=w.device)).nonzero()[:, 0]
        if 2 * len(moved) < len(index):
            new = w.index_select(axis.dim + offset, index[moved])
            return (w if owned else w.clone()).index_copy_(axis.dim + offset, moved, new)
    return _select(w, index, axis.dim + offset)


def _select(w: Tensor, index: Tensor, dim: int) -> Tensor:
    """Select along one dimension, with one order for all members or one for each."""
    if index.ndim == 1:
        return w.index_select(dim, index)
    if dim == 1:
        return w[torch.arange(w.shape[0], device=w.device)[:, None], index]
    shape = [index.shape[1] if d == dim else 1 for d in range(w.ndim)]
    shape[0] = index.shape[0]
    return w.gather(dim, index.reshape(shape).expand(w.shape))


# ------------------------------------------------------------ matrices
@dataclass(frozen=True, eq=False)
class Mixing:
    """Matrices ``(..., cells, size, size)`` that mix the ``positions`` ``(..., cells, size)``.

    No position is in two cells. Vectors ``(cells, size)`` in place of matrices stand for the
    reflections :math:`1 - 2 v v^T`, which cost two passes.
    """

    positions: Tensor
    matrices: Tensor
    is_dense: bool = False
    """True if matrices are written out, and positions and cells ascend."""

    @property
    def dense(self) -> Mixing:
        """The same matrices written out, with positions and cells in ascending order."""
        return self if self.is_dense else self._written_out

    @cached_property
    def _written_out(self) -> Mixing:
        matrices, v = self.matrices, self.matrices[..., None]
        if matrices.ndim == 2:
            matrices = torch.eye(len(v[0])).to(v) - 2 * v @ v.mT
        positions, order = self.positions.sort(-1)
        lead = max(order.shape[:-2], matrices.shape[:-3])
        matrices = matrices.expand(*lead, *matrices.shape[-3:])
        rows = order.expand(*lead, *order.shape[-2:])[..., None].expand(matrices.shape)
        matrices = matrices.gather(-2, rows).gather(-1, rows.mT)
        positions = positions.expand(*lead, *positions.shape[-2:])
        cells = positions[..., 0].argsort(-1)
        positions = positions.gather(-2, cells[..., None].expand(positions.shape))
        matrices = matrices.gather(-3, cells[..., None, None].expand(matrices.shape))
        if positions.ndim == 3 and bool((positions == positions[:1]).all()):
            positions = positions[0]  # nearly always
        return Mixing(positions, matrices, True)

    def moved(self, by: Monomial) -> Mixing:
        """Return the equivalent matrices for use after a monomial matrix instead of before it."""
        positions, matrices = self.dense.positions, self.dense.matrices
        if by.index is not None:
            positions = _at(by.index.argsort(-1), positions)
        if by.factor is not None:
            factor = _at(by.factor, positions)
            matrices = factor[..., None] * matrices / factor[..., None, :]
        return Mixing(positions, matrices, by.index is None).dense

    def map(self, function: Change) -> Mixing:
        """Return other matrices at the same positions."""
        return Mixing(self.dense.positions, function(self.dense.matrices), True)

    def act(self, rows: Tensor) -> Tensor:
        """Apply the matrices to the last dimension. The members, if any, come first."""
        positions, matrices = self.positions.to(rows.device), self.matrices.to(rows)
        if positions.ndim == 3:
            index = positions.reshape(len(positions), *(1,) * (rows.ndim - 2), -1)
            index = index.expand(*rows.shape[:-1], -1)
            cells = rows.gather(-1, index).unflatten(-1, positions.shape[-2:])
            return rows.scatter(-1, index, _mixed(matrices, cells).flatten(-2))
        flat = positions.reshape(-1)
        first, last = int(flat[0]), int(flat[0]) + len(flat)
        if torch.equal(flat, torch.arange(first, last).to(flat)):
            mixed = _mixed(matrices, rows[..., first:last].unflatten(-1, positions.shape))
            parts = [rows[..., :first], mixed.flatten(-2), rows[..., last:]]
            return parts[1] if len(flat) == rows.shape[-1] else torch.cat(parts, -1)
        changed = rows.clone()
        changed[..., flat] = _mixed(matrices, rows[..., positions]).flatten(-2)
        return changed


def _mixed(matrices: Tensor, cells: Tensor) -> Tensor:
    if matrices.ndim == 2:
        return cells - 2 * matrices * (cells * matrices).sum(-1, keepdim=True)
    into = "mcij,m...cj->m...ci" if matrices.ndim == 4 else "cij,...cj->...ci"
    return torch.einsum(into, matrices, cells)


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Return values along an axis at the positions of cells, per member if either has members."""
    if values.ndim == 1 or positions.ndim == 2:
        return values[..., positions]
    return values.gather(-1, positions.flatten(-2)).unflatten(-1, positions.shape[-2:])


def inverse_of(matrices: Tensor) -> Tensor:
    """Return the inverse of each matrix, in double precision."""
    return torch.linalg.inv(matrices.double())


def dual_of(matrices: Tensor) -> Tensor:
    """Return the inverse transpose of each matrix, in double precision; a reflection is its own."""
    return matrices if matrices.ndim == 2 else inverse_of(matrices).mT


def merged(mixings: Sequence[Mixing]) -> tuple[Mixing, ...]:
    """Merge matrices that mix the same cells, unless one between them mixes some of these."""
    result: list[Mixing] = []
    for last in mixings:
        for k in reversed(range(len(result))):
            first = result[k].dense
            if torch.equal(first.positions, last.dense.positions):
                product = torch.matmul(last.dense.matrices, first.matrices)
                result[k] = Mixing(first.positions, product, True)
                break
            if bool(torch.isin(first.positions, last.dense.positions).any()):
                result.append(last)
                break
        else:
            result.append(last)
    return tuple(result)


# ------------------------------------------------------------ both
@dataclass(frozen=True, eq=False)
class AxisMap:
    """The action on one axis: first the monomial matrix, then the mixing matrices in order."""

    monomial: Monomial = Monomial()
    mixings: tuple[Mixing, ...] = ()

    def __matmul__(self, first: AxisMap) -> AxisMap:
        mixings = (mixing.moved(self.monomial) for mixing in first.mixings)
        return AxisMap(self.monomial @ first.monomial, merged((*mixings, *self.mixings)))

    @cached_property
    def inverse(self) -> AxisMap:
        """The inverse map."""
        undone = (mixing.map(inverse_of) for mixing in reversed(self.mixings))
        return AxisMap(self.monomial.inverse) @ AxisMap(mixings=tuple(undone))

    @property
    def tensors(self) -> dict[str, tuple[Tensor, int]]:
        """The tensors of the map, each with its number of dimensions for one network."""
        named = {"index": (self.monomial.index, 1), "factor": (self.monomial.factor, 1)}
        for k, mixing in enumerate(self.mixings):
            named[f"{k}.positions"] = mixing.dense.positions, 2
            named[f"{k}.matrices"] = mixing.dense.matrices, 3
        return {name: (t, ndim) for name, (t, ndim) in named.items() if t is not None}

    @classmethod
    def of_tensors(cls, named: Mapping[str, Tensor]) -> AxisMap:
        """Return the map with the given `tensors`."""
        count = sum(name.endswith(".matrices") for name in named)
        mixings = (Mixing(named[f"{k}.positions"], named[f"{k}.matrices"]) for k in range(count))
        return cls(Monomial(named.get("index"), named.get("factor")), tuple(mixings))

    @property
    def stays(self) -> bool:
        """True for the identity."""
        return self.monomial.index is None and self.monomial.factor is None and not self.mixings

    @property
    def members(self) -> int:
        """The number of members with maps of their own, or 0 for a common map."""
        monomial = (self.monomial.index, self.monomial.factor)
        sizes = [len(t) for t in monomial if t is not None and t.ndim == 2]
        return max([*sizes, *(len(m.matrices) for m in self.mixings if m.matrices.ndim == 4), 0])

    def of_members(self, rows: int | slice | Tensor) -> AxisMap:
        """Return the map of one or several members."""
        parts = self.tensors.items()
        return self.of_tensors({n: t[rows] if t.ndim > ndim else t for n, (t, ndim) in parts})

    def map(self, factors: Change, matrices: Change) -> AxisMap:
        """Return the map with other factors and matrices at the same positions."""
        mixings = (mixing.map(matrices) for mixing in self.mixings)
        return AxisMap(self.monomial.map(factors), tuple(mixings))

    def act(self, w: Tensor, axis: Axis, offset: int = 0, owned: bool = False) -> Tensor:
        """Apply the map to one axis of a tensor, see `Monomial.act`."""
        w = self.monomial.act(w, axis, offset, owned)
        if self.mixings:
            rows = along_axis(w, axis, offset)
            for mixing in self.mixings:
                rows = mixing.act(rows)
            w = from_axis(rows, w, axis, offset)
        return w


def joined_maps(maps: Sequence[AxisMap], members: Sequence[int], length: int) -> AxisMap:
    """Concatenate the maps of several stacks or networks along the members.

    Args:
        maps: of stacks, or of networks, that mix the same cells.
        members: the number of members of each.
        length: of the axis.
    """
    every = [m.tensors for m in maps]
    examples = {name: pair for tensors in every for name, pair in tensors.items()}
    stay = {"index": torch.arange(length), "factor": torch.ones(length, dtype=torch.float64)}
    for name, (t, ndim) in examples.items():
        if name not in stay:
            single = t if t.ndim == ndim else t[0]
            stay[name] = (
                single if ndim == 2 else torch.eye(single.shape[-1]).to(single).expand_as(single)
            )
    parts: dict[str, list[Tensor]] = {name: [] for name in examples}
    for tensors, count in zip(every, members, strict=True):
        for name, (like, ndim) in examples.items():
            t = tensors[name][0] if name in tensors else stay[name].to(like)
            parts[name].append(t.expand(count, *t.shape[t.ndim - ndim :]))
    return AxisMap.of_tensors({name: torch.cat(rows) for name, rows in parts.items()})


def along_axis(w: Tensor, axis: Axis, offset: int) -> Tensor:
    """Return a view whose last dimension is the axis, with its row blocks side by side."""
    if axis.dim is None:
        return w.flatten(offset)
    if axis.blocks == 1:
        return w.movedim(axis.dim + offset, -1)
    parts = w.unflatten(offset, (axis.blocks, -1)).movedim(offset, -1)
    return parts.movedim(axis.dim + offset, -1).flatten(-2)


def from_axis(rows: Tensor, like: Tensor, axis: Axis, offset: int) -> Tensor:
    """Return the tensor of which `along_axis` is the view."""
    if axis.dim is None:
        return rows.reshape(like.shape)
    if axis.blocks == 1:
        return rows.movedim(-1, axis.dim + offset).contiguous()
    parts = rows.unflatten(-1, (axis.blocks, axis.size)).movedim(-1, axis.dim + offset)
    return parts.movedim(-1, offset).reshape(like.shape)
