"""Comparison of the channels of two networks, by their weights or by activations on inputs.

A channel is a row of numbers: the weights at its place, or its activations on batches. What a
matrix does to channels it does to their second moments, so that these are all that matching needs.
"""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from weightsym.arguments import check_count
from weightsym.groups.shift_removal import remove_shifts
from weightsym.groups.symmetries import LinearGroup, Placement, Symmetries
from weightsym.groups.units import unit_rows
from weightsym.groups.validation import check_pair, check_symmetries
from weightsym.matching.activations import (
    Product,
    inputs_of,
    values_at,
    watch,
)
from weightsym.matching.ascent import LARGE
from weightsym.matching.moved import column_blocks, gram
from weightsym.networks.devices import at_least_single
from weightsym.networks.forward import structural_copy
from weightsym.params import Params, unstack

By = Literal["weights", "activations"]
_EXACT = 2**20  # numbers that are multiplied in double precision
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChannelMoments:
    """Inner products of channels on which G (first) or its inverse transpose (second) acts.

    Attributes:
        moving: of the network that moves, ``(2, spaces, size, size)``.
        goal: of the reference.
        cross: of every space of the reference with every one of the network, ``(2, spaces, spaces,
            size, size)``, or with the one in its place only, ``(2, spaces, 1, size, size)``.
    """

    moving: Tensor
    goal: Tensor
    cross: Tensor

    def __add__(self, other: ChannelMoments) -> ChannelMoments:
        """The moments of longer rows."""
        return ChannelMoments(
            self.moving + other.moving, self.goal + other.goal, self.cross + other.cross
        )

    def over(self, size: Tensor, size_of_pairs: Tensor) -> ChannelMoments:
        """The moments of smaller rows."""
        return ChannelMoments(self.moving / size, self.goal / size, self.cross / size_of_pairs)

    @property
    def shares(self) -> ChannelMoments:
        """The same for channels of a reference that are as large on both sides."""
        size = self.goal.diagonal(dim1=-2, dim2=-1).sum((1, 2)).clamp_min(1e-300)
        wide = size[:, None, None, None]
        return self.over(wide, wide[..., None])

    @property
    def paired(self) -> Tensor:
        """Products of every space with the one in its place, ``(2, spaces, size, size)``."""
        if self.cross.shape[2] == 1:
            return self.cross[:, :, 0]
        return self.cross.diagonal(dim1=1, dim2=2).movedim(-1, 1)

    def reordered(self, order: Tensor) -> ChannelMoments:
        """The moments after the spaces of the network have changed their places."""
        return ChannelMoments(self.moving[:, order], self.goal, self.cross[:, :, order])

    def mixed(self, matrices: Tensor) -> ChannelMoments:
        """The moments after the channels of the network are mixed, ``(spaces, size, size)``."""
        both = torch.stack([matrices, torch.linalg.inv(matrices).mT])
        return ChannelMoments(
            both @ self.moving @ both.mT, self.goal, self.cross @ both[:, None].mT
        )

    @classmethod
    def none(cls, group: LinearGroup, like: Tensor, pairs: bool = True) -> ChannelMoments:
        """Of rows without a number."""
        s, n = group.spaces, group.size
        zero = like.new_zeros(2, s, n, n, dtype=torch.float64)
        others = s if pairs else 1
        return cls(zero, zero, like.new_zeros(2, s, others, n, n, dtype=torch.float64))


def _moments(
    moving: Tensor, goal: Tensor, side: int, pairs: bool = True, own: bool = True
) -> ChannelMoments:
    """Of rows ``(spaces, size, numbers)``, on one side, of all pairs of spaces or in place."""
    dtype = torch.float64 if moving.numel() <= _EXACT else at_least_single(moving).dtype
    s, n = moving.shape[:2]
    zero = moving.new_zeros(s, n, n, dtype=torch.float64)
    both = [gram(rows, rows, dtype).double() if own else zero for rows in (moving, goal)]
    if pairs:
        cross = gram(goal.flatten(0, 1), moving.flatten(0, 1), dtype).double()
        cross = cross.reshape(s, n, s, n).transpose(1, 2)
    else:
        cross = gram(goal, moving, dtype).double()[:, None]
    parts = []
    for moment in (*both, cross):
        whole = moment.new_zeros(2, *moment.shape)
        whole[side] = moment
        parts.append(whole)
    return ChannelMoments(*parts)


def weight_moments(
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sym: Symmetries,
    group: LinearGroup,
    places: Sequence[Placement],
    pairs: bool = True,
) -> ChannelMoments:
    """Moments of the weights at some places of a group, of all pairs of spaces or in place.

    Rotations in place need no moments of one network alone.
    """
    total = ChannelMoments.none(group, next(iter(reference.values())), pairs)
    for placement in places:
        w = params[sym.axes[placement.axis].tensor]
        moving, goal = unit_rows({}, sym, placement, w), unit_rows(reference, sym, placement)
        side, own = int(placement.exponent == -1), pairs or group.rescales
        total = total + _moments(moving, goal, side, pairs, own)
    return total


