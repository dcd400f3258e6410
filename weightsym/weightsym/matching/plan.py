"""The groups of a network as matching needs them: families, what they see, tables of all units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from weightsym.forms.sorting import crossing_groups
from weightsym.groups.elements import identity
from weightsym.groups.symmetries import Axis, Placement, Symmetries
from weightsym.groups.units import other_axes


@dataclass(frozen=True, eq=False)
class ProductTable:
    """One order of units, and the places where it acts.

    Blocks have one for their order and one, over all their channels, for every class inside.
    """

    units: int
    places: tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class Family:
    """A group that is matched at once: channels, or blocks together with the channels inside them.

    ``inner`` are those of the inner groups that have no place in common. The first of ``tables``
    has the places of a unit that none of them moves, every other one those of one class of them.
    """

    group: int
    inner: tuple[tuple[int, ...], ...]
    tables: tuple[ProductTable, ...]

    @property
    def members(self) -> set[int]:
        """All groups that the family changes."""
        return {self.group, *(g for row in self.inner for g in row)}


class Plan:
    """The groups of a network, and what their units see of each other."""

    def __init__(self, sym: Symmetries) -> None:
        self.axes, self.groups = sym.axes, sym.permutations
        self.sym = sym

    # -------------------------------------------------------- tensors
    @cached_property
    def compared(self) -> list[str]:
        """The tensors that count: all that permutations reach but running statistics."""
        exchanged = (n for g in self.groups for row in g.tensors for n in row)
        reached = (self.axes[a].tensor for a in self.sym.placements_by_axis("permutations"))
        return [n for n in dict.fromkeys([*reached, *exchanged]) if n in self.sym.compared]

    @cached_property
    def size(self) -> int:
        """The number of weights that count."""
        return sum(self.sym.shapes[n].numel() for n in self.compared)

    # -------------------------------------------------------- families
    @cached_property
    def families(self) -> list[Family]:
        """All groups in graph order, the inner ones also with their blocks, which come first.

        Blocks that have tensors of their own are left out: `Ascent.exchange` moves those.
        """
        every = [self._family(k) for k, group in enumerate(self.groups) if not group.tensors]
        return sorted(every, key=lambda f: (self.groups[f.group].placements[0].axis, not f.inner))

    def _family(self, group: int) -> Family:
        inner, taken = [], dict[int, list[Tensor]]()
        for row in self.groups[group].inner:
            places = [p for g in row for p in self.groups[g].placements]
            if not any(_meet(p, taken) for p in places):
                inner.append(row)
                for p in places:
                    taken.setdefault(p.axis, []).append(p.positions.reshape(-1))
        others = (_without(p, taken) for p in self.groups[group].placements)
        tables = [ProductTable(self.groups[group].units, tuple(p for p in others if p is not None))]
        for joined in map(self._joined, inner):
            tables.append(ProductTable(len(joined[0].positions), joined))
        return Family(group, tuple(inner), tuple(tables))

    def _joined(self, row: Sequence[int]) -> tuple[Placement, ...]:
        """The places of one class of channels in all blocks, one after the other."""
        every = zip(*(self.groups[g].placements for g in row), strict=True)
        return tuple(Placement(p[0].axis, torch.cat([q.positions for q in p])) for p in every)

    @cached_property
    def branches(self) -> list[int]:
        """The groups whose units have tensors of their own, such as experts that are modules."""
        return [k for k, group in enumerate(self.groups) if group.tensors]

    @cached_property
    def homes(self) -> dict[int, tuple[int, int, int]]:
        """Of every group inside a block: the group of blocks, its row there, the block."""
        return {
            member: (g, k, slot)
            for g, group in enumerate(self.groups)
            for k, row in enumerate(group.inner)
            for slot, member in enumerate(row)
        }

    def inside(self, group: int) -> list[int]:
        """The families that lie inside the units of a group, however deep."""

        def lies_inside(g: int) -> bool:
            return g in self.homes and (self.homes[g][0] == group or lies_inside(self.homes[g][0]))

        return [k for k, family in enumerate(self.families) if lies_inside(family.group)]

    @cached_property
    def mirrors(self) -> list[int | None]:
        """Of every group of channels, the sign group that flips the same units everywhere."""
        flips = {_everywhere(group.placements): k for k, group in enumerate(self.sym.signs)}
        return [
            None if group.inner or g in self.homes else flips.get(_everywhere(group.placements))
            for g, group in enumerate(self.groups)
        ]

    # -------------------------------------------------------- what units see
    @cached_property
    def across(self) -> dict[Placement, set[int]]:
        """By place of a table, the groups that move what its units are compared by."""
        by_axis = self.sym.placements_by_axis("permutations")
        groups = {axis: {g for g, _ in places} for axis, places in by_axis.items()}
        beside = {
            axis: {g for a in other_axes(self.sym, axis) for g in groups.get(a, ())}
            for axis in by_axis
        }
        crossing = crossing_groups(self.sym)
        every = dict[Placement, set[int]]()
        for family in self.families:
            parts = set().union(*(crossing[g] for g in family.members)) - family.members
            for p in (p for table in family.tables for p in table.places):
                every[p] = beside[p.axis] | (parts & groups[p.axis])
        return every

    def _axes_of(self, family: Family) -> set[int]:
        return {p.axis for g in family.members for p in self.groups[g].placements}

    @cached_property
    def _seen(self) -> list[set[int]]:
        """Of every family, the groups that move what its units are compared by."""
        return [
            {g for table in f.tables for p in table.places for g in self.across[p]}
            for f in self.families
        ]

    @cached_property
    def sees_itself(self) -> list[bool]:
        """Of every family, whether it acts on both sides of some tensor."""
        return [bool(s & f.members) for s, f in zip(self._seen, self.families, strict=True)]

    @cached_property
    def neighbours(self) -> list[list[int]]:
        """Of every family, those that it moves what their units are compared by."""
        return [
            [j for j, members in enumerate(self._seen) if j != k and members & family.members]
            for k, family in enumerate(self.families)
        ]

    @cached_property
    def within(self) -> list[list[int]]:
        """Of every family, those inside of it that see nothing else than it does."""
        return [
            [j for j, g in enumerate(self.families) if g.members < f.members and self._seen[j] <= s]
            for f, s in ((f, s - f.members) for f, s in zip(self.families, self._seen, strict=True))
        ]

    @cached_property
    def couples(self) -> bool:
        """True if one assignment per family is not the whole answer."""
        return any(self.neighbours) or any(self.sees_itself)

    @cached_property
    def moved(self) -> list[list[str]]:
        """The tensors on which every family acts."""
        every = ([self.axes[a].tensor for a in self._axes_of(f)] for f in self.families)
        return [list(dict.fromkeys(names)) for names in every]

    @cached_property
    def names(self) -> list[list[str]]:
        """Those of them that count."""
        return [[n for n in self.compared if n in set(names)] for names in self.moved]

    @cached_property
    def views(self) -> list[list[list[Placement]]]:
        """Of every family, the places by which its tables are assigned.

        Only tensors that count are seen, and not where what lies across moves as well.
        """
        return [self._views_of(family) for family in self.families]

    def _views_of(self, family: Family) -> list[list[Placement]]:
        moving = family.members if family.inner else set[int]()

        def counts(placement: Placement) -> bool:
            is_compared = self.axes[placement.axis].tensor in self.compared
            return is_compared and not self.across[placement] & moving

        return [[p for p in table.places if counts(p)] for table in family.tables]

    @cached_property
    def places_of(self) -> list[list[tuple[Placement, Axis]]]:
        """Of every family, all places of its units, with their axes."""
        every = (self.groups[f.group].placements for f in self.families)
        return [[(p, self.axes[p.axis]) for p in places] for places in every]

    @cached_property
    def views_at(self) -> dict[str, list[Placement]]:
        """By tensor, the places by which units are compared there."""
        result: dict[str, list[Placement]] = {}
        for view in (v for views in self.views for of_table in views for v in of_table):
            result.setdefault(self.axes[view.axis].tensor, []).append(view)
        return result

    @cached_property
    def pairs(self) -> int:
        """The number of pairs of units in all views."""
        every = [v for views in self.views for of_family in views for v in of_family]
        return sum(len(v.positions) ** 2 for v in every)

    # -------------------------------------------------------- tables of all units
    @cached_property
    def outer(self) -> list[Family]:
        """Families that are inside no other which moves."""
        within = self.homes
        return [
            f
            for f in self.families
            if f.group not in within or self.groups[within[f.group][0]].tensors
        ]

    @cached_property
    def tables(self) -> list[ProductTable]:
        """Of all outer families, one after the other."""
        return [table for family in self.outer for table in family.tables]

    def best(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Of every member, the order of every table with the largest sum of ``values[i, p[i]]``."""
        left, result = iter([v.detach().cpu().numpy() for v in values]), list[Tensor]()
        for family in self.outer:
            tables = [next(left) for _ in family.tables]
            every = [assign_blocks(*rows) for rows in zip(*tables, strict=True)]
            orders = zip(*every, strict=True)
            result += [torch.from_numpy(np.stack(order)) for order in orders]
        return result

    def elements(self, orders: Sequence[Tensor]) -> list[Tensor]:
        """The permutations of all groups, for the orders of all tables of every member.

        A group inside of two blocks (pairs of two channels) has the order of the later family.
        """
        members, left = len(orders[0]) if orders else 1, iter(orders)
        result = [p.repeat(members, 1) for p in identity(self.sym)]
        for family in self.outer:
            for g, order in split(family, [next(left) for _ in family.tables]).items():
                result[g] = order
        return result

    @cached_property
    def places(self) -> dict[str, dict[int, list[tuple[int, Placement]]]]:
        """By tensor that counts and axis, the tables that act there, and where."""
        result: dict[str, dict[int, list[tuple[int, Placement]]]] = {}
        for k, table in enumerate(self.tables):
            for placement in table.places:
                name = self.axes[placement.axis].tensor
                if name in self.compared:
                    axes = result.setdefault(name, {})
                    axes.setdefault(placement.axis, []).append((k, placement))
        return result

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The tensors of whose axes one sees the rows in blocks, and how many blocks there are.

        Also, as one block, those of whose positions tables share some.
        """
        result = dict[str, int]()
        for name, axes in self.places.items():
            where = (torch.cat([p.positions.flatten() for _, p in e]) for e in axes.values())
            number = max(self.axes[a].blocks for a in axes)
            if number > 1 or any(len(positions.unique()) < len(positions) for positions in where):
                result[name] = number
        return result


@lru_cache(maxsize=8)
def plan_of(sym: Symmetries) -> Plan:
    """The plan of a network, made once for all pairs."""
    return Plan(sym)


def split(family: Family, orders: Sequence[Tensor]) -> dict[int, Tensor]:
    """The permutations of the groups of a family, for its orders ``(members, units)``."""
    order, *inside = orders
    result = {family.group: order}
    for row, joined in zip(family.inner, inside, strict=True):
        units = joined.shape[1] // order.shape[1]
        placement = (joined % units).reshape(*order.shape, units)
        index = order[:, :, None].expand_as(placement)
        every = torch.empty_like(placement).scatter_(1, index, placement).unbind(1)
        result |= dict(zip(row, every, strict=True))
    return result


def assign(similarity: Tensor) -> Tensor:
    """The permutation p with the largest sum of ``similarity[i, p[i]]``."""
    return torch.from_numpy(_assignment(similarity.cpu().numpy()))


def greedy(similarity: Tensor) -> Tensor:
    """A permutation with a large sum, where no partner is much better than many others.

    Each unit takes the best that is left, and of several that want the same one the closest wins.
    """
    table = similarity.cpu().clone()
    left, order = torch.arange(len(table)), torch.empty(len(table), dtype=torch.long)
    while len(left):
        best, columns = table[left].max(1)
        highest = torch.full((len(table),), -torch.inf).to(best)
        highest.scatter_reduce_(0, columns, best, "amax")
        winner = torch.zeros(len(table), dtype=torch.long).scatter_(
            0, columns[best == highest[columns]], left[best == highest[columns]]
        )
        wins = winner[columns] == left
        order[left[wins]] = columns[wins]
        table[:, columns[wins]] = -torch.inf
        left = left[~wins]
    return order


def _assignment(table: np.ndarray) -> np.ndarray:
    """The best order; where no two rows have their maxima in one column, it is theirs."""
    order = table.argmax(1)
    if np.bincount(order, minlength=len(order)).max(initial=1) == 1:
        return order
    return np.asarray(linear_sum_assignment(table, maximize=True)[1])


def assign_blocks(fixed: np.ndarray, *inside: np.ndarray) -> list[np.ndarray]:
    """Assign blocks by the best that can be had inside each pair of them.

    Args:
        fixed: similarity ``(blocks, blocks)`` of what is fixed inside a block.
        *inside: for every class of channels, their similarities over all blocks.

    Returns:
        The order of blocks, then that of all channels of every class.
    """
    if not inside:
        return [_assignment(fixed)]
    blocks, total, every = len(fixed), fixed.astype(np.float64), []
    for similarity in inside:
        units = len(similarity) // blocks
        table = similarity.reshape(blocks, units, blocks, units)
        order = np.empty((blocks, blocks, units), np.int64)
        for a, b in np.ndindex(blocks, blocks):
            order[a, b] = _assignment(table[a, :, b])
            total[a, b] += table[a, np.arange(units), b, order[a, b]].sum(dtype=np.float64)
        every.append(order + units * np.arange(blocks)[None, :, None])
    chosen = _assignment(total)
    return [chosen, *(order[np.arange(blocks), chosen].reshape(-1) for order in every)]


def _meet(placement: Placement, taken: dict[int, list[Tensor]]) -> bool:
    others = taken.get(placement.axis)
    return others is not None and bool(torch.isin(placement.positions, torch.cat(others)).any())


def _without(placement: Placement, taken: dict[int, list[Tensor]]) -> Placement | None:
    """The positions of every unit that are not taken, or None where all are."""
    if placement.axis not in taken:
        return placement
    left = ~torch.isin(placement.positions[0], torch.cat(taken[placement.axis]))
    if bool(left.all()):
        return placement
    return Placement(placement.axis, placement.positions[:, left]) if bool(left.any()) else None


def _everywhere(placements: Sequence[Placement]) -> tuple[tuple[int, int, bytes], ...]:
    """Axes and positions of units, with their number: a whole stream may be one unit."""
    return tuple(
        sorted((p.axis, len(p.positions), p.positions.numpy().tobytes()) for p in placements)
    )
