"""Groups of matrices that mix channels: of attention heads, adapters and normalised streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weightsym.placements import Placement

__all__ = ["LinearGroup", "LinearKind"]

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

    @property
    def rescales(self) -> bool:
        """True if the group contains positive factors."""
        return self.kind in ("general", "complex")
