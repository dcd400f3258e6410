"""The weights at the channels of a space: what writes them, what reads them, and who owns them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weightsym.coverage import units_inside
from weightsym.groups import Group, LinearGroup, ScalingGroup, Symmetries
from weightsym.params import Params
from weightsym.placements import Placement
from weightsym.units import unit_rows

__all__ = ["Sides", "coupled", "covered", "sides", "weight_places"]

Sides = tuple[Tensor, Tensor]


def weight_places(sym: Symmetries, group: LinearGroup) -> list[Placement]:
    """The placements of a group whose tensors count for the mass, in graph order."""
    return [p for p in group.placements if sym.axes[p.axis].tensor in sym.weights]


def sides(stack: Params, sym: Symmetries, group: LinearGroup) -> Sides:
    """The two matrices of every space that G and its inverse transpose multiply, biases excluded.

    Args:
        stack: a stack of networks in double precision, or those tensors of it that are there.
        sym: what `discover` returned.
        group: one of ``sym.linear``.
    """
    parts: dict[int, list[Tensor]] = {1: [], -1: []}
    for placement in weight_places(sym, group):
        parts[placement.exponent].append(unit_rows(stack, sym, placement))
    first = next(iter(stack.values()))
    none = first.new_zeros(first.shape[0], group.spaces, group.size, 0)
    return torch.cat([none, *parts[1]], -1), torch.cat([none, *parts[-1]], -1)


def coupled(sym: Symmetries, group: LinearGroup, others: Collection[LinearGroup]) -> bool:
    """True if a matrix of the group and one of the others act on two sides of one tensor."""
    return any(
        sym.axes[p.axis].tensor == sym.axes[q.axis].tensor and p.axis != q.axis
        for other in others
        for p in weight_places(sym, group)
        for q in weight_places(sym, other)
    )


def covered(sym: Symmetries, groups: Sequence[Group], kinds: Collection[str]) -> tuple[Tensor, ...]:
    """For every group, which of its units move inside spaces of the given kinds only.

    Scales do where they are diagonal matrices of these spaces.
    """
    linear = [group for group in sym.linear if group.kind in kinds]
    scalings = all(isinstance(g, ScalingGroup) for g in groups)
    return units_inside(sym.axes, linear, groups, diagonal=scalings)
