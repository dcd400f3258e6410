"""What an element of the group does to one axis: a monomial matrix, then matrices that mix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weightsym.groups.actions import along_axis, from_axis, permute_axis, take_along_last
from weightsym.groups.symmetries import Axis


@dataclass(frozen=True, eq=False)
class Monomial:
    """Units that change places and are multiplied: new unit k is ``factor[k]`` old ``index[k]``.

    Both are ``(units,)`` or ``(members, units)``.
    """

    index: Tensor
    factor: Tensor

    def __matmul__(self, first: Monomial) -> Monomial:
        factor = self.factor * take_along_last(first.factor, self.index)
        return Monomial(take_along_last(first.index, self.index), factor)

    @cached_property
    def inverse(self) -> Monomial:
        """The monomial matrix that undoes this one."""
        back = self.index.argsort(-1)
        return Monomial(back, 1 / take_along_last(self.factor, back))

    def map(self, function: Callable[[Tensor], Tensor]) -> Monomial:
        """The same places with other factors."""
        return Monomial(self.index, function(self.factor))


@dataclass(frozen=True, eq=False)
class Mixing:
    """Matrices ``(..., cells, size, size)`` that mix the ``positions`` ``(..., cells, size)``.

    No position is in two cells.
    """

    positions: Tensor
    matrices: Tensor

    def moved(self, by: Monomial) -> Mixing:
        """The matrices that do after a monomial one what these do before it."""
        positions = _at(by.index.argsort(-1), self.positions)
        factor = _at(by.factor, positions)
        matrices = factor[..., None] * self.matrices / factor[..., None, :]
        return Mixing(positions, matrices).ordered()

    def __matmul__(self, first: Mixing) -> Mixing:
        return Mixing(self.positions, torch.matmul(self.matrices, first.matrices))

    def map(self, function: Callable[[Tensor], Tensor]) -> Mixing:
        """Other matrices at the same positions."""
        return Mixing(self.positions, function(self.matrices))

    def mixes_as(self, other: Mixing) -> bool:
        """True if the cells are the same."""
        return torch.equal(self.positions, other.positions)

    def act(self, rows: Tensor) -> Tensor:
        """Rows whose last dimension is the axis; members come first where there are any."""
        positions, matrices = self.positions.to(rows.device), self.matrices.to(rows)
        cells = rows[..., positions] if positions.ndim == 2 else _by_member(rows, positions)
        into = "mcij,m...cj->m...ci" if matrices.ndim == 4 else "cij,...cj->...ci"
        new = torch.einsum(into, matrices, cells)
        if positions.ndim == 2:
            changed = rows.clone()
            changed[..., positions.reshape(-1)] = new.flatten(-2)
            return changed
        index = positions.reshape(len(positions), *(1,) * (rows.ndim - 2), -1)
        return rows.scatter(-1, index.expand(*rows.shape[:-1], -1), new.flatten(-2))

    def ordered(self) -> Mixing:
        """With rising positions in every cell, and cells by their first."""
        positions, order = self.positions.sort(-1)
        matrices = self.matrices
        lead = max(order.shape[:-2], matrices.shape[:-3])
        order = order.expand(*lead, *order.shape[-2:])
        matrices = matrices.expand(*lead, *matrices.shape[-3:])
        rows = order[..., None].expand(matrices.shape)
        matrices = matrices.gather(-2, rows).gather(-1, rows.mT)
        cells = positions.expand(*lead, *positions.shape[-2:])[..., 0].argsort(-1)
        positions = positions.expand(*lead, *positions.shape[-2:])
        positions = positions.gather(-2, cells[..., None].expand(positions.shape))
        matrices = matrices.gather(-3, cells[..., None, None].expand(matrices.shape))
        if positions.ndim == 3 and bool((positions == positions[:1]).all()):
            positions = positions[0]  # nearly always
        return Mixing(positions, matrices)


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Values along an axis at the positions of cells, by member where either has members."""
    if values.ndim == 1 or positions.ndim == 2:
        return values[..., positions]
    return values.gather(-1, positions.flatten(-2)).unflatten(-1, positions.shape[-2:])


def _by_member(rows: Tensor, positions: Tensor) -> Tensor:
    index = positions.reshape(len(positions), *(1,) * (rows.ndim - 2), -1)
    picked = rows.gather(-1, index.expand(*rows.shape[:-1], -1))
    return picked.unflatten(-1, positions.shape[-2:])


@dataclass(frozen=True, eq=False)
class AxisMap:
    """What happens to one axis: first the monomial matrix, then the mixing ones in their order."""

    monomial: Monomial | None = None
    mixings: tuple[Mixing, ...] = ()

    def __matmul__(self, first: AxisMap) -> AxisMap:
        mixings = first.mixings
        if self.monomial is not None:
            mixings = tuple(mixing.moved(self.monomial) for mixing in mixings)
        monomial = self.monomial or first.monomial
        if self.monomial is not None and first.monomial is not None:
            monomial = self.monomial @ first.monomial
        return AxisMap(monomial, merged((*mixings, *self.mixings)))

    @cached_property
    def inverse(self) -> AxisMap:
        """What undoes it."""
        undone = tuple(m.map(inverse_of) for m in reversed(self.mixings))
        if self.monomial is None:
            return AxisMap(None, undone)
        back = self.monomial.inverse
        return AxisMap(back, tuple(m.moved(back) for m in undone))

    def map(self, factors: Any, matrices: Any) -> AxisMap:
        """Other factors and matrices in the same places."""
        monomial = None if self.monomial is None else self.monomial.map(factors)
        return AxisMap(monomial, tuple(m.map(matrices) for m in self.mixings))

    def act(self, w: Tensor, axis: Axis, offset: int) -> Tensor:
        """One tensor after its axis has moved."""
        if self.monomial is not None:
            index, factor = self.monomial.index.to(w.device), self.monomial.factor
            if bool((index != torch.arange(index.shape[-1], device=w.device)).any()):
                w = permute_axis(w, axis, index, offset)
            if bool((factor != 1).any()):
                w = w * axis.spread(factor.to(w), w.shape[offset:])
        if self.mixings:
            rows = along_axis(w, axis, offset)
            for mixing in self.mixings:
                rows = mixing.act(rows)
            w = from_axis(rows, w, axis, offset)
        return w


def inverse_of(matrices: Tensor) -> Tensor:
    """The inverse of each matrix, in double precision."""
    return torch.linalg.inv(matrices.double())


def merged(mixings: Sequence[Mixing]) -> tuple[Mixing, ...]:
    """Neighbours that mix the same cells as one."""
    result: list[Mixing] = []
    for mixing in mixings:
        if result and mixing.mixes_as(result[-1]):
            result[-1] = mixing @ result[-1]
        else:
            result.append(mixing)
    return tuple(result)
