"""What every way of matching asks about the groups of a network: who sees whom, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import reached_axes
from lightning_bnn.symmetry.axis_actions import Kind, axes_by_tensor
from lightning_bnn.symmetry.composition import homes
from lightning_bnn.symmetry.groups import Placement, Symmetries
from lightning_bnn.symmetry.matching.assignment import Family, families
from lightning_bnn.symmetry.units import other_axis, unit_rows

__all__ = ["FamilyViews", "Plan", "View"]


@dataclass(frozen=True, eq=False)
class View:
    """Where units of a group are seen: their weights at one place of one tensor.

    Attributes:
        key: its number among all views of a plan.
        place: of the units.
        tensor: that has them.
        dim: of the tensor, if its units are all that lies along it, in their order.
        across: the groups on the other side of the tensor.
        sym: of the network.
    """

    key: int
    place: Placement
    tensor: str
    dim: int | None
    across: frozenset[int]
    sym: Symmetries

    def rows(self, w: Tensor) -> Tensor:
        """The weights of every unit in the tensor of a stack: ``(members, units, features)``."""
        if self.dim is None:
            return unit_rows({}, self.sym, self.place, w)
        w = w.movedim(self.dim + 1, 1)
        return w.reshape(*w.shape[:2], -1)


@dataclass(frozen=True, eq=False)
class FamilyViews:
    """What a family is assigned by: its own places, and those of every class inside blocks."""

    own: list[View]
    inside: list[list[View]]


@dataclass(frozen=True, eq=False)
class Plan:
    """The groups of a network as matching needs them; made once, used for every pair."""

    sym: Symmetries

    @cached_property
    def families(self) -> list[Family]:
        """Groups that are reassigned at once."""
        return families(self.sym)

    @cached_property
    def tensors(self) -> dict[str, list[int]]:
        """The axes of every tensor that a permutation reaches."""
        return axes_by_tensor(self.sym, "permutations")

    @cached_property
    def compared(self) -> list[str]:
        """The tensors that count: all that permutations reach but running statistics."""
        statistics = {a.tensor for a in self.sym.axes if a.role in ("mean", "variance")}
        return [n for n in dict.fromkeys([*self.tensors, *self.exchanged]) if n not in statistics]

    @cached_property
    def exchanged(self) -> dict[str, None]:
        """The tensors that belong to units of a group, and may change places."""
        return dict.fromkeys(n for g in self.sym.permutations for row in g.tensors for n in row)

    @cached_property
    def branches(self) -> list[int]:
        """The groups whose units have tensors of their own, such as experts that are modules."""
        return [k for k, group in enumerate(self.sym.permutations) if group.tensors]

    def families_inside(self, group: int) -> list[int]:
        """The families that lie inside the units of a group, however deep."""

        def lies_inside(g: int) -> bool:
            return g in self.homes and (self.homes[g][0] == group or lies_inside(self.homes[g][0]))

        return [k for k, family in enumerate(self.families) if lies_inside(family.group)]

    @cached_property
    def across(self) -> dict[int, set[int]]:
        """By axis, the groups on the other side of its tensor."""
        places_by_axis = self.sym.placements_by_axis("permutations")
        groups_on: dict[int | None, set[int]] = {
            axis: {g for g, _ in places} for axis, places in places_by_axis.items()
        }
        return {a: groups_on.get(other_axis(self.sym, a), set()) for a in places_by_axis}

    @cached_property
    def homes(self) -> dict[int, tuple[int, int, int]]:
        """Of every group inside a block: the group of blocks, its row there, the block."""
        return homes(self.sym)

    @cached_property
    def neighbours(self) -> list[set[int]]:
        """Of every family, those that see it on the other side of a tensor."""
        family_of: dict[int, set[int]] = {}
        for k, family in enumerate(self.families):
            for g in family.members:
                family_of.setdefault(g, set()).add(k)
        result: list[set[int]] = [set() for _ in self.families]
        for k, family in enumerate(self.families):
            for axis in self.axes_of(family):
                for g in self.across[axis]:
                    for other in family_of.get(g, set()) - {k}:
                        result[other].add(k)
        return result

    @cached_property
    def mirrors(self) -> list[int | None]:
        """Of every group of channels, the sign group that flips the same units everywhere."""
        flips = {_everywhere(group.placements): k for k, group in enumerate(self.sym.signs)}
        return [
            None if group.inner or g in self.homes else flips.get(_everywhere(group.placements))
            for g, group in enumerate(self.sym.permutations)
        ]

    @cached_property
    def flipped(self) -> dict[str, dict[int, list[Kind]]]:
        """The axes of every tensor that flips of units reach."""
        return reached_axes(self.sym, ("signs",))

    def sees_itself(self, family: Family) -> bool:
        """Whether a family acts on both sides of some tensor."""
        inside = set(family.members)
        return any(self.across[axis] & inside for axis in self.axes_of(family))

    @cached_property
    def couples(self) -> bool:
        """Whether one assignment per family is not the whole answer."""
        return any(self.neighbours) or any(map(self.sees_itself, self.families))

    def axes_of(self, family: Family) -> set[int]:
        """All axes on which some group of a family acts."""
        return {p.axis for g in family.members for p in self.sym.permutations[g].placements}

    # -------------------------------------------------------- views
    @cached_property
    def views(self) -> list[FamilyViews]:
        """Of every family, the places of tensors that count; inside blocks, seen from outside."""
        return [self._views_of(family) for family in self.families]

    @cached_property
    def pairs(self) -> int:
        """How many pairs of units all views of all families have."""
        every = [v for f in self.views for v in chain(f.own, *f.inside)]
        return sum(len(v.place.positions) ** 2 for v in every)

    @cached_property
    def names_of(self) -> list[list[str]]:
        """The tensors on which every family acts."""
        axes = self.sym.axes
        return [sorted({axes[a].tensor for a in self.axes_of(f)}) for f in self.families]

    @cached_property
    def _keys(self) -> dict[tuple[int, bytes], View]:
        return {}

    @cached_property
    def _keys_of(self) -> dict[str, set[int]]:
        return {}

    def keys_of(self, tensor: str) -> set[int]:
        """The keys of all views of one tensor."""
        return self._keys_of.get(tensor, set())

    def view(self, place: Placement) -> View:
        """One place as a view, the same one whenever it is asked for."""
        name = (place.axis, place.positions.numpy().tobytes())
        if name not in self._keys:
            axis, positions = self.sym.axes[place.axis], place.positions
            plain = axis.dim is not None and axis.blocks == 1 and positions.shape == (axis.size, 1)
            plain = plain and bool((positions[:, 0] == torch.arange(axis.size)).all())
            across, key = frozenset(self.across[place.axis]), len(self._keys)
            dim = axis.dim if plain else None
            self._keys[name] = View(key, place, axis.tensor, dim, across, self.sym)
            self._keys_of.setdefault(axis.tensor, set()).add(key)
        return self._keys[name]

    def _views_of(self, family: Family) -> FamilyViews:
        group = self.sym.permutations[family.group]
        if not family.inner:
            return FamilyViews(self._seen(group.placements, set()), [])
        inside = set(family.members)
        rows = [self._seen(self.joined(row), inside) for row in family.inner]
        return FamilyViews(self._seen(family.rest, inside), rows)

    def _seen(self, places: Sequence[Placement], inside: set[int]) -> list[View]:
        """Places in tensors that count, but those whose other side moves as well."""
        return [
            self.view(p)
            for p in places
            if self.sym.axes[p.axis].tensor in self.compared and not self.across[p.axis] & inside
        ]

    def joined(self, row: Sequence[int]) -> list[Placement]:
        """The places of one class of channels in all blocks, one after the other."""
        first = self.sym.permutations[row[0]].placements
        every = [
            [self.sym.permutations[g].placements[k].positions for g in row]
            for k in range(len(first))
        ]
        return [Placement(p.axis, torch.cat(e)) for p, e in zip(first, every, strict=True)]

    def similarity(self, moved: Params, reference: Params) -> Tensor:
        """Inner product with the reference, of one network or of every member of a stack."""
        total = torch.zeros((), dtype=torch.float64)
        for name in self.compared:
            dims = list(range(-reference[name].ndim, 0))
            product = moved[name].double() * reference[name].double()
            total = total + (product.sum(dims) if dims else product).cpu()
        return total

    def bound(self, params: Params, reference: Params) -> Tensor:
        """What no rearrangement exceeds: entries sorted, of tensors that change places together."""
        together: dict[str, list[str]] = {}
        for name in self.compared:
            key = min(self.sym.exchangeable_tensors.get(name, {name}))
            together.setdefault(key, []).append(name)
        total = torch.zeros((), dtype=torch.float64)
        for names in together.values():
            own = [params[n].reshape(*_lead(params, reference, n), -1) for n in names]
            goal = _sorted(torch.cat([reference[n].flatten() for n in names]))
            total = total + (_sorted(torch.cat(own, -1)).double() * goal.double()).sum(-1).cpu()
        return total


def _sorted(w: Tensor) -> Tensor:
    """Sorted along the last dimension; on the CPU numpy takes a third of the time."""
    w = w if w.dtype == torch.float64 else w.float()
    if w.device.type != "cpu":
        return w.sort(-1).values
    return torch.from_numpy(np.sort(w.detach().numpy(), -1))


def _lead(params: Params, reference: Params, name: str) -> tuple[int, ...]:
    return tuple(params[name].shape[: params[name].ndim - reference[name].ndim])


def _everywhere(placements: Sequence[Placement]) -> tuple[tuple[int, int, bytes], ...]:
    """Axes and positions of units, with their number: a whole stream may be one unit."""
    return tuple(
        sorted((p.axis, len(p.positions), p.positions.numpy().tobytes()) for p in placements)
    )
