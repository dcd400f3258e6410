"""Apply permutations, scalings and signs to one network or a stack, and to optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry.groups import Axis, Symmetries
from lightning_bnn.symmetry.validation import (
    check_params,
    check_permutations,
    check_scales,
    check_signs,
)

__all__ = [
    "Element",
    "Kind",
    "axis_factors",
    "axes_by_tensor",
    "axis_permutation",
    "broadcastable",
    "flip",
    "multiply",
    "permute",
    "permute_axis",
    "permute_some",
    "permuted_tensor",
    "rescale",
    "shift_logits",
]

Element = Sequence[Tensor]
Kind = Literal["permutations", "scalings", "signs"]


# ------------------------------------------------------------ actions
def permute(params: Params, sym: Symmetries, permutations: Element) -> Params:
    """Reorder units: unit ``k`` of the new network is unit ``p[k]`` of the old one.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        permutations: one index tensor ``(units,)`` per group of ``sym.permutations``, or
            ``(members, units)`` with an order for each member of a stack. Channels move first, then
            the blocks that contain them.

    Returns:
        New parameters; tensors that no group touches are the same objects.
    """
    stacked = check_params(params, sym)
    moving = check_permutations(permutations, sym)
    _check_members(params, stacked, moving, "permutations")
    return permute_some(params, sym, moving)


def permute_some(params: Params, sym: Symmetries, permutations: Element) -> Params:
    """`permute` for a part of the tensors, such as the buffers of an optimizer."""
    result = dict(params)
    for tensor, axes in axes_by_tensor(sym, "permutations").items():
        if tensor in params:
            result[tensor] = permuted_tensor(params, sym, tensor, axes, permutations)
    return _tied(result, sym)


def _tied(params: Params, sym: Symmetries) -> Params:
    """Further names of a tensor hold what its first name holds."""
    again = {n: params[first] for n, first in sym.aliases.items() if n in params}
    return {**params, **again} if again else params


def rescale(params: Params, sym: Symmetries, scales: Element) -> Params:
    r"""Multiply what enters a unit by its scale and divide what leaves it.

    .. math:: W' = \mathrm{diag}(s_{out})\, W\, \mathrm{diag}(s_{in})^{-1}, \quad b' = s_{out} b

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        scales: one positive tensor ``(units,)`` or ``(members, units)`` per group of
            ``sym.scalings``.
    """
    stacked = check_params(params, sym)
    scales = check_scales(scales, sym)
    _check_members(params, stacked, scales, "scales")
    return multiply(params, sym, {"scalings": scales})


def flip(params: Params, sym: Symmetries, signs: Element) -> Params:
    """Flip units: +1 or -1 for each, ``(units,)`` or ``(members, units)`` per group."""
    stacked = check_params(params, sym)
    signs = check_signs(signs, sym)
    _check_members(params, stacked, signs, "signs")
    return multiply(params, sym, {"signs": signs})


def shift_logits(
    params: Params, sym: Symmetries, weight: Tensor, bias: Tensor | None = None
) -> Params:
    """Add one vector to all rows of the last weight, and one number to all of its biases.

    Logits change, probabilities do not. ``weight`` has the shape of one row, with the leading
    dimension of a stack; ``bias`` is a number per member.
    """
    if sym.softmax_shift is None:
        raise ValueError("The network does not end in a layer whose outputs are its logits.")
    check_params(params, sym)
    result = dict(params)
    last = sym.softmax_shift
    old = params[last.weight]
    result[last.weight] = old + weight.to(old).unsqueeze(old.ndim - len(sym.shapes[last.weight]))
    if last.bias is not None and bias is not None:
        result[last.bias] = params[last.bias] + bias.to(old)[..., None]
    return _tied(result, sym)


def _matched(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    lead = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    return a.expand(*lead, a.shape[-1]), b.expand(*lead, b.shape[-1])


# ------------------------------------------------------------ one axis
def axis_permutation(
    sym: Symmetries, axis: int, permutations: Element, device: Any = None
) -> Tensor:
    """Old position of every new position on one axis, with a member dimension if one is given."""
    length = sym.axes[axis].blocks * sym.axes[axis].size
    index = torch.arange(length, device=device)
    channels: list[tuple[Tensor, Tensor]] = []
    blocks: list[tuple[Tensor, Tensor]] = []
    for g, place in sym.placements_by_axis("permutations").get(axis, ()):
        kind = blocks if getattr(sym.permutations[g], "kind", "") == "block" else channels
        kind.append((place.positions.to(index.device), permutations[g].to(index.device)))
    for stage in (channels, blocks):
        if stage:
            moves = _moves(stage, length, index.device)
            index = moves if stage is channels else _then(index, moves)
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


def _then(first: Tensor, second: Tensor) -> Tensor:
    return torch.take_along_dim(*_matched(first, second), -1)


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
        factors[..., positions] = factors[..., positions] * spread
    return factors


# ------------------------------------------------------------ one tensor
def axes_by_tensor(sym: Symmetries, kind: Kind) -> dict[str, list[int]]:
    """The axes of every tensor that one kind of symmetry reaches."""
    tensors: dict[str, list[int]] = {}
    for axis in sym.placements_by_axis(kind):
        tensors.setdefault(sym.axes[axis].tensor, []).append(axis)
    return tensors


def _check_members(params: Params, stacked: bool, values: Element, name: str) -> None:
    """A stack takes elements for all of its members, one network takes no others."""
    members = next(iter(params.values())).shape[0] if stacked else None
    for value in values:
        if value.ndim > 1 and (value.ndim > 2 or value.shape[0] != members):
            what = f"The stack has {members} members" if stacked else "`params` is one network"
            raise ValueError(f"{what}, the {name} are for {value.shape[0]}.")


def permuted_tensor(
    params: Params, sym: Symmetries, name: str, axes: Sequence[int], permutations: Element
) -> Tensor:
    """One tensor after `permute`; ``axes`` are those of its axes that permutations reach."""
    w = params[name]
    offset = 1 if is_stacked({name: w}, sym.shapes) else 0
    for a in sorted(axes, key=lambda a: sym.axes[a].blocks):
        w = permute_axis(w, sym.axes[a], axis_permutation(sym, a, permutations, w.device), offset)
    return w


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


def multiply(params: Params, sym: Symmetries, factors: Mapping[Kind, Element]) -> Params:
    """Multiply every tensor by the factors of its axes, in one pass per axis."""
    result = dict(params)
    offset = 1 if is_stacked(params, sym.shapes) else 0
    tensors: dict[str, dict[int, list[Kind]]] = {}
    for kind in factors:
        for name, axes in axes_by_tensor(sym, kind).items():
            for a in axes:
                tensors.setdefault(name, {}).setdefault(a, []).append(kind)
    for name, axes_kinds in tensors.items():
        if name in params:
            result[name] = _multiply_tensor(params[name], sym, axes_kinds, factors, offset)
    return _tied(result, sym)


def _multiply_tensor(
    w: Tensor,
    sym: Symmetries,
    axes: Mapping[int, Sequence[Kind]],
    factors: Mapping[Kind, Element],
    offset: int,
) -> Tensor:
    own = False
    for a, kinds in axes.items():
        factor = math.prod(
            (
                broadcastable(
                    axis_factors(sym, a, k, factors[k], w.dtype, w.device), sym.axes[a], w, offset
                )
                for k in kinds
            ),
            start=torch.ones((), dtype=w.dtype, device=w.device),
        )
        if own and not factor.requires_grad and factor.ndim <= w.ndim:
            w.mul_(factor)
        else:
            w, own = w * factor, True
    return w


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
