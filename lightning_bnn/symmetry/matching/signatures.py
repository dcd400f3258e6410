"""A start for joint matching that needs no partner: units whose sorted weights look alike."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.groups import Placement
from lightning_bnn.symmetry.matching.relaxation import Relaxation, Table
from lightning_bnn.symmetry.matching.sinkhorn import doubly_stochastic
from lightning_bnn.symmetry.units import unit_rows

__all__ = ["start_from_signatures"]

TEMPERATURE = 0.1
"""In units of the mean distance; on planted permutations 0.1 did better than 0.03 and than 0."""


def start_from_signatures(
    relaxation: Relaxation, params: Params, reference: Params
) -> list[Tensor]:
    """Doubly stochastic matrices that prefer units with the same weights in any order.

    Whatever stands on the other side of a tensor may be permuted: that only changes the order of
    the weights of a unit. Where rows and columns sum to zero, the mean of all permutations tells
    nothing, but sorted weights still do.

    Args:
        relaxation: of the symmetries of the network.
        params: a stack.
        reference: one network.
    """
    return [
        doubly_stochastic(-_distances(relaxation, table, params, reference) / TEMPERATURE, 50)
        for table in relaxation.tables
    ]


def _distances(relaxation: Relaxation, table: Table, params: Params, reference: Params) -> Tensor:
    """Squared distances of sorted weights, of all pairs of units: ``(members, units, units)``."""
    like = params[next(iter(relaxation.pieces))]
    total, count = like.new_zeros(len(like), table.units, table.units), 0
    for place in table.places:
        tensor = relaxation.plan.sym.axes[place.axis].tensor
        if tensor in relaxation.pieces and reference[tensor].ndim > 1:
            distances = _of_place(relaxation, place, params[tensor], reference)
            mean = distances.mean((1, 2), keepdim=True)
            total += torch.where(mean > 0, distances / mean, 0)
            count += 1
    return total / max(count, 1)


def _of_place(relaxation: Relaxation, place: Placement, w: Tensor, reference: Params) -> Tensor:
    sym = relaxation.plan.sym
    own = unit_rows({}, sym, place, w).sort(-1).values
    goal = unit_rows(reference, sym, place).to(w).sort(-1).values
    return torch.cdist(goal.expand_as(own), own).square()
