"""The permutations that put the units of every group in order.

Units are compared by one number. Where those of two units agree up to rounding, all numbers of the
units are compared, tensor by tensor in graph order: the weights that enter them, biases, gains, the
weights that leave them; sorted by size, then in the order of the layer on the other side where that
is known. Units that agree in all of that keep their order: the result is the same for every
permuted copy of a network in which such units are exchangeable, as copies of each other are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry.actions import permuted_tensor
from lightning_bnn.symmetry.groups import PermutationGroup, Placement, Symmetries
from lightning_bnn.symmetry.units import corner, reader, sorted_rows, statistic, unit_rows, writer
from lightning_bnn.symmetry.validation import check_finite, check_params

__all__ = ["SortKey", "sort_permutations"]

SortKey = Literal["max", "first", "mean", "median", "norm", "outgoing"]
_ROUNDING = 64  # units in the last place


def sort_permutations(
    params: Params, sym: Symmetries, by: SortKey = "max", descending: bool = True
) -> list[Tensor]:
    """The permutations that sort the units of every group.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        by: statistic of the weights that enter a unit: their ``"max"``, ``"mean"``, ``"median"``,
            ``"norm"`` or the ``"first"`` of them (once the layer before is sorted); or
            ``"outgoing"``, the first weight that leaves the unit, once the layer behind is sorted.
            Blocks are sorted by the same statistic over the whole block.
        descending: largest first.
    """
    if by not in get_args(SortKey):
        raise ValueError(f"`by` must be one of {', '.join(get_args(SortKey))}, got {by!r}.")
    check_params(params, sym)
    check_finite(params, sym)
    lead = (next(iter(params.values())).shape[0],) if is_stacked(params, sym.shapes) else ()
    device = next(iter(params.values())).device
    result = [torch.arange(g.units, device=device).expand(*lead, g.units) for g in sym.permutations]
    done: set[int] = set()
    for index in _order(sym, backwards=by == "outgoing"):
        key = _key(params, sym, sym.permutations[index], by, result)
        if key is not None:
            order = key.argsort(dim=-1, descending=descending, stable=True)
            ranks = _ranks(key, order)
            if bool((ranks.amax(-1) < key.shape[-1] - 1).any()):
                finer = _finer_ranks(params, sym, index, result, done)
                order = _lexicographic([ranks, *(-r if descending else r for r in finer)])
            result[index] = order
        done.add(index)
    return result


def _order(sym: Symmetries, backwards: bool) -> list[int]:
    """Groups in graph order, or from the last layer.

    Blocks are placed once the channels are sorted by which they are compared, and before the other
    channels inside them, whose first weight may lie in any block.
    """

    def place(g: int) -> Placement | None:
        group = sym.permutations[g]
        return (reader(sym, group) if backwards else None) or writer(sym, group)

    def depth(g: int) -> int:
        read = reader(sym, sym.permutations[g]) if backwards else None
        return -sym.axes[read.axis].last_read if read else sym.permutations[g].placements[0].axis

    def compared(g: int, member: int) -> bool:
        at = place(g)
        return at is not None and any(
            p.axis == at.axis for p in sym.permutations[member].placements
        )

    inner = {g for group in sym.permutations for row in group.inner for g in row}
    order = []
    for g in sorted((g for g in range(len(sym.permutations)) if g not in inner), key=depth):
        inside = sorted((m for row in sym.permutations[g].inner for m in row), key=depth)
        first = [m for m in inside if compared(g, m)]
        order += [*first, g, *(m for m in inside if m not in first)]
    return order


def _key(
    params: Params, sym: Symmetries, group: PermutationGroup, by: SortKey, found: Sequence[Tensor]
) -> Tensor | None:
    place = (reader(sym, group) if by == "outgoing" else None) or writer(sym, group)
    if place is None:
        return None
    if by == "first" or (by == "outgoing" and reader(sym, group) is not None):
        return corner(params, sym, place, found)
    return statistic(params, sym, place, "max" if by == "outgoing" else by)


# ------------------------------------------------------------ ties
def _ranks(key: Tensor, order: Tensor) -> Tensor:
    """The place of every unit among the different keys, those that rounding separates being one."""
    ordered = key.gather(-1, order)
    size = _ROUNDING * torch.finfo(key.dtype).eps * key.abs().amax(-1, keepdim=True)
    new = (ordered.diff(dim=-1).abs() > size).cumsum(-1)
    places = torch.cat([torch.zeros_like(order[..., :1]), new], -1)
    return torch.empty_like(order).scatter_(-1, order, places)


def _finer_ranks(
    params: Params, sym: Symmetries, index: int, found: Sequence[Tensor], done: set[int]
) -> list[Tensor]:
    """Ranks of units by all of their numbers, in every tensor that holds some."""
    ranks = []
    for place in sym.permutations[index].placements:
        if sym.axes[place.axis].tensor in params:
            w = _beside(params, sym, place, index, found, done)
            rows = unit_rows(params, sym, place, w)
            ranks.append(_rank_of_rows(sorted_rows(rows, sym, place)))
            if w is not None and rows.shape[-1] > 1:
                ranks.append(_rank_of_rows(rows))
    return ranks


def _beside(
    params: Params,
    sym: Symmetries,
    place: Placement,
    index: int,
    found: Sequence[Tensor],
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
    return permuted_tensor(params, sym, axis.tensor, others, found)


def _rank_of_rows(rows: Tensor) -> Tensor:
    """Place of every row in lexicographic order, for all members of a stack at once."""
    size = rows.abs().amax((-1, -2), keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    digits = torch.round(rows.double() / (size * _ROUNDING * torch.finfo(rows.dtype).eps))
    _, places = torch.unique(digits.flatten(0, -2), dim=0, return_inverse=True)
    return places.reshape(rows.shape[:-1])


def _lexicographic(keys: Sequence[Tensor]) -> Tensor:
    """The order by the first key, then by the second, and so on."""
    order = torch.arange(keys[0].shape[-1], device=keys[0].device).expand(keys[0].shape)
    for key in reversed(keys):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order
