"""What permutations and factors do along one axis of a tensor, for one network or a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.symmetry.groups import Axis, Symmetries

__all__ = [
    "EVERY",
    "KINDS",
    "Element",
    "Kind",
    "axes_by_tensor",
    "axis_factors",
    "axis_permutation",
    "broadcastable",
    "permute_axis",
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
    length = sym.axes[axis].blocks * sym.axes[axis].size
    index = torch.arange(length, device=device)
    for k, stage in enumerate(sym.stages(axis)):
        pairs = [(p.positions.to(index.device), permutations[g].to(index.device)) for g, p in stage]
        moves = _moves(pairs, length, index.device)
        index = take_along_last(index, moves) if k else moves
    return index


def _moves(stage: Sequence[tuple[Tensor, Tensor]], length: int, device: torch.device) -> Tensor:
    if len(stage) == 1 and _is_all(stage[0][0], length):
        return stage[0][1]
    lead = torch.broadcast_shapes(*(p.shape[:-1] for _, p in stage))
    index = torch.arange(length, device=device).expand(*lead, length).clone()
    for positions, order in stage:
        index[..., positions.reshape(-1)] = positions[order].flatten(-2).expand(*lead, -1)
    return index


def _is_all(positions: Tensor, length: int) -> bool:
    """Whether unit k simply is position k of an axis."""
    if positions.shape != (length, 1):
        return False
    return bool((positions[:, 0] == torch.arange(length, device=positions.device)).all())


def take_along_last(values: Tensor, index: Tensor) -> Tensor:
    """Pick along the last dimension; leading dimensions broadcast."""
    lead = torch.broadcast_shapes(values.shape[:-1], index.shape[:-1])
    return values.expand(*lead, -1).gather(-1, index.expand(*lead, -1))


def permute_axis(w: Tensor, axis: Axis, index: Tensor, offset: int = 0) -> Tensor:
    """Put at every position of one axis what stood at ``index``."""
    if axis.dim is None:
        return _select(w.reshape(*w.shape[:offset], -1), index, offset).reshape(w.shape)
    if axis.blocks > 1:
        return _select_in_blocks(w, axis, index, offset)
    return _select(w, index, axis.dim + offset)


def _select(w: Tensor, index: Tensor, dim: int) -> Tensor:
    """Pick along one dimension, with one order for all members or one for each."""
    if index.ndim == 1:
        return w.index_select(dim, index)
    if dim == 1:
        rows = torch.arange(w.shape[0], device=w.device)[:, None]
        return w[rows, index]
    shape = [1] * w.ndim
    shape[0], shape[dim] = index.shape
    return torch.gather(w, dim, index.reshape(shape).expand(w.shape))


def _select_in_blocks(w: Tensor, axis: Axis, index: Tensor, offset: int) -> Tensor:
    """Reorder columns within every row block; whole blocks have already moved with their rows."""
    assert axis.dim is not None
    columns = (index % axis.size).reshape(*index.shape[:-1], axis.blocks, axis.size)
    rows_dim = offset
    w = w.unflatten(rows_dim, (axis.blocks, -1))
    dim = axis.dim + offset + 1
    lead = columns.shape[:-2] if columns.ndim > 2 else (1,) * offset
    shape = [1] * w.ndim
    shape[:offset] = lead
    shape[rows_dim] = axis.blocks
    shape[dim] = axis.size
    return torch.gather(w, dim, columns.reshape(shape).expand(w.shape)).flatten(
        rows_dim, rows_dim + 1
    )


# ------------------------------------------------------------ factors
def axis_factors(
    sym: Symmetries, axis: int, kind: Kind, values: Element, dtype: torch.dtype, device: Any
) -> Tensor:
    """Factor of every position on one axis, with a member dimension if one is given."""
    length = sym.axes[axis].blocks * sym.axes[axis].size
    places = sym.placements_by_axis(kind)[axis]
    if len(places) == 1 and _is_all(places[0][1].positions, length):
        g, place = places[0]
        return values[g].to(device=device, dtype=dtype) ** place.exponent
    lead = torch.broadcast_shapes(*(values[g].shape[:-1] for g, _ in places))
    factors = torch.ones(*lead, length, dtype=dtype, device=device)
    for g, place in places:
        value = values[g].to(device=device, dtype=dtype)
        value = value if place.exponent == 1 else value**place.exponent
        repeats = place.positions.shape[1]
        spread = value[..., None].expand(*value.shape, repeats).flatten(-2).expand(*lead, -1)
        positions = place.positions.reshape(-1).to(device)
        if place.meets_itself:
            index = positions.expand(*lead, -1)
            factors = factors.scatter_reduce(-1, index, spread, "prod").clone()
        else:
            factors[..., positions] = factors[..., positions] * spread
    return factors


def broadcastable(factors: Tensor, axis: Axis, w: Tensor, offset: int) -> Tensor:
    """Factors of one axis in a shape that multiplies its tensor; ``offset`` is 1 for a stack."""
    lead = factors.shape[:-1] if factors.ndim > 1 else (1,) * offset
    if axis.dim is None:
        return factors.reshape([*lead, *w.shape[offset:]])
    shape = [*lead, *(1,) * (w.ndim - offset)]
    if axis.blocks > 1:
        per_block = w.shape[offset] // axis.blocks
        factors = factors.reshape(*factors.shape[:-1], axis.blocks, axis.size).repeat_interleave(
            per_block, -2
        )
        shape[offset] = w.shape[offset]
    shape[offset + axis.dim] = axis.size
    return factors.reshape(shape)