# ------------------------------------------------------------ activations
def activation_moments(
    network: nn.Module, params: Params, reference: Params, sym: Symmetries, inputs: Sequence[Any]
) -> tuple[list[ChannelMoments], list[ChannelMoments]]:
    """Moments of the activations of the channels of all groups, where linear maps show them.

    Every layer counts the same, however large its activations are.

    Args:
        network: gives the computation, in evaluation mode.
        params: one network.
        reference: the other.
        sym: what `discover` returned.
        inputs: one batch each.

    Returns:
        Those by which matrices are found, at places of `_telling`; and those of all places, by
        which heads are told apart: also by what their attention gathers.
    """
    names = {sym.axes[p.axis].tensor for g in sym.linear for p in g.placements}
    names = {n for n in names if len(sym.shapes[n]) == 2}
    every, sides = dict[tuple[int, int], ChannelMoments](), dict[tuple[int, int], int]()
    for x in inputs:
        both = [watch(network, p, x, names) for p in (params, reference)]
        for k, group in enumerate(sym.linear):
            for number, (moving, goal, side) in _shown(sym, group, *both).items():
                measured, sides[k, number] = _moments(moving, goal, side), side
                every[k, number] = every[k, number] + measured if (k, number) in every else measured
    if not all(bool((m.moving + m.goal).isfinite().all()) for m in every.values()):
        raise ValueError("`batches` lead to activations that are not finite.")
    like = next(iter(params.values()))
    totals = [[ChannelMoments.none(g, like) for g in sym.linear] for _ in range(2)]
    for chosen, total in zip((_telling(sym, sides), every), totals, strict=True):
        for key in chosen:
            size = every[key].goal.diagonal(dim1=-2, dim2=-1).sum().clamp_min(1e-300)
            total[key[0]] = total[key[0]] + every[key].over(size, size)
    return totals[0], totals[1]


def _shown(
    sym: Symmetries,
    group: LinearGroup,
    moving: Mapping[str, Sequence[Product]],
    goal: Mapping[str, Sequence[Product]],
) -> dict[int, tuple[Tensor, Tensor, int]]:
    """By place, the channels of both networks ``(spaces, size, numbers)``, and on which side."""
    result, sources = {}, set[tuple[tuple[int, int], ...]]()
    for number, placement in enumerate(group.placements):
        axis = sym.axes[placement.axis]
        pair = values_at(sym, placement, moving), values_at(sym, placement, goal)
        source = tuple(p.origin for p in moving.get(axis.tensor, ()))
        if pair[0] is None or pair[1] is None or (axis.dim == 1 and source in sources):
            continue
        if axis.dim == 1:  # queries, keys and values read the same
            sources.add(source)
        rows = [r.double().flatten(2) for r in pair if r is not None]
        if _floats(sym, group):
            rows = [r - r.mean(-1, keepdim=True) for r in rows]
        side = int((placement.exponent == -1) != (axis.dim == 1))
        result[number] = rows[0], rows[1], side
    return result


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
    measured = {kinds[key] for key in best}
    return [key for key in sides if key in best or kinds[key] not in measured]


def _floats(sym: Symmetries, group: LinearGroup) -> bool:
    """True if biases of the channels are free: only differences of activations mean something.

    Not where one tensor takes back what another gives, as in a sum of two tables.
    """
    mixed = {sym.axes[p.axis].tensor for p in group.placements}
    free = [
        [p.exponent for p in shift.placements if sym.axes[p.axis].tensor in mixed]
        for shift in sym.shifts
    ]
    return any(sum(exponents) != 0 for exponents in free)


# ------------------------------------------------------------ both
Seen = list[ChannelMoments] | None


