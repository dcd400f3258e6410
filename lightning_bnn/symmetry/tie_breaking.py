"""Break ties between units by all of their numbers, not only the one they are sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import permuted_tensor
from lightning_bnn.symmetry.counting import count_ranks, dense_ranks
from lightning_bnn.symmetry.groups import Placement, Symmetries
from lightning_bnn.symmetry.units import (
    common_weight,
    sorted_rows,
    sums_of_rows,
    twin_places,
    unit_rows,
)

__all__ = ["ranks", "break_ties"]

_ROUNDING = 16  # units in the last place
_Compared = Literal["sums", "sorted", "in order"]


def ranks(key: Tensor) -> Tensor:
    """The place of every unit among the different keys, those that rounding separates being one."""
    return dense_ranks(key, _rounding(key) * key.abs().amax(-1, keepdim=True))


def _rounding(numbers: Tensor) -> float:
    """What tells two numbers apart, as a share of the largest."""
    return _ROUNDING * torch.finfo(numbers.dtype).eps if numbers.is_floating_point() else 0.0


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
        for compared in get_args(_Compared):
            tied = _tied(places)
            if not len(tied):
                return places
            new = _compare(params, sym, place, tied, (index, permutations, done), compared)
            if new is not None:
                finer = torch.zeros_like(places)
                finer[..., tied] = new.max() - new if descending else new
                places = ranks(places * (finer.max() + 1) + finer)
    return places


def _tied(places: Tensor) -> Tensor:
    """Units that agree with another one, in some member of a stack."""
    several = count_ranks(places).gather(-1, places) > 1
    return several.reshape(-1, several.shape[-1]).any(0).nonzero()[:, 0]


def _compare(
    params: Params,
    sym: Symmetries,
    place: Placement,
    units: Tensor,
    state: tuple[int, Sequence[Tensor], set[int]],
    compared: _Compared,
) -> Tensor | None:
    """The places of some units by their numbers in one tensor, if those can be compared.

    Sums come first: of many units they are farther apart than single numbers are, and are enough.
    """
    tensor = sym.axes[place.axis].tensor
    if tensor not in params:
        return None
    some = replace(place, positions=place.positions[units.to(place.positions.device)])
    group = sym.permutations[state[0]]
    twins = len(twin_places(sym, group, place)) > 1  # in no order: they may change places
    if compared == "in order":
        w = None if twins else _beside(params, sym, place, *state)
        return None if w is None else _places_of_rows(unit_rows(params, sym, some, w))
    rows = unit_rows(params, sym, some, common_weight(params, sym, group, place) if twins else None)
    if compared == "sorted":
        return _places_of_rows(sorted_rows(rows, sym, some))
    sums = sums_of_rows(rows, sym, some)
    size = torch.maximum(sums.abs().amax((-1, -2)), torch.linalg.vector_norm(rows, dim=-1).amax(-1))
    return _places_of_rows(sums, _rounding(rows) * size)


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


def _places_of_rows(rows: Tensor, within: Tensor | None = None) -> Tensor:
    """Location of every row in lexicographic order, for all members of a stack at once.

    Numbers are compared with those of their column: a million of a whole tensor lie closer together
    than rounding separates any two.
    """
    if within is None:
        within = _rounding(rows) * rows.abs().amax((-1, -2))
    numbers = dense_ranks(rows.transpose(-1, -2), within[..., None, None]).transpose(-1, -2)
    _, places = torch.unique(numbers.flatten(0, -2), dim=0, return_inverse=True)
    return places.reshape(rows.shape[:-1])
