"""Removal of shifts that biases absorb: one representative for all shifted networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from weightsym.groups.actions import act
from weightsym.groups.axis_maps import along_axis
from weightsym.groups.placements import Placement, ShiftGroup
from weightsym.groups.symmetries import Symmetries, incidence
from weightsym.networks.dicts import Computed
from weightsym.params import Params, is_stacked


def remove_shifts(params: Params, sym: Symmetries) -> Params:
    """Replace shifted networks by one representative: biases that may be shifted become zero.

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


def without_shifts(params: Mapping[str, Tensor], sym: Symmetries) -> Mapping[str, Tensor]:
    """Remove shifts from a network whose other tensors are read when they are needed.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
    """
    readers = [reader for group in sym.shifts for reader in group.readers]
    changed = {reader.bias for reader in readers}.union(*map(sym.moved_by, sym.shifts))
    needed = changed | {sym.axes[reader.channels.axis].tensor for reader in readers}
    removed = remove_shifts({name: params[name] for name in sorted(needed)}, sym)
    return Computed(
        tuple(params), lambda name: removed[name] if name in changed else params[name], params
    )


def _exchanged(sym: Symmetries, group: ShiftGroup) -> tuple[Placement, ...]:
    """Return the placements of a group in its first tensor and in those exchangeable with it."""
    first = sym.first_twin(group.name)
    return tuple(p for p in group.placements if sym.first_twin(sym.axes[p.axis].tensor) == first)


def _removing(params: Params, sym: Symmetries, groups: Sequence[ShiftGroup]) -> Sequence[Tensor]:
    r"""Return the shifts that minimise the remaining sum of squares, jointly if exchangeable.

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
    """Return the mean of a tensor over everything but the channels of a placement."""
    w = params[sym.axes[placement.axis].tensor]
    offset = int(is_stacked({sym.axes[placement.axis].tensor: w}, sym.shapes))
    rows = along_axis(w, sym.axes[placement.axis], offset)
    means = rows.mean(tuple(range(offset, rows.ndim - 1))) if rows.ndim > offset + 1 else rows
    return means[..., placement.positions.to(w.device)].mean(-1)
