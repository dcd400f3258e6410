"""Break ties between units by all of their numbers, not only the one they are sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import permuted_tensor
from lightning_bnn.symmetry.counting import count_ranks, dense_ranks
from lightning_bnn.symmetry.groups import Placement, Symmetries
from lightning_bnn.symmetry.units import common_weight, sorted_rows, twin_places, unit_rows

__all__ = ["ranks", "break_ties"]

_ROUNDING = 16  # units in the last place


def ranks(key: Tensor) -> Tensor:
    """The place of every unit among the different keys, those that rounding separates being one."""
    return dense_ranks(key, _ROUNDING)


def break_ties(
    params: Params,
    sym: Symmetries,
    index: int,
    places: Tensor,
    permutations: Sequence[Tensor],
    done: set[int],
    descending: bool,
) -> Tensor:
    """Ranks of the units of a group, in which fewer are the same.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        index: of the group.
        places: `ranks` of its units.
        permutations: those of all groups so far.
        done: the groups that are sorted.
        descending: whether units with larger numbers come first.
    """
    for place in sym.permutations[index].placements:
        for in_order in (False, True):
            tied = _tied(places)
            if not len(tied):
                return places
            rows = _rows(params, sym, place, tied, (index, permutations, done), in_order)
            if rows is not None:
                finer = torch.zeros_like(places)
                new = _ranks_of_rows(rows)
                finer[..., tied] = new.max() - new if descending else new
                places = ranks(places * (finer.max() + 1) + finer)
    return places


def _tied(places: Tensor) -> Tensor:
    """Units that agree with another one, in some member of a stack."""
    several = count_ranks(places).gather(-1, places) > 1
    return several.reshape(-1, several.shape[-1]).any(0).nonzero()[:, 0]


def _rows(
    params: Params,
    sym: Symmetries,
    place: Placement,
    units: Tensor,
    state: tuple[int, Sequence[Tensor], set[int]],
    in_order: bool,
) -> Tensor | None:
    """The numbers of some units in one tensor: sorted, or in order where there is one."""
    tensor = sym.axes[place.axis].tensor
    if tensor not in params:
        return None
    some = replace(place, positions=place.positions[units.to(place.positions.device)])
    group = sym.permutations[state[0]]
    if len(twin_places(sym, group, place)) > 1:  # in no order: they may change places
        common = common_weight(params, sym, group, place)
        return None if in_order else sorted_rows(unit_rows(params, sym, some, common), sym, some)
    if not in_order:
        return sorted_rows(unit_rows(params, sym, some), sym, some)
    w = _beside(params, sym, place, *state)
    return None if w is None else unit_rows(params, sym, some, w)


def _beside(
    params: Params,
    sym: Symmetries,
    place: Placement,
    index: int,
    permutations: Sequence[Tensor],
    done: set[int],
) -> Tensor | None:
    """The tensor at a place with its other dimension in order, where that has one already."""
    axis = sym.axes[place.axis]
    table = sym.placements_by_axis("permutations")
    others = [a for a in table if sym.axes[a].tensor == axis.tensor and a != place.axis]
    groups = {g for a in others for g, _ in table[a]}
    blocks = any(sym.axes[a].blocks > 1 for a in (*others, place.axis))
    if blocks or index in groups or not groups <= done:
        return None
    return permuted_tensor(params, sym, axis.tensor, others, permutations)


def _ranks_of_rows(rows: Tensor) -> Tensor:
    """Place of every row in lexicographic order, for all members of a stack at once."""
    numbers = ranks(rows.flatten(-2)).reshape(rows.shape)
    _, places = torch.unique(numbers.flatten(0, -2), dim=0, return_inverse=True)
    return places.reshape(rows.shape[:-1])
