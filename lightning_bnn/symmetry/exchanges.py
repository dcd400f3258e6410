"""Exchange whole tensors: those of branches that compute the same, such as experts in modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.axis_actions import Element
from lightning_bnn.symmetry.groups import PermutationGroup, Symmetries

__all__ = ["exchange_tensors", "first_axis", "source_of"]


def exchange_tensors(params: Params, sym: Symmetries, permutations: Element) -> Params:
    """Tensors that change places, once what is inside them has its new order.

    Args:
        params: one network or a stack, or a part of its tensors.
        sym: what `lightning_bnn.symmetry.discover` returned.
        permutations: one order of the units for every group of ``sym.permutations``.
    """
    result = dict(params)
    for group, order in zip(sym.permutations, permutations, strict=True):
        for row in group.tensors:
            given = [name for name in row if name in result]
            if given and len(given) < len(row):
                missing = next(name for name in row if name not in result)
                raise ValueError(
                    f"`params` must hold {missing!r}: it may change places with {given[0]!r}."
                )
            if given:
                result |= _exchanged(result, row, order)
    return result


def _exchanged(params: Mapping[str, Tensor], row: Sequence[str], order: Tensor) -> Params:
    if order.ndim == 1:
        return {name: params[row[k]] for name, k in zip(row, order.tolist(), strict=True)}
    together = torch.stack([params[name] for name in row], 1)
    members = torch.arange(len(together), device=together.device)[:, None]
    moved = together[members, order.to(together.device)]
    return dict(zip(row, moved.unbind(1), strict=True))


def source_of(name: str, sym: Symmetries, permutations: Element) -> str:
    """The tensor that comes to stand in the place of another one in a single network."""
    for group, order in zip(reversed(sym.permutations), reversed(permutations), strict=True):
        row = next((row for row in group.tensors if name in row), None) if group.tensors else None
        if row is not None:
            name = row[int(order[row.index(name)])]
    return name


def first_axis(sym: Symmetries, group: PermutationGroup) -> int:
    """The first axis, in graph order, that a group moves, alone or with its tensor."""
    moved = {name for row in group.tensors for name in row}
    axes = [place.axis for place in group.placements[:1]]
    axes += [k for k, axis in enumerate(sym.axes) if axis.tensor in moved and not axes][:1]
    return min(axes, default=0)
