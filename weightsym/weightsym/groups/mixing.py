"""One side of spaces mixed by a matrix, the other by a second one, and shifts that are removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from weightsym.groups.actions import act
from weightsym.groups.axis_maps import AxisMap, along_axis
from weightsym.groups.element import mixing_at
from weightsym.groups.placements import Placement, ShiftGroup
from weightsym.groups.symmetries import LinearGroup, Symmetries, incidence
from weightsym.params import Params, is_stacked


def mix_some(params: Params, sym: Symmetries, matrices: Sequence[Tensor]) -> Params:
    """`mix` for a part of the tensors, without checks."""
    return act(params, sym, {"linear": matrices})


def multiplied(
    params: Params, sym: Symmetries, group: LinearGroup, forward: Tensor, inverse_transpose: Tensor
) -> Params:
    """Multiply one side of the spaces of one group by a matrix, the other by a second one.

    Args:
        params: a network or a stack, or those tensors of it that are there.
        sym: what `discover` returned.
        group: one of ``sym.linear``.
        forward: ``(..., spaces, size, size)``, for the places with exponent 1.
        inverse_transpose: the same for those with exponent -1.
    """
    result = dict(params)
    for placement in group.placements:
        name = sym.axes[placement.axis].tensor
        if name in params:
            factor = forward if placement.exponent == 1 else inverse_transpose
            result[name] = mixed_axis(result[name], sym, placement, factor)
    return result


def mixed_axis(w: Tensor, sym: Symmetries, placement: Placement, matrices: Tensor) -> Tensor:
    """One tensor whose channels at some positions of one axis are mixed."""
    axis = sym.axes[placement.axis]
    offset = w.ndim - len(sym.shapes[axis.tensor])
    return AxisMap(mixings=(mixing_at(placement, matrices.to(w)),)).act(w, axis, offset)


def remove_shifts(params: Params, sym: Symmetries) -> Params:
    """One network for all that shifts make equal: biases that may be shifted become zero.

    Of a table the mean of its rows does. Where permutations may move such a place to others of the
    same shift, all of these become as small as shifts can make them together.
    """
    together: dict[int | str, list[ShiftGroup]] = {}
    for k, group in enumerate(sym.shifts):
        is_alone = len(_exchanged(sym, group)) == 1
        together.setdefault(k if is_alone else sym.first_twin(group.name), []).append(group)
    for groups in together.values():  # in graph order: what takes a shift up may hand it on
        for group, value in zip(groups, _removing(params, sym, groups), strict=True):
            params = act(
                params, sym, {"shifts": [value if g is group else None for g in sym.shifts]}
            )
    return params


def _exchanged(sym: Symmetries, group: ShiftGroup) -> tuple[Placement, ...]:
    """The places of a group in its first tensor, and in those that may change places with it."""
    first = sym.first_twin(group.name)
    return tuple(p for p in group.placements if sym.first_twin(sym.axes[p.axis].tensor) == first)


def _removing(params: Params, sym: Symmetries, groups: Sequence[ShiftGroup]) -> Sequence[Tensor]:
    r"""The shifts after which least is left, in the sum of squares, where places are exchanged.

    .. math:: \min_c \|w + S c\|^2, \quad S^T S c = -S^T w
    """
    if len(_exchanged(sym, groups[0])) == 1:
        return [-_mean(params, sym, groups[0].placements[0])]
    groups = [replace(group, placements=_exchanged(sym, group)) for group in groups]
    sizes = [group.size for group in groups]
    acts = incidence(sym.axes, groups, [np.arange(size) for size in sizes])
    sums = [
        torch.stack(
            [p.exponent * p.positions.shape[1] * _mean(params, sym, p) for p in group.placements]
        ).sum(0)
        for group in groups
    ]
    right = torch.cat(sums, -1).detach()
    gram = (acts.T @ acts).tocsc().astype(np.float64)
    solved = splu(gram).solve(-right.double().cpu().numpy().T)
    return torch.from_numpy(solved.T.copy()).to(right.device).split(sizes, -1)


def _mean(params: Params, sym: Symmetries, placement: Placement) -> Tensor:
    """The mean of a tensor over everything but the channels of a place."""
    w = params[sym.axes[placement.axis].tensor]
    offset = int(is_stacked({sym.axes[placement.axis].tensor: w}, sym.shapes))
    rows = along_axis(w, sym.axes[placement.axis], offset)
    means = rows.mean(tuple(range(offset, rows.ndim - 1))) if rows.ndim > offset + 1 else rows
    return means[..., placement.positions.to(w.device)].mean(-1)
