"""Weights by unit: which tensors write and read a unit, and statistics of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from weightsym.groups.symmetries import Axis, Group, Placement, Symmetries
from weightsym.networks.devices import kept_on
from weightsym.params import Params

Statistic = Literal["max", "mean", "median", "norm", "std"]
WRITES = ("out", "gain", "raw")
"""Roles of axes along which weights enter units."""


def writer(sym: Symmetries, group: Group) -> Placement | None:
    """Return the first placement, in graph order, of the weights into the units of a group.

    Where tensors may change places, none of them is first: the others come before them. A layer of
    width 1 has no axis for its unit: what enters that lies along the axis of its inputs.
    """
    if _is_single(sym, group):
        return group.placements[0]
    places = [p for p in group.placements if p.exponent > 0 and sym.axes[p.axis].role in WRITES]
    return min(places, key=lambda p: (p.exponent, _standing(sym, group, p)), default=None)


def _is_single(sym: Symmetries, group: Group) -> bool:
    """Return whether a group is the single input of a layer."""
    if group.units > 1 or not group.placements:
        return False
    first = group.placements[0]
    axis = sym.axes[first.axis]
    return axis.role == "in" and first.positions.unique().numel() == axis.length


def is_other_side(sym: Symmetries, axis: int, placement: Placement) -> bool:
    """Return whether an axis is the input side of the weights into the units at a placement."""
    target = sym.axes[placement.axis]
    return sym.axes[axis].tensor == target.tensor and (
        axis != placement.axis or target.role == "in"
    )


def _standing(sym: Symmetries, group: Group, placement: Placement) -> int:
    if len(twin_places(sym, group, placement)) == 1:
        return 0
    return 1 if len(sym.shapes[sym.axes[placement.axis].tensor]) > 1 else 2


def twin_places(sym: Symmetries, group: Group, placement: Placement) -> list[Placement]:
    """Return the placements of the units in all tensors exchangeable with a given one."""
    axis = sym.axes[placement.axis]
    twins = sym.exchangeable_tensors.get(axis.tensor, frozenset({axis.tensor}))
    if len(twins) == 1:
        return [placement]

    def corresponds(placement: Placement) -> bool:
        a = sym.axes[placement.axis]
        return a.tensor in twins and (a.dim, a.role, a.size) == (axis.dim, axis.role, axis.size)

    return [p for p in group.placements if corresponds(p) and p.exponent == placement.exponent]


def side_by_side(weights: Sequence[Tensor], sym: Symmetries, axis: Axis) -> Tensor:
    """Concatenate exchangeable tensors so that each unit has the weights of all."""
    shape = sym.shapes[axis.tensor]
    if len(weights) == 1 or len(shape) < 2 or axis.dim is None or axis.blocks > 1:
        return weights[0]
    offset = weights[0].ndim - len(shape)
    return torch.cat(list(weights), offset + (1 if axis.dim == 0 else 0))


def common_weight(params: Params, sym: Symmetries, group: Group, placement: Placement) -> Tensor:
    """Return the tensor of a placement, concatenated with those exchangeable with it."""
    places = twin_places(sym, group, placement)
    weights = [params[sym.axes[p.axis].tensor] for p in places]
    return side_by_side(weights, sym, sym.axes[placement.axis])


def reader(sym: Symmetries, group: Group) -> Placement | None:
    """Return the last placement, in graph order, of the weights out of the units of a group."""
    places = [p for p in group.placements if sym.axes[p.axis].last_read >= 0]
    return max(places, key=lambda p: sym.axes[p.axis].last_read) if places else None


def other_axes(sym: Symmetries, axis: int) -> list[int]:
    """Return the other dimensions' axes in the same tensor."""
    tensor, dim = sym.axes[axis].tensor, sym.axes[axis].dim
    return [a for a in sym.axes_of[tensor] if a != axis and (dim is None or sym.axes[a].dim != dim)]


def unit_rows(
    params: Mapping[str, Tensor],
    sym: Symmetries,
    placement: Placement,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the weights at a placement, one row per unit, ``(..., units, features)``.

    Those of spaces come as ``(..., spaces, size, features)``.
    """
    axis = sym.axes[placement.axis]
    w = params[axis.tensor] if weight is None else weight
    offset = w.ndim - len(sym.shapes[axis.tensor])
    positions = kept_on(placement.positions, w.device)
    if axis.dim is None:
        rows = w.reshape(*w.shape[:offset], -1)[..., positions.reshape(-1)]
    elif axis.blocks > 1:
        parts = w.unflatten(offset, (axis.blocks, -1)).movedim(axis.dim + offset + 1, offset + 1)
        rows = parts.flatten(offset, offset + 1).index_select(offset, positions.reshape(-1))
    else:
        rows = w.movedim(axis.dim + offset, offset)
        if not (placement.is_range and positions.numel() == axis.size):
            rows = rows.index_select(offset, positions.reshape(-1))
    return rows.reshape(*w.shape[:offset], *positions.shape[:-1], -1)


def by_kernel(rows: Tensor, sym: Symmetries, placement: Placement) -> Tensor:
    """Return rows as ``(..., features, positions of the kernel)``."""
    tensor = sym.axes[placement.axis].tensor
    convolves = all(a.dim in (0, 1) for a in sym.axes if a.tensor == tensor)
    kernel = sym.shapes[tensor][2:].numel() if convolves else 1
    return rows.unflatten(-1, (-1, kernel))


def statistic(
    params: Mapping[str, Tensor],
    sym: Symmetries,
    placement: Placement,
    kind: Statistic,
    weight: Tensor | None = None,
) -> Tensor:
    """Return one number per unit: ``(units,)`` or ``(members, units)``.

    ``"std"`` of a single weight is its absolute value; of several rows (query and key, the two
    halves of a gate) it is the root of their mean variance, so that flipping one changes nothing.
    """
    rows = unit_rows(params, sym, placement, weight)
    if kind != "std":
        return STATISTICS[kind](rows)
    parts = 1 if sym.axes[placement.axis].role == "in" else placement.positions.shape[1]
    return _deviation(rows, parts)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda rows: rows.amax(-1),
    "mean": lambda rows: rows.mean(-1),
    "median": lambda rows: rows.median(-1).values,
    "norm": lambda rows: torch.linalg.vector_norm(rows, dim=-1),
}
"""One number for each row."""


def _deviation(rows: Tensor, parts: int) -> Tensor:
    if rows.shape[-1] == 1:
        return rows.abs()[..., 0]
    width = rows.shape[-1] // parts
    if width > 1:
        rows = rows.unflatten(-1, (-1, width))
        return rows.var(-1).mean(-1).sqrt()
    return rows.std(-1)
