"""Shift channels: add to the biases that write them, take from those of the layers that read."""

from __future__ import annotations

import torch
from torch import Tensor

from weightsym.actions import Element, along_axis, from_axis, members_of, tied
from weightsym.groups import Symmetries
from weightsym.params import Params, is_stacked
from weightsym.placements import Placement, Reader, ShiftGroup
from weightsym.validation import check_element, check_symmetries

__all__ = ["added", "carried", "random_shifts", "remove_shifts", "shift", "shift_some"]


def shift(params: Params, sym: Symmetries, shifts: Element) -> Params:
    r"""Add numbers to the channels that biases write, which the layers that read them take up.

    .. math:: b + c, \quad b' - W' c

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        shifts: one tensor ``(size,)`` or ``(members, size)`` per group of ``sym.shifts``.

    >>> from weightsym import params as P
    >>> from weightsym import discover, shift
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> x, w = torch.randn(8, 4), P.of(net)
    >>> sym = discover(net, x)
    >>> shifted = shift(w, sym, [torch.tensor([1.0, -1.0])])
    >>> (shifted["0.bias"] - w["0.bias"]).round(decimals=4)
    tensor([ 1., -1.])
    >>> torch.allclose(P.apply(net, shifted, x), net(x), atol=1e-5)
    True
    """
    return shift_some(params, sym, check_element("shifts", shifts, sym, members_of(params, sym)))


def shift_some(params: Params, sym: Symmetries, shifts: Element) -> Params:
    """Shift channels without checks of the parameters and the numbers."""
    for group, value in zip(sym.shifts, shifts, strict=True):
        params = _shift_one(params, sym, group, value)
    return params


def _shift_one(params: Params, sym: Symmetries, group: ShiftGroup, value: Tensor) -> Params:
    result = dict(params)
    for placement in group.placements:
        name = sym.axes[placement.axis].tensor
        result[name] = added(result[name], sym, placement, value)
    for reader in group.readers:
        old = result[reader.bias]
        result[reader.bias] = old - carried(params, sym, reader, value).to(old)
    return tied(result, sym)


def added(w: Tensor, sym: Symmetries, placement: Placement, value: Tensor) -> Tensor:
    """One tensor whose channels at some positions of one axis are shifted."""
    axis = sym.axes[placement.axis]
    offset = int(is_stacked({axis.tensor: w}, sym.shapes))
    rows = along_axis(w, axis, offset)
    spread = _on_axis(sym, placement, value.to(w))
    if value.ndim > 1:
        spread = spread.reshape(-1, *(1,) * (rows.ndim - 2), spread.shape[-1])
    return from_axis(rows + spread, w, axis, offset)


def _on_axis(sym: Symmetries, placement: Placement, value: Tensor) -> Tensor:
    """The shift of every position of an axis."""
    axis = sym.axes[placement.axis]
    full = value.new_zeros(*value.shape[:-1], axis.blocks * axis.size)
    positions = placement.positions.to(value.device)
    repeated = (placement.exponent * value)[..., None].expand(*value.shape, positions.shape[1])
    return full.index_add(-1, positions.reshape(-1), repeated.flatten(-2))


def carried(params: Params, sym: Symmetries, reader: Reader, value: Tensor) -> Tensor:
    """The change of the outputs of a layer under a shift of its inputs."""
    axis = sym.axes[reader.channels.axis]
    w = params[axis.tensor]
    assert axis.dim is not None
    offset = int(is_stacked({axis.tensor: w}, sym.shapes))
    spread = _on_axis(sym, reader.channels, value.to(w))
    if not offset:
        w, spread = w[None], spread.reshape(1, -1)
    spread = spread.reshape(-1, axis.blocks, axis.size)
    blocks = w.movedim(axis.dim + 1, -1)  # (members, outgoing, ..., incoming)
    if blocks.ndim > 3:
        blocks = blocks.sum(tuple(range(2, blocks.ndim - 1)))
    blocks = blocks.unflatten(1, (axis.blocks, -1))
    outgoing = torch.einsum("mbri,mbi->mbr", blocks, spread.expand(blocks.shape[0], -1, -1))
    rows = outgoing.flatten(1)
    if reader.rows is not None:
        rows = rows[:, reader.rows.to(rows.device)]
    return rows if offset else rows[0]


def remove_shifts(params: Params, sym: Symmetries) -> Params:
    """One network for all that shifts make equal: biases that may be shifted become zero.

    Of a table the mean of its rows does.
    """
    for group in sym.shifts:  # in graph order: a bias that takes a shift up may hand it on
        params = _shift_one(params, sym, group, -_mean(params, sym, group.placements[0]))
    return params


def _mean(params: Params, sym: Symmetries, placement: Placement) -> Tensor:
    """The mean of a tensor over everything but the channels of a place."""
    w = params[sym.axes[placement.axis].tensor]
    offset = int(is_stacked({sym.axes[placement.axis].tensor: w}, sym.shapes))
    rows = along_axis(w, sym.axes[placement.axis], offset)
    means = rows.mean(tuple(range(offset, rows.ndim - 1))) if rows.ndim > offset + 1 else rows
    return means[..., placement.positions.to(w.device)].mean(-1)


def random_shifts(
    sym: Symmetries, generator: torch.Generator | None = None, members: int | None = None
) -> list[Tensor]:
    r"""Standard normal shifts of every group.

    .. math:: c \sim \mathcal{N}(0, 1)

    >>> from weightsym import discover, random_shifts
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> (c,) = random_shifts(discover(net, torch.randn(8, 4)), members=5)
    >>> c.shape
    torch.Size([5, 2])
    """
    check_symmetries(sym)
    lead = () if members is None else (members,)
    return [_normal((*lead, group.size), generator) for group in sym.shifts]


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
