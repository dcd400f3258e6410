"""Positions of units and channels on the axes of tensors; matrices and shifts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor whose indices belong to units.

    `labels` gives the position of every element of the tensor. That is its index in dimension
    ``dim``, or in the flattened tensor where ``dim`` is None. With ``blocks > 1`` (grouped
    convolutions, packed projections, stacks of experts) the rows of the tensor fall into that many
    equal blocks, and position ``b * size + i`` is column ``i`` as seen by row block ``b``.
    ``last_read`` counts up along the graph; it is -1 where no layer takes its input along this
    axis.
    """

    tensor: str
    dim: int | None
    size: int
    role: str
    blocks: int = 1
    last_read: int = -1

    @property
    def length(self) -> int:
        """The number of positions along the axis."""
        return self.blocks * self.size

    def labels(self, shape: torch.Size) -> Tensor:
        """Return the position of every entry of the tensor, in a shape that broadcasts to it."""
        return self.spread(torch.arange(self.length), shape)

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Broadcast values of positions to entries: ``values[..., labels(shape)]``."""
        lead = values.shape[:-1]
        if self.dim is None:
            return values.reshape([*lead, *shape])
        along = [self.size if d == self.dim else 1 for d in range(len(shape))]
        if self.blocks == 1:
            return values.reshape(*lead, *along)
        along[0] = self.blocks
        return values.reshape(*lead, *along).repeat_interleave(shape[0] // self.blocks, len(lead))


@dataclass(frozen=True, eq=False)
class Placement:
    """The positions of a group on one axis: ``positions[k]`` are those of unit ``k``."""

    axis: int
    positions: Tensor
    exponent: int = 1

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone, without cached values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def meets_itself(self) -> bool:
        """True if several units act at one position, such as the two factors of a product."""
        return self.positions.unique().numel() < self.positions.numel()

    @cached_property
    def is_range(self) -> bool:
        """True if the positions, in order of units, are 0, 1, 2 and so on."""
        positions = self.positions.reshape(-1).cpu()
        return torch.equal(positions, torch.arange(len(positions)))

    def covers(self, axis: Axis) -> bool:
        """Return whether the units are all positions of the axis, in order."""
        return self.positions.shape == (axis.length, 1) and self.is_range


# ------------------------------------------------------------ matrices
LinearKind = Literal["general", "orthogonal", "centred", "complex", "unit complex"]


@dataclass(frozen=True, eq=False)
class LinearGroup:
    """Spaces of channels, each of which may be mixed by a matrix of its own.

    What enters the channels of a space is multiplied by a matrix G, what leaves them by the inverse
    of G. ``placements`` hold ``positions`` of shape ``(spaces, size, repeats)``; along an axis with
    exponent 1 the matrix G acts, with exponent -1 its inverse transpose.

    Attributes:
        kind: ``"general"`` for all invertible matrices, ``"orthogonal"`` for rotations and
            reflections, ``"centred"`` for those that leave the vector of ones alone, ``"complex"``
            for the 2 x 2 matrices of complex numbers, ``"unit complex"`` for those of absolute
            value one.
        spaces: the number of spaces, such as heads.
        size: the number of channels in each.
        name: the tensor that writes the channels.

    >>> import torch
    >>> from weightsym import discover
    >>> adapter = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> (group,) = discover(adapter, torch.randn(8, 4)).linear
    >>> group, group.dimension
    (LinearGroup(kind='general', spaces=1, size=2, name='0.weight'), 4)
    """

    kind: LinearKind
    spaces: int
    size: int
    name: str
    placements: tuple[Placement, ...] = field(repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone, without cached values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def dimension(self) -> int:
        """The number of free parameters of one element."""
        n = self.size
        each = {
            "general": n * n,
            "orthogonal": n * (n - 1) // 2,
            "centred": (n - 1) * (n - 2) // 2,
            "complex": 2,
            "unit complex": 1,
        }
        return self.spaces * each[self.kind]

    @cached_property
    def basis(self) -> Tensor:
        """The directions that can be rotated, as columns: all, or all but that of the ones."""
        if self.kind != "centred":
            return torch.eye(self.size, dtype=torch.float64)
        return self.directions[:, 1:]

    @cached_property
    def directions(self) -> Tensor:
        """An orthonormal basis of all channels, as columns, with the normalised ones first."""
        ones = torch.ones(self.size, 1, dtype=torch.float64)
        return torch.linalg.qr(ones, mode="complete").Q

    def lifted(self, turn: Tensor) -> Tensor:
        """Extend a rotation of the free directions to all channels."""
        basis = self.basis.to(turn)
        return basis @ turn @ basis.mT + torch.eye(self.size).to(turn) - basis @ basis.mT

    @property
    def rescales(self) -> bool:
        """True if the group contains positive factors."""
        return self.kind in ("general", "complex")


# ------------------------------------------------------------ shifts
@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads shifted channels, and whose bias absorbs the shift.

    ``channels`` says where the channels lie along the incoming axis of the weight, and how many
    times the shift is added to them. ``rows`` are those of the weight whose outputs the elements of
    the bias are added to; by default they are the same.
    """

    channels: Placement
    bias: str
    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ShiftGroup:
    r"""Constants that may be added to the channels that a bias writes.

    With a shift c the bias becomes :math:`b + c`, and the bias of every layer that reads the
    channels :math:`b' - W' c`. A bias that no layer reads is dead, such as that of keys, which the
    softmax forgets. What another summand of the same sum takes up has exponent -1.

    Attributes:
        size: the number of channels.
        name: the bias, or table, that is shifted.
        placements: where the channels lie along biases and tables, that of ``name`` first; the
            shift is added as often as the exponent says.
        readers: the layers whose biases take the shift up.

    >>> import torch
    >>> from weightsym import discover
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> (group,) = discover(net, torch.randn(8, 4)).shifts
    >>> group, [reader.bias for reader in group.readers], group.is_dead
    (ShiftGroup(size=2, name='0.bias'), ['1.bias'], False)
    """

    size: int
    name: str
    placements: tuple[Placement, ...] = field(repr=False)
    readers: tuple[Reader, ...] = field(default=(), repr=False)

    @property
    def is_dead(self) -> bool:
        """True if the shift has no effect."""
        return not self.readers and all(placement.exponent == 1 for placement in self.placements)


def complex_matrices(x: Tensor, y: Tensor) -> Tensor:
    """Return the real 2 x 2 matrices of complex numbers."""
    return torch.stack([torch.stack([x, -y], -1), torch.stack([y, x], -1)], -2)
