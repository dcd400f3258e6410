"""Places of the units of a network: axes of its tensors, and positions along them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

__all__ = ["Axis", "Placement"]


@dataclass(frozen=True)
class Axis:
    """One dimension of one tensor whose indices belong to units.

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
        """The position of every element of the tensor, in a shape that broadcasts to its own."""
        return self.spread(torch.arange(self.length), shape)

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """The value of every element, from those of positions: ``values[..., labels(shape)]``."""
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
    """The places of a group on one axis: ``positions[k]`` are those of unit ``k``."""

    axis: int
    positions: Tensor
    exponent: int = 1

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, without what was computed from them and kept."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def meets_itself(self) -> bool:
        """True if several units act at one position, such as the two factors of a product."""
        return self.positions.unique().numel() < self.positions.numel()

    @cached_property
    def is_range(self) -> bool:
        """True if the positions, one unit after the other, are 0, 1, 2 and so on."""
        at = self.positions.reshape(-1).cpu()
        return torch.equal(at, torch.arange(len(at)))

    def covers(self, axis: Axis) -> bool:
        """True if the units are all positions of the axis, in their order."""
        return self.positions.shape == (axis.length, 1) and self.is_range
