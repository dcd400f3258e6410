"""Where the units of a network live: axes of its tensors, and positions along them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch import Tensor

__all__ = ["Axis", "Placement"]


@dataclass(frozen=True)
class Axis:
    """One dimension of one tensor whose indices belong to units.

    ``dim=None`` is the flattened tensor. With ``blocks > 1`` (grouped convolutions, packed
    projections) the rows of the tensor fall into that many equal blocks, and position ``b * size +
    i`` is column ``i`` as seen by row block ``b``. ``last_read`` counts up along the graph; it is
    -1 where no layer takes its input along this axis.
    """

    tensor: str
    dim: int | None
    size: int
    role: str
    blocks: int = 1
    last_read: int = -1


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the units of a group live on one axis: ``positions[k]`` are those of unit ``k``."""

    axis: int
    positions: Tensor
    exponent: int = 1

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, without what was computed from them and kept."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def meets_itself(self) -> bool:
        """Whether several units act at one position, such as the two factors of a product."""
        return self.positions.unique().numel() < self.positions.numel()
