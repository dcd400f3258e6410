"""Label tensors: activations that carry, in their own shape, the channel of each element.

A label tensor has stride 0 along every dimension in which the channel does not change (batch,
space, tokens), so that it costs only as much memory as there are channels. Shape operations are
executed on the labels themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

__all__ = [
    "Unsupported",
    "is_operand",
    "noise_of",
    "narrow_except",
    "FROZEN",
    "STRUCTURAL_ZERO",
    "Constant",
    "Noise",
    "Value",
    "Weight",
    "along",
    "compress",
    "constant_labels",
    "core",
    "solid",
    "varies",
]

FROZEN = 0
STRUCTURAL_ZERO = -1  # zero padding: equal to itself under every symmetry


@dataclass(frozen=True, eq=False)
class Value:
    """An activation, known by its labels."""

    labels: Tensor


@dataclass(frozen=True, eq=False)
class Noise(Value):
    """Independent draws: channels of the same law, which may change places, but have a size.

    Its labels are fixed, so that a rule that does not know noise holds what it meets. ``source`` is
    the draw that it was computed from; -1 where there are several.
    """

    source: int = -1


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that depends neither on the input nor on the parameters, known exactly."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A view of a tensor of the state: the coordinates in it of every element of the view."""

    name: str
    coords: tuple[Tensor, ...]
    full_shape: torch.Size
    is_buffer: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the view."""
        return self.coords[0].shape if self.coords else torch.Size(())

    @classmethod
    def whole(cls, name: str, shape: torch.Size, is_buffer: bool) -> Weight:
        """The tensor itself."""
        coords = tuple(along(torch.arange(n), d, shape) for d, n in enumerate(shape))
        return cls(name, coords, shape, is_buffer)


def noise_of(node: Node, source: int | None = None) -> Noise:
    """Noise in the shape of a node: a draw of its own, or computed from one."""
    value = node.meta["val"]
    labels = torch.zeros((1,) * value.ndim, dtype=torch.long).expand(value.shape)
    return Noise(labels, id(node) if source is None else source)


def varies(labels: Tensor) -> list[bool]:
    """Per dimension, whether labels change along it."""
    return [n > 1 and s != 0 for n, s in zip(labels.shape, labels.stride(), strict=True)]


def compress(labels: Tensor) -> Tensor:
    """Give stride 0 to every dimension along which the labels are constant."""
    small = core(labels)
    for d in range(small.ndim):
        if small.shape[d] > 1:
            first = small.narrow(d, 0, 1)
            if bool((small == first).all()):
                small = first
    return small.expand(labels.shape)


def core(labels: Tensor) -> Tensor:
    """The labels with every constant dimension narrowed to one element."""
    for d, moving in enumerate(varies(labels)):
        if not moving and labels.shape[d] > 1:
            labels = labels.narrow(d, 0, 1)
    return labels


def solid(labels: Tensor) -> Tensor:
    """Structural zeros become fixed channels: what is done to them does not leave them at zero."""
    return labels.clamp_min(FROZEN) if bool((core(labels) < 0).any()) else labels


def along(row: Tensor, dim: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Labels of the given shape that change along one dimension only."""
    view = [1] * len(shape)
    view[dim] = -1
    return row.reshape(view).expand(tuple(shape))


def constant_labels(tensor: Tensor) -> Tensor:
    """Labels of a known tensor: fixed channels, zeros free, size 1 where values do not change."""
    if tensor.numel() and bool((tensor == 0).all()):
        return torch.full((1,) * tensor.ndim, STRUCTURAL_ZERO)
    labels = torch.zeros((1,) * tensor.ndim, dtype=torch.long)
    for d in range(tensor.ndim):
        first = tensor.narrow(d, 0, 1) if tensor.shape[d] else tensor
        if tensor.shape[d] > 1 and not bool((tensor == first).all()):
            labels = labels.expand(
                [tensor.shape[d] if k == d else n for k, n in enumerate(labels.shape)]
            )
    return labels


class Unsupported(Exception):
    """A rule does not cover this use of its operation; the tracer freezes what it touches."""


def is_operand(x: object) -> bool:
    """Whether something stands for a tensor."""
    return isinstance(x, Value | Weight | Constant)


def narrow_except(labels: Tensor, moving: Sequence[int]) -> Tensor:
    """The labels with all dimensions narrowed to one element but those that move."""
    for d in range(labels.ndim):
        if d not in moving and labels.shape[d] > 1:
            labels = labels.narrow(d, 0, 1)
    return labels
