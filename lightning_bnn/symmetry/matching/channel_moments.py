"""Second moments of the channels of spaces: of two networks, and of one with the other.

A channel is a row of numbers: the weights at its place, or its activations on batches. What a
matrix does to channels it does to their moments, so that these are all that matching needs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params
from lightning_bnn.symmetry.groups import LinearGroup, Placement, Symmetries
from lightning_bnn.symmetry.matching.watching import Product, watch
from lightning_bnn.symmetry.spaces import rows_at

__all__ = ["Moments", "activation_moments", "unseen_groups", "weight_moments"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moments:
    """Inner products of channels; the first dimension says what acts on them: G or its inverse.

    Attributes:
        own: of the network that moves, ``(2, spaces, size, size)``.
        goal: of the reference.
        cross: of every space of the reference with every one of the network, ``(2, spaces, spaces,
            size, size)``.
    """

    own: Tensor
    goal: Tensor
    cross: Tensor

    def __add__(self, other: Moments) -> Moments:
        """The moments of longer rows."""
        return Moments(self.own + other.own, self.goal + other.goal, self.cross + other.cross)

    @property
    def shares(self) -> Moments:
        """The same for channels of a reference that are as large on both sides."""
        size = self.goal.diagonal(dim1=-2, dim2=-1).sum((1, 2)).clamp_min(1e-300)
        wide = size[:, None, None, None]
        return Moments(self.own / wide, self.goal / wide, self.cross / wide[..., None])

    @property
    def paired(self) -> Tensor:
        """Products of every space with the one in its place, ``(2, spaces, size, size)``."""
        return self.cross.diagonal(dim1=1, dim2=2).movedim(-1, 1)

    def reordered(self, order: Tensor) -> Moments:
        """The moments after the spaces of the network have changed their places."""
        return Moments(self.own[:, order], self.goal, self.cross[:, :, order])

    def mixed(self, matrices: Tensor) -> Moments:
        """The moments after the channels of the network are mixed, ``(spaces, size, size)``."""
        both = torch.stack([matrices, torch.linalg.inv(matrices).mT])
        return Moments(both @ self.own @ both.mT, self.goal, self.cross @ both[:, None].mT)

    @classmethod
    def none(cls, group: LinearGroup, like: Tensor) -> Moments:
        """Of rows without a number."""
        s, n = group.spaces, group.size
        zero = like.new_zeros(2, s, n, n, dtype=torch.float64)
        return cls(zero, zero, like.new_zeros(2, s, s, n, n, dtype=torch.float64))


def _moments(own: Tensor, goal: Tensor, side: int, scale: float = 1.0) -> Moments:
    """Of rows ``(spaces, size, numbers)``, on one side."""
    both = [own @ own.mT, goal @ goal.mT]
    s, n = own.shape[:2]
    cross = (goal.flatten(0, 1) @ own.flatten(0, 1).mT).reshape(s, n, s, n).transpose(1, 2)
    parts = []
    for part in (*both, cross):
        whole = part.new_zeros(2, *part.shape)
        whole[side] = part * scale
        parts.append(whole)
    return Moments(*parts)


# ------------------------------------------------------------ weights
def weight_moments(
    params: Params,
    reference: Params,
    sym: Symmetries,
    group: LinearGroup,
    places: Sequence[Placement],
) -> Moments:
    """Moments of the weights at some places of a group."""
    total = Moments.none(group, next(iter(params.values())))
    for place in places:
        name = sym.axes[place.axis].tensor
        own, goal = (rows_at(p[name].double()[None], sym, place)[0] for p in (params, reference))
        total = total + _moments(own, goal, int(place.exponent == -1))
    return total


# ------------------------------------------------------------ activations
def activation_moments(
    network: nn.Module,
    params: Params,
    reference: Params,
    sym: Symmetries,
    inputs: Sequence[Any],
) -> tuple[list[Moments], list[Moments]]:
    """Moments of the activations of the channels of all groups, where linear maps show them.

    Every layer counts the same, however large its activations are.

    Args:
        network: gives the computation, in evaluation mode.
        params: one network.
        reference: the other.
        sym: what `discover` returned.
        inputs: one batch each.

    Returns:
        What matrices are found by, at places of `_telling`; and the same of all places, by which
        heads are told apart: also by what their attention gathers.
    """
    names = {sym.axes[p.axis].tensor for g in sym.linear for p in g.placements}
    names = {n for n in names if len(sym.shapes[n]) == 2}
    per_place: dict[tuple[int, int], Moments] = {}
    sides: dict[tuple[int, int], int] = {}
    for x in inputs:
        own, goal = (watch(network, p, x, names) for p in (params, reference))
        for key, rows in _rows(sym, own, goal).items():
            found, sides[key] = _moments(*rows), rows[2]
            per_place[key] = per_place[key] + found if key in per_place else found
    like = next(iter(params.values()))
    if not all(
        bool(m.own.isfinite().all() and m.goal.isfinite().all()) for m in per_place.values()
    ):
        raise ValueError("`batches` lead to activations that are not finite.")
    telling = {key: per_place[key] for key in _telling(sym, sides)}
    return _summed(sym, telling, like), _summed(sym, per_place, like)


def _summed(
    sym: Symmetries, per_place: dict[tuple[int, int], Moments], like: Tensor
) -> list[Moments]:
    totals = [Moments.none(g, like) for g in sym.linear]
    for (k, _), found in per_place.items():
        size = found.goal.diagonal(dim1=-2, dim2=-1).sum().clamp_min(1e-300)
        totals[k] = totals[k] + Moments(found.own / size, found.goal / size, found.cross / size)
    return totals


def unseen_groups(sym: Symmetries, moments: Sequence[Moments]) -> list[str]:
    """The names of groups no channel of which was seen."""
    pairs = zip(sym.linear, moments, strict=True)
    return [g.name for g, m in pairs if not bool((m.goal != 0).any())]


Rows = tuple[Tensor, Tensor, int]


def _rows(
    sym: Symmetries, own: dict[str, list[Product]], goal: dict[str, list[Product]]
) -> dict[tuple[int, int], Rows]:
    """By group and place, the activations of both networks and the side on which they are."""
    found: dict[tuple[int, int], Rows] = {}
    for k, group in enumerate(sym.linear):
        floating = _floats(sym, group)
        seen = set[tuple[int, ...]]()
        for number, place in enumerate(group.placements):
            axis = sym.axes[place.axis]
            pairs = zip(own.get(axis.tensor, []), goal.get(axis.tensor, []), strict=True)
            parts = [(_channels(sym, place, a), _channels(sym, place, b)) for a, b in pairs]
            parts = [(a, b) for a, b in parts if a is not None and b is not None]
            if not parts:
                continue
            if axis.dim == 1:  # queries, keys and values read the same
                read = tuple(p.inputs.data_ptr() for p in own[axis.tensor])
                if read in seen:
                    continue
                seen.add(read)
            rows = [torch.cat(side, -1) for side in zip(*parts, strict=True)]
            if floating:
                rows = [r - r.mean(-1, keepdim=True) for r in rows]
            side = int((place.exponent == -1) != (axis.dim == 1))
            found[k, number] = rows[0], rows[1], side
    return found


def _telling(sym: Symmetries, sides: dict[tuple[int, int], int]) -> list[tuple[int, int]]:
    """Places that are compared: readers of streams, and writers of other spaces, where seen.

    What one layer adds to a stream says less than what the next one finds there, and what attention
    has gathered from elsewhere depends on where it looks, which no matrix inside of a head changes.
    """
    kinds = {
        key: (key[0], side if sym.linear[key[0]].rescales else 0) for key, side in sides.items()
    }
    best = {
        (k, number)
        for k, number in sides
        if (sym.axes[sym.linear[k].placements[number].axis].dim == 1) != sym.linear[k].rescales
    }
    seen = {kinds[key] for key in best}
    return [key for key in sides if key in best or kinds[key] not in seen]


def _channels(sym: Symmetries, place: Placement, product: Product) -> Tensor | None:
    """Activations of the channels of a place, ``(spaces, size, vectors)``, if they are there."""
    axis = sym.axes[place.axis]
    positions = place.positions.to(product.inputs.device)
    if axis.dim == 1:
        values, at = product.inputs, positions % axis.size
    else:
        values, at = product.outputs, positions - product.rows.start
        if bool((at < 0).any()) or int(at.max()) >= values.shape[1]:
            return None
    return values.double()[:, at].movedim(0, -1).flatten(2)


def _floats(sym: Symmetries, group: LinearGroup) -> bool:
    """Whether biases of the channels are free: only differences of activations mean something.

    Not where one tensor takes back what another gives, as in a sum of two tables.
    """
    mixed = {sym.axes[p.axis].tensor for p in group.placements}
    given = [
        [p.exponent for p in shift.placements if sym.axes[p.axis].tensor in mixed]
        for shift in sym.shifts
    ]
    return any(sum(exponents) != 0 for exponents in given)