@dataclass(frozen=True, eq=False)
class ChannelView:
    """A way of comparing the channels of two networks: by weights, or by activations on inputs."""

    sym: Symmetries
    network: nn.Module | None = None
    inputs: list[Any] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    turned: frozenset[int] = frozenset()

    @cached_property
    def streams(self) -> list[int]:
        """Groups of rotations, which are turned before all others are matched."""
        groups = enumerate(self.sym.linear)
        return [k for k, g in groups if not g.rescales and k not in self.turned]

    @cached_property
    def rest(self) -> list[int]:
        """All groups but those of streams."""
        return [k for k, g in enumerate(self.sym.linear) if g.rescales]

    @cached_property
    def anchored(self) -> list[list[Placement]]:
        """By group, the places whose weights have nothing on their other side that may move."""
        sym, result = self.sym, []
        reached = {(sym.axes[a].tensor, a) for a in sym.placements_by_axis("permutations")}
        reached |= {(sym.axes[p.axis].tensor, p.axis) for g in sym.linear for p in g.placements}
        for places in (g.placements for g in sym.linear):
            alone = [
                p
                for p in places
                if not any(t == sym.axes[p.axis].tensor and a != p.axis for t, a in reached)
            ]
            result.append(alone or list(places))
        return result

    @cached_property
    def is_large(self) -> bool:
        """True if there is no room for all weights in double precision."""
        return sum(self.sym.shapes[n].numel() for n in self.sym.compared) > LARGE

    def standing(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A network in double precision (biases of a large one), of all that shifts make equal.

        What shifts move for nothing would count as distance: two tables that are summed differ in
        the offset that they share, biases of keys in everything.
        """
        if not self.is_large:
            double = {n: params[n].double() for n in self.sym.compared}
            return remove_shifts({**params, **double}, self.sym)
        shifts, axes = self.sym.shifts, self.sym.axes
        readers = [reader for group in shifts for reader in group.readers]
        changed = {r.bias for r in readers}.union(*map(self.sym.moved_by, shifts))
        weights = {axes[r.channels.axis].tensor for r in readers}
        some = {n: params[n] for n in sorted(changed | weights)}
        some |= {n: t.double() for n, t in some.items() if n in changed and t.numel() <= _EXACT}
        removed = remove_shifts(some, self.sym)
        return ChainMap({n: removed[n] for n in changed}, cast("dict[str, Tensor]", params))

    def activations(
        self, params: Mapping[str, Tensor], reference: Mapping[str, Tensor]
    ) -> tuple[Seen, Seen]:
        """Moments of all groups, if activations are what counts: for matrices, and for heads."""
        if self.network is None:
            return None, None
        moving = {n: t.to(reference[n].dtype) if n in reference else t for n, t in params.items()}
        telling, every = activation_moments(
            self.network, moving, dict(reference), self.sym, self.inputs
        )
        for group, moments in zip(self.sym.linear, telling, strict=True):
            if not bool((moments.goal != 0).any()) and group.name not in self.warned:
                self.warned.add(group.name)
                _log.warning(
                    "No linear map shows the channels of %s: weights are compared.", group.name
                )
        return telling, every

    def moments(
        self,
        k: int,
        params: Mapping[str, Tensor],
        reference: Mapping[str, Tensor],
        observed: Sequence[ChannelMoments] | None,
        first: bool = False,
        pairs: bool = False,
    ) -> ChannelMoments:
        """Moments of one group: what was observed of it, and weights where nothing was.

        Those of weights are of the spaces in their places, unless all pairs are asked for.
        """
        group, sym = self.sym.linear[k], self.sym
        places = self.anchored[k] if first else group.placements
        if observed is None or not bool((observed[k].goal != 0).any()):
            return weight_moments(params, reference, sym, group, places, pairs)
        if not group.rescales:
            return observed[k]
        missing = [s for s in (0, 1) if not bool((observed[k].goal[s] != 0).any())]
        places = [p for p in group.placements if int(p.exponent == -1) in missing]
        return observed[k] + weight_moments(params, reference, sym, group, places)


def view_of(
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sym: Symmetries,
    model: nn.Module | None,
    batches: Iterable[Any] | None,
    by: By,
    sweeps: int,
) -> tuple[ChannelView, Sequence[Mapping[str, Tensor]], bool]:
    """Check arguments, and return the comparison, all members, and True for a stack."""
    if by not in get_args(By):
        raise ValueError(f"`by` must be one of {', '.join(get_args(By))}, got {by!r}.")
    check_count("sweeps", sweeps)
    check_symmetries(sym)
    stacked = check_pair(params, reference, sym, sym.compared)
    network, inputs = None, list[Any]()
    if by == "activations":
        if model is None or batches is None:
            raise ValueError('`by="activations"` needs `model` and `batches`.')
        network, inputs = structural_copy(model).eval(), list(inputs_of(batches))
    return (
        ChannelView(sym, network, inputs),
        unstack(dict(params)) if stacked else [params],
        stacked,
    )


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Euclidean distance of one network, or of every member of a stack, from another network.

    Args:
        a: one network or a stack.
        b: one network.
        names: of the tensors that count.
    """
    total = torch.zeros((), dtype=torch.float64)
    for name in names:
        goal, moving = b[name], a[name]
        rows, goal = moving.reshape(*moving.shape[: moving.ndim - goal.ndim], -1), goal.flatten()
        for some in column_blocks(len(goal), rows[..., :1].numel()):
            x, y = (at_least_single(w[..., some]) for w in (rows, goal.to(rows.device)))
            norm = torch.linalg.vector_norm(x - y, dim=-1).double()
            total = total + norm.square().cpu()
    return total.sqrt()
