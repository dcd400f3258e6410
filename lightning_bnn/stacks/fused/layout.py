"""Activations between torch, examples first, and stages, blocks of examples last."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_bnn.stacks.fused.stage import Pads, Pair

__all__ = ["examples_first", "examples_last"]


def examples_last(x: Tensor, channels: int, size: Pair, pads: Pads, lanes: int) -> Tensor:
    """From ``(members, examples, ...)`` to ``(members, blocks, channels, rows, columns, lanes)``.

    Always a copy, also where one number of an example is all there is, since gradients are changed
    in place.

    Args:
        x: activations of torch.
        channels: of an example.
        size: its rows and columns.
        pads: zeros around it.
        lanes: examples in a block; what is left over in the last block is zero.
    """
    members, examples = x.shape[:2]
    blocks = -(-examples // lanes)
    rows, columns = size[0] + sum(pads[:2]), size[1] + sum(pads[2:])
    flat = x.detach().reshape(members, examples, channels * math.prod(size))
    if examples < blocks * lanes:
        flat = torch.nn.functional.pad(flat, (0, 0, 0, blocks * lanes - examples))
    turned = flat.unflatten(1, (blocks, lanes)).mT
    if not any(pads):
        turned = turned.clone(memory_format=torch.contiguous_format)
        return turned.view(members, blocks, channels, rows, columns, lanes)
    out = x.new_zeros(members, blocks, channels, rows, columns, lanes)
    _inside(out, size, pads).copy_(turned.unflatten(2, (channels, *size)))
    return out


def examples_first(
    out: Tensor, examples: int, shape: tuple[int, ...], size: Pair, pads: Pads
) -> Tensor:
    """The way back, to ``(members, examples, *shape)``, in memory that others may change.

    Args:
        out: activations of stages.
        examples: how many there are.
        shape: of one of them.
        size: rows and columns without padding.
        pads: zeros around them.
    """
    inner = _inside(out, size, pads) if any(pads) else out
    turned = inner.flatten(2, 4).mT
    result = out.new_empty(len(out), examples, *shape)
    flat = result.view(len(out), examples, math.prod(shape))
    lanes = out.shape[-1]
    blocks = examples // lanes
    flat[:, : blocks * lanes].unflatten(1, (blocks, lanes)).copy_(turned[:, :blocks])
    flat[:, blocks * lanes :].copy_(turned[:, -1, : examples - blocks * lanes])
    return result


def _inside(out: Tensor, size: Pair, pads: Pads) -> Tensor:
    return out[:, :, :, pads[0] : pads[0] + size[0], pads[2] : pads[2] + size[1]]
