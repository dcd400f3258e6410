"""Which units move inside spaces that matrices mix, so that their factors are such matrices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.symmetry.linear_groups import LinearGroup
from lightning_bnn.symmetry.placements import Axis, Placement

__all__ = ["scales_inside", "units_inside"]

Ints = NDArray[np.int64]


def units_inside(
    axes: Sequence[Axis], linear: Sequence[LinearGroup], groups: Sequence[Any]
) -> tuple[Tensor, ...]:
    """For every group, which of its units have all their places among the channels of spaces.

    Args:
        axes: those of the symmetries.
        linear: the groups of matrices that count.
        groups: of permutations, scalings or signs.
    """
    inside = {a: torch.zeros(x.blocks * x.size, dtype=torch.bool) for a, x in enumerate(axes)}
    for group in linear:
        for place in group.placements:
            inside[place.axis][place.positions.reshape(-1)] = True
    return tuple(
        torch.stack([inside[p.axis][p.positions].all(1) for p in g.placements]).all(0)
        for g in groups
    )


def scales_inside(
    axes: Sequence[Axis], linear: Sequence[LinearGroup], groups: Sequence[Any]
) -> tuple[Tensor, ...]:
    """For every group of scalings, which of its units are diagonal matrices of spaces.

    Such a unit has a power p at all places where a matrix G acts on its channels, and -p where the
    inverse transpose does. The further scale of a product lies in spaces, too, but only on one side
    of them.

    Args:
        axes: those of the symmetries.
        linear: the groups of matrices that count.
        groups: those of scalings.
    """
    table = _Channels(axes, linear)
    return tuple(
        units & table.are_whole(g.placements)
        for g, units in zip(groups, units_inside(axes, linear, groups), strict=True)
    )


class _Channels:
    """The channel of some space at every position of every axis, and the side of it."""

    def __init__(self, axes: Sequence[Axis], linear: Collection[LinearGroup]) -> None:
        sizes = [x.blocks * x.size for x in axes]
        self.channel = [np.full(n, -1) for n in sizes]
        self.side = [np.zeros(n, np.int64) for n in sizes]
        start = 0
        for group in linear:
            each = 1 if group.kind == "complex" else group.size
            ids = start + np.arange(group.spaces)[:, None, None] * each
            ids = ids + np.arange(group.size)[:, None] % each
            for place in group.placements:
                at = place.positions.numpy()
                self.channel[place.axis][at] = ids
                self.side[place.axis][at] = place.exponent
            start += group.spaces * each
        every = np.concatenate([np.zeros(0, np.int64), *self.channel])
        self.places = np.bincount(every[every >= 0], minlength=start)

    def are_whole(self, placements: Sequence[Placement]) -> Tensor:
        """For every unit, whether its powers agree at all places of all channels that it has."""
        unit, channel, power = (
            np.concatenate(part) for part in zip(*map(self._at, placements), strict=True)
        )
        units = placements[0].positions.shape[0]
        whole = np.ones(units, np.bool_)
        inside = channel >= 0
        pair = _Pairs.of(unit[inside], channel[inside], power[inside])
        whole[pair.unit[(pair.count != self.places[pair.channel]) | ~pair.agree]] = False
        return torch.from_numpy(whole)

    def _at(self, place: Placement) -> tuple[Ints, Ints, Ints]:
        at = place.positions.cpu().numpy()
        unit = np.repeat(np.arange(at.shape[0]), at.shape[1])
        flat = at.reshape(-1)
        return unit, self.channel[place.axis][flat], place.exponent * self.side[place.axis][flat]


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Units and channels of them: at how many places, and whether all powers are one number."""

    unit: Ints
    channel: Ints
    count: Ints
    agree: NDArray[np.bool_]

    @classmethod
    def of(cls, unit: Ints, channel: Ints, power: Ints) -> _Pairs:
        span = int(channel.max(initial=0)) + 1
        pairs, first, index, count = np.unique(
            unit * span + channel, return_index=True, return_inverse=True, return_counts=True
        )
        agree = np.ones(pairs.size, np.bool_)
        agree[index[power != power[first][index]]] = False
        return cls(pairs // span, pairs % span, count, agree)
