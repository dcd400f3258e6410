"""What permutations are to spaces: which move whole spaces, and which matrices contain already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_bnn.symmetry.axis_actions import axis_permutation
from lightning_bnn.symmetry.groups import LinearGroup, PermutationGroup, Symmetries
from lightning_bnn.symmetry.linear_groups import LinearKind

__all__ = ["Blocks", "SpaceMap", "isometric", "without_groups"]

_ORDERED = ("general", "orthogonal", "centred")


@dataclass(frozen=True, eq=False)
class Blocks:
    """A group of permutations whose units are whole spaces, such as heads.

    Attributes:
        group: its index.
        spaces: by index of a group of matrices, the spaces of every unit, ``(units, spaces)``.
    """

    group: int
    spaces: dict[int, Tensor]


@dataclass(frozen=True, eq=False)
class SpaceMap:
    """How permutations and matrices of one network go together."""

    sym: Symmetries

    @cached_property
    def blocks(self) -> list[Blocks]:
        """The groups that move whole spaces."""
        found = []
        for k, group in enumerate(self.sym.permutations):
            spaces = {j: _units(group, g) for j, g in enumerate(self.sym.linear)}
            there = {j: s for j, s in spaces.items() if s is not None}
            if there:
                found.append(Blocks(k, there))
        return found

    @cached_property
    def contained(self) -> set[int]:
        """The groups whose permutations are matrices inside of spaces."""
        inside = [g for g in self.sym.linear if g.kind in _ORDERED]
        groups = enumerate(self.sym.permutations)
        return {k for k, group in groups if any(_contains(g, group) for g in inside)}

    @cached_property
    def others(self) -> list[int]:
        """The groups that matrices do not replace: hidden units, and heads that share keys."""
        taken = self.contained | {b.group for b in self.blocks}
        return [k for k in range(len(self.sym.permutations)) if k not in taken]

    @cached_property
    def tangled(self) -> bool:
        """Whether other units lie inside of spaces: queries that share a head of keys."""
        inside = {p.axis for g in self.sym.linear for p in g.placements}
        return any(
            p.axis in inside for k in self.others for p in self.sym.permutations[k].placements
        )

    @cached_property
    def reduced(self) -> Symmetries:
        """The symmetries with these other permutations only."""
        return without_groups(self.sym, self.others)

    def orders(self, permutations: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For every group of matrices, which space comes to the place of each, and which channel.

        The first has one number for each space, the second one for each of its channels.
        """
        result = []
        for group in self.sym.linear:
            place = group.placements[0]
            index = axis_permutation(self.sym, place.axis, permutations)
            owner = torch.full((2, len(index)), -1)
            numbers = [torch.arange(n) for n in place.positions.shape]
            owner[:, place.positions] = torch.stack(torch.meshgrid(*numbers, indexing="ij")[:2])
            spaces, channels = owner[:, index[place.positions[..., 0]]]
            result.append((spaces[:, 0], channels))
        return result

    def carried(self, matrices: Sequence[Tensor], permutations: Sequence[Tensor]) -> list[Tensor]:
        r"""Matrices that do after permutations what these do before: :math:`P M P^{-1}`."""
        pairs = zip(matrices, self.orders(permutations), strict=True)
        return [
            m[..., spaces[:, None, None], channels[:, :, None], channels[:, None, :]]
            for m, (spaces, channels) in pairs
        ]


def _units(group: PermutationGroup, linear: LinearGroup) -> Tensor | None:
    """The spaces of every unit, if each unit consists of as many whole ones."""
    places = {p.axis: p.positions for p in linear.placements}
    shared = [p for p in group.placements if p.axis in places]
    for place in shared:
        spaces = places[place.axis]
        size = int(max(spaces.max(), place.positions.max())) + 1
        owner = torch.full((size,), -1)
        owner[spaces.reshape(-1)] = torch.arange(len(spaces)).repeat_interleave(spaces[0].numel())
        rows = [list(dict.fromkeys(row)) for row in owner[place.positions].tolist()]
        rows = [[s for s in row if s >= 0] for row in rows]
        every = sorted(s for row in rows for s in row)
        if every == list(range(len(spaces))) and len({len(r) for r in rows}) == 1:
            return torch.tensor(rows)
    return None


def _contains(linear: LinearGroup, group: PermutationGroup) -> bool:
    """Whether the units of a group are the channels of one space, wherever they are."""
    places: dict[int, list[Tensor]] = {}
    for p in linear.placements:
        places.setdefault(p.axis, []).append(p.positions)
    chosen: list[tuple[int, ...]] = []
    for place in group.placements:
        if place.axis not in places:
            return False
        size = int(max(place.positions.max(), *(p.max() for p in places[place.axis]))) + 1
        owner = torch.full((size, 2), -1)
        for positions in places[place.axis]:
            ranges = [torch.arange(n) for n in positions.shape]
            space, channel, _ = torch.meshgrid(*ranges, indexing="ij")
            owner[positions] = torch.stack([space, channel], -1)
        at = owner[place.positions]
        if bool((at < 0).any()) or bool((at != at[:, :1]).any()):
            return False
        if bool((at[:, 0, 0] != at[0, 0, 0]).any()):
            return False
        chosen.append((int(at[0, 0, 0]), *at[:, 0, 1].tolist()))
    return len(set(chosen)) == 1


def without_groups(sym: Symmetries, keep: Sequence[int]) -> Symmetries:
    """The symmetries with some of the permutations only; rows of blocks that lose one go."""
    index = {old: new for new, old in enumerate(keep)}
    groups = []
    for k in keep:
        group = sym.permutations[k]
        rows = [row for row in group.inner if all(g in index for g in row)]
        groups.append(replace(group, inner=tuple(tuple(index[g] for g in row) for row in rows)))
    return replace(sym, permutations=tuple(groups))


def isometric(sym: Symmetries) -> Symmetries:
    """The symmetries that keep every distance: of matrices the rotations, without their sizes."""
    kinds: dict[LinearKind, LinearKind] = {"general": "orthogonal", "complex": "unit complex"}
    linear = [replace(group, kind=kinds.get(group.kind, group.kind)) for group in sym.linear]
    return replace(sym, linear=tuple(linear))
