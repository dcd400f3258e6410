"""The action of permutations and factors along one axis of a tensor, for one network or a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from weightsym.devices import kept_on
from weightsym.groups import Axis, Placement, Symmetries

__all__ = [
    "EVERY",
    "KINDS",
    "Element",
    "Kind",
    "along_axis",
    "axes_by_tensor",
    "axis_factors",
    "axis_permutation",
    "from_axis",
    "permute_axis",
    "reorder_units",
    "take_along_last",
]

Element = Sequence[Tensor]
Kind = Literal["permutations", "scalings", "signs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVERY = (*KINDS, "linear", "shifts")


def axes_by_tensor(sym: Symmetries, kind: Kind) -> dict[str, list[int]]:
    """The axes of every tensor that one kind of symmetry reaches."""
    tensors: dict[str, list[int]] = {}
    for axis in sym.placements_by_axis(kind):
        tensors.setdefault(sym.axes[axis].tensor, []).append(axis)
    return tensors


# ------------------------------------------------------------ permutations
def axis_permutation(
    sym: Symmetries, axis: int, permutations: Element, device: Any = None
) -> Tensor:
    """Old position of every new position on one axis, with a member dimension if one is given."""
    pairs = sym.placements_by_axis("permutations").get(axis, [])
    if len(pairs) == 1 and pairs[0][1].covers(sym.axes[axis]):
        return permutations[pairs[0][0]].to(device)
    lead = max((permutations[g].shape[:-1] for g, _ in pairs), default=())
    index = torch.arange(sym.axes[axis].length, device=device).repeat(*lead, 1)
    for g, placement in pairs:
        positions = kept_on(placement.positions, index.device)
        moved = positions[permutations[g].to(index.device)].flatten(-2)
        index[..., positions.reshape(-1)] = take_along_last(index, moved)
    return index


def take_along_last(values: Tensor, index: Tensor) -> Tensor:
    """Pick along the last dimension, where leading dimensions broadcast."""
    if values.ndim == index.ndim == 1:
        return values[index]
    lead = max(values.shape[:-1], index.shape[:-1])
    return values.expand(*lead, -1).gather(-1, index.expand(*lead, -1))


def permute_axis(w: Tensor, axis: Axis, index: Tensor, offset: int = 0) -> Tensor:
    """Put at every position of one axis what stood at ``index``."""
    if axis.dim is None:
        return _select(w.flatten(offset), index, offset).reshape(w.shape)
    if axis.blocks == 1:
        return _select(w, index, axis.dim + offset)
    # columns within every row block: whole blocks have already moved with their rows
    columns = axis.spread(index % axis.size, w.shape[offset:])
    return w.gather(axis.dim + offset, columns.expand(w.shape))


def reorder_units(w: Tensor, axis: Axis, orders: Sequence[tuple[Placement, Tensor]]) -> Tensor:
    """Put the units of some places of one axis of a stack in orders ``(members, units)``."""
    if len(orders) == 1 and orders[0][0].covers(axis):
        index = orders[0][1]
    else:
        index = torch.arange(axis.length).repeat(len(w), 1)
        for placement, order in orders:
            index[:, placement.positions.reshape(-1)] = placement.positions[order].flatten(1)
    return permute_axis(w, axis, (index if len(w) > 1 else index[0]).to(w.device), 1)


def _select(w: Tensor, index: Tensor, dim: int) -> Tensor:
    """Pick along one dimension, with one order for all members or one for each."""
    if index.ndim == 1:
        return w.index_select(dim, index)
    if dim == 1:
        return w[torch.arange(w.shape[0], device=w.device)[:, None], index]
    shape = [index.shape[1] if d == dim else 1 for d in range(w.ndim)]
    shape[0] = index.shape[0]
    return w.gather(dim, index.reshape(shape).expand(w.shape))


# ------------------------------------------------------------ factors
def axis_factors(
    sym: Symmetries, axis: int, kind: Kind, values: Element, dtype: torch.dtype, device: Any
) -> Tensor:
    """Factor of every position on one axis, with a member dimension if one is given."""
    pairs = sym.placements_by_axis(kind)[axis]
    powers = [
        values[g].to(device=device, dtype=dtype) ** placement.exponent for g, placement in pairs
    ]
    if len(pairs) == 1 and pairs[0][1].covers(sym.axes[axis]):
        return powers[0]
    lead = max(value.shape[:-1] for value in powers)
    factors = torch.ones(*lead, sym.axes[axis].length, dtype=dtype, device=device)
    for (_, placement), value in zip(pairs, powers, strict=True):
        positions = kept_on(placement.positions, factors.device).reshape(-1)
        each = value.repeat_interleave(placement.positions.shape[1], -1).expand(*lead, -1)
        if placement.meets_itself:
            index = positions.expand(*lead, -1)
            factors = factors.scatter_reduce(-1, index, each, "prod").clone()
        else:
            factors[..., positions] = factors[..., positions] * each
    return factors


# ------------------------------------------------------------ channels as the last dimension
def along_axis(w: Tensor, axis: Axis, offset: int) -> Tensor:
    """A view whose last dimension is the axis, with its row blocks side by side."""
    if axis.dim is None:
        return w.flatten(offset)
    if axis.blocks == 1:
        return w.movedim(axis.dim + offset, -1)
    parts = w.unflatten(offset, (axis.blocks, -1)).movedim(offset, -1)
    return parts.movedim(axis.dim + offset, -1).flatten(-2)


def from_axis(rows: Tensor, like: Tensor, axis: Axis, offset: int) -> Tensor:
    """The tensor of which `along_axis` is the view."""
    if axis.dim is None:
        return rows.reshape(like.shape)
    if axis.blocks == 1:
        return rows.movedim(-1, axis.dim + offset).contiguous()
    parts = rows.unflatten(-1, (axis.blocks, axis.size)).movedim(-1, axis.dim + offset)
    return parts.movedim(-1, offset).reshape(like.shape)
