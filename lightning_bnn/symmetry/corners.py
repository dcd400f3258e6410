"""The first weight of every unit, in the order that the units around it have or will have."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.axis_actions import axis_permutation, permute_axis, take_along_last
from lightning_bnn.symmetry.groups import Placement, Symmetries
from lightning_bnn.symmetry.units import offset_of, other_axis

__all__ = ["corner"]


def corner(
    params: Params,
    sym: Symmetries,
    place: Placement,
    permutations: Sequence[Tensor],
    around: Collection[int],
) -> Tensor:
    """Every unit's weight at the first index of all other dimensions, once they are permuted.

    The blocks around the units (indices of groups) do not move the units themselves.
    """
    axis = sym.axes[place.axis]
    w = params[axis.tensor]
    offset = offset_of(w, sym, axis)
    if _is_no_matrix(sym, place.axis):
        permutations = _without_own_blocks(sym, place, permutations)
        w = _reordered(w, sym, place, permutations, offset)
    unmoved = [
        torch.arange(group.units) if g in around else p
        for g, (group, p) in enumerate(zip(sym.permutations, permutations, strict=True))
    ]
    index = axis_permutation(sym, place.axis, unmoved, w.device)
    at = index[..., place.positions[:, 0].to(w.device)]
    if axis.dim is None:
        return _pick(w.reshape(*w.shape[:offset], -1), offset, {0: at})
    where = {axis.dim: at % axis.size}
    if _is_no_matrix(sym, place.axis):
        rows = sym.shapes[axis.tensor][0] // axis.blocks
        return _pick(w, offset, where if axis.blocks == 1 else {0: at // axis.size * rows, **where})
    other = other_axis(sym, place.axis)
    if other is not None:
        partner_dim = sym.axes[other].dim
        assert partner_dim is not None
        where[partner_dim] = _first_partner(sym, place, other, at, permutations)
    return _pick(w, offset, where)


def _is_no_matrix(sym: Symmetries, axis: int) -> bool:
    """Whether units lie along more than two dimensions of a tensor, or along several at once.

    They do where a tensor is a stack of matrices, and where rows and columns of a matrix that is
    part of a vector are elements of this.
    """
    tensor, dim = sym.axes[axis].tensor, sym.axes[axis].dim
    dims = {a.dim for a in sym.axes if a.tensor == tensor}
    moved = sym.placements_by_axis("permutations").keys() - {axis}
    beside = any((sym.axes[a].tensor, sym.axes[a].dim) == (tensor, dim) for a in moved)
    stack = sym.axes[axis].blocks > 1 and not dims & {0, None}
    return len(dims) > 2 or (len(dims) == 2 and None in dims) or beside or stack


def _without_own_blocks(
    sym: Symmetries, place: Placement, permutations: Sequence[Tensor]
) -> list[Tensor]:
    """The permutations, but blocks that have a place on the same axis stay where they are."""
    return [
        torch.arange(g.units)
        if g.kind == "block" and any(p.axis == place.axis for p in g.placements)
        else order
        for g, order in zip(sym.permutations, permutations, strict=True)
    ]


def _reordered(
    w: Tensor, sym: Symmetries, place: Placement, permutations: Sequence[Tensor], offset: int
) -> Tensor:
    """A tensor whose other axes have their new order."""
    axes = sym.placements_by_axis("permutations").keys() - {place.axis}
    tensor = sym.axes[place.axis].tensor
    for a in sorted(
        (a for a in axes if sym.axes[a].tensor == tensor), key=lambda a: sym.axes[a].blocks
    ):
        index = axis_permutation(sym, a, permutations, w.device)
        w = permute_axis(w, sym.axes[a], index, offset)
    return w


def _first_partner(
    sym: Symmetries,
    place: Placement,
    other: int,
    at: Tensor,
    permutations: Sequence[Tensor],
) -> Tensor:
    """Old index, on the other axis, of the first partner that each unit has in the new order.

    With groups that is the first of its own block, wherever the block is now.
    """
    axis, partner = sym.axes[place.axis], sym.axes[other]
    index = axis_permutation(sym, other, permutations, at.device)
    first = torch.zeros_like(at)
    if axis.blocks > 1:  # the unit is a column of a row block, its partners are the rows there
        step = partner.size // axis.blocks
        first = _new_start(index, step, at // axis.size)
    elif partner.blocks > 1:  # the unit is a row, its partners are the columns of its block
        first = _new_start(index, partner.size, at // (axis.size // partner.blocks))
    return take_along_last(index, first) % partner.size


def _new_start(index: Tensor, step: int, block: Tensor) -> Tensor:
    """Where old blocks of so and so many positions begin in the new order."""
    slots = (index[..., ::step] // step).argsort(-1)
    return take_along_last(slots, block) * step


def _pick(w: Tensor, offset: int, where: dict[int, Tensor]) -> Tensor:
    index: list[Tensor | int] = [where.get(d, 0) for d in range(w.ndim - offset)]
    if offset:
        index.insert(0, torch.arange(w.shape[0], device=w.device)[:, None])
    return w[tuple(index)]
