"""Whether networks still stand in the frame of their means: a test without assignments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.matching.plan import Plan, View

__all__ = ["Apart", "Nearness"]

_ROUNDING = 1e-5  # of squared lengths, in products of float32


class _Units(NamedTuple):
    """Units that may change places with each other: where they are seen, whether they may flip."""

    views: list[View]
    flip: bool


@dataclass
class Apart:
    """How far the units of a mean are from each other, and how far they may have moved since.

    Attributes:
        nearest: of every unit, the distance to the unit that is closest to it.
        drift: how far every unit has moved at most since that was measured.
    """

    nearest: list[Tensor]
    drift: list[Tensor]

    def least(self) -> list[Tensor]:
        """The least distance that every unit can have now from the closest one."""
        pairs = zip(self.nearest, self.drift, strict=True)
        return [n - d - d.amax(-1, keepdim=True) for n, d in pairs]


class Nearness:
    r"""A sufficient test: no exchange of units brings networks closer to their means.

    A unit is the vector of all weights that enter and leave it. Where every unit of a network is
    closer to its own unit of the mean than half of what separates that from any other unit of the
    mean (or from its mirror image, if it may be flipped),

    .. math:: 2\, \| u_i - m_i \| \le \min_{j \ne i} \| m_i - m_j \|,

    no unit is closer to another place, so that the assignment of every group is the identity.
    Separations are measured once, and hold as long as the mean cannot have moved by more than they
    leave: every update moves unit i by a known share of :math:`\| u_i - m_i \|`.

    Args:
        plan: of the groups.
        signs: whether units may be flipped.
    """

    def __init__(self, plan: Plan, signs: bool) -> None:
        self.plan = plan
        self.units: list[_Units] = []
        for family, views in zip(plan.families, plan.views, strict=True):
            flip = signs and plan.mirrors[family.group] is not None
            groups = [_Units(views.own, flip), *(_Units(inside, False) for inside in views.inside)]
            self.units += [units for units in groups if units.views]
        self.names = sorted({view.tensor for units in self.units for view in units.views})

    def distances(self, networks: Params, means: Params) -> list[Tensor]:
        """Of every unit, the distance between a network and its mean: ``(members, units)``."""
        squares = {n: (networks[n] - means[n]).square_() for n in self.names}
        return [
            _sum([v.rows(squares[v.tensor]).sum(-1) for v in units.views]).sqrt()
            for units in self.units
        ]

    def apart(self, means: Params) -> Apart:
        """How far the units of every mean are from each other."""
        nearest = [self._nearest(units, means) for units in self.units]
        return Apart(nearest, [torch.zeros_like(n) for n in nearest])

    def unclear(self, distances: Sequence[Tensor], apart: Apart) -> list[Tensor]:
        """Which units may be closer to another place: ``(members, units)``."""
        return [~(2 * d <= n) for d, n in zip(distances, apart.least(), strict=True)]

    def _nearest(self, units: _Units, means: Params) -> Tensor:
        rows = [v.rows(means[v.tensor]) for v in units.views]
        products = _sum([r @ r.mT for r in rows])
        own = products.diagonal(dim1=-2, dim2=-1)
        both = own[..., :, None] + own[..., None, :]
        squares = both * (1 - _ROUNDING) - 2 * (products.abs() if units.flip else products)
        alone = 4 * own if units.flip else torch.full_like(own, torch.inf)
        squares = squares.diagonal_scatter(alone, dim1=-2, dim2=-1)
        return squares.amin(-1).clamp_min(0).sqrt()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
