"""Soft permutations: what a network is to all groups at once when units are mixed by weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import permuted_tensor, tied
from lightning_bnn.symmetry.axis_actions import permute_axis
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.groups import Placement
from lightning_bnn.symmetry.matching.assignment import Family, assign, assign_blocks
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.mixing import along_axis, from_axis

__all__ = ["Relaxation", "Table"]


@dataclass(frozen=True, eq=False)
class Table:
    """One doubly stochastic matrix and the places where it acts.

    Blocks have one for their order and one, over all their channels, for every class inside.
    """

    units: int
    places: tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The similarity of two networks as a function of doubly stochastic matrices.

    Kernels of grouped convolutions do not count: their rows and columns move together only as long
    as blocks are whole.
    """

    plan: Plan

    @cached_property
    def families(self) -> list[Family]:
        """Groups that are inside no other which moves."""
        groups, homes = self.plan.sym.permutations, self.plan.homes
        return [
            f
            for f in self.plan.families
            if f.group not in homes or groups[homes[f.group][0]].tensors
        ]

    @cached_property
    def tables(self) -> list[Table]:
        """Of all families, one after the other."""
        return list(chain.from_iterable(map(self._tables_of, self.families)))

    def _tables_of(self, family: Family) -> list[Table]:
        group = self.plan.sym.permutations[family.group]
        if not family.inner:
            return [Table(group.units, group.placements)]
        joined = [tuple(self.plan.joined(row)) for row in family.inner]
        inside = [Table(len(places[0].positions), places) for places in joined]
        return [Table(group.units, family.rest), *inside]

    @cached_property
    def pieces(self) -> dict[str, dict[int, list[tuple[int, Placement]]]]:
        """By tensor and axis, the tables that act there, and where."""
        return {n: self.mixable[n] for n in self.plan.compared if n in self.mixable}

    @cached_property
    def mixable(self) -> dict[str, dict[int, list[tuple[int, Placement]]]]:
        """As `pieces`, with the statistics of norms."""
        found: dict[str, dict[int, list[tuple[int, Placement]]]] = {}
        for k, table in enumerate(self.tables):
            for place in table.places:
                name = self.plan.sym.axes[place.axis].tensor
                found.setdefault(name, {}).setdefault(place.axis, []).append((k, place))
        grouped = {a.tensor for a in self.plan.sym.axes if a.blocks > 1}
        return {n: axes for n, axes in found.items() if n not in grouped}

    @cached_property
    def degree(self) -> int:
        """Degree of the similarity along a line."""
        return max((len(axes) for axes in self.pieces.values()), default=1)

    # -------------------------------------------------------- values
    def barycentre(self, members: int, like: Tensor) -> list[Tensor]:
        """The matrices that prefer no permutation to another."""
        return [like.new_full((members, t.units, t.units), 1 / t.units) for t in self.tables]

    def moved(self, w: Tensor, name: str, axis: int, at: Sequence[Tensor]) -> Tensor:
        """A tensor of a stack that is mixed along one axis.

        Args:
            w: the tensor of all members.
            name: of the tensor.
            axis: along which.
            at: one matrix for every table, or one order.
        """
        pieces = self.mixable[name][axis]
        if at[0].is_floating_point():
            return self._mixed(w, axis, pieces, at)
        there = self.plan.sym.axes[axis]
        index = torch.arange(there.blocks * there.size).repeat(len(w), 1)
        for k, place in pieces:
            index[:, place.positions.reshape(-1)] = place.positions[at[k]].flatten(1)
        return permute_axis(w, there, (index if len(w) > 1 else index[0]).to(w.device), 1)

    def _mixed(
        self, w: Tensor, axis: int, pieces: list[tuple[int, Placement]], matrices: Sequence[Tensor]
    ) -> Tensor:
        rows = along_axis(w, self.plan.sym.axes[axis], 1)
        changed = rows.clone()
        for k, place in pieces:
            positions = place.positions.to(w.device)
            old = rows[..., positions].movedim(-2, 1)  # (members, units, ..., repeats)
            new = _product(matrices[k].to(old), old.flatten(2)).reshape(old.shape)
            changed[..., positions.reshape(-1)] = new.movedim(1, -2).flatten(-2)
        return from_axis(changed, w, self.plan.sym.axes[axis], 1)

    def mixed(self, params: Params, matrices: Sequence[Tensor]) -> Params:
        """A stack whose units are mixed; kernels of grouped convolutions move by whole units."""
        result, sym = dict(params), self.plan.sym
        rigid = [n for n in self.plan.tensors if n not in self.mixable]
        nearest = self.elements(self.best(matrices)) if rigid else []
        for name in rigid:
            result[name] = permuted_tensor(params, sym, name, self.plan.tensors[name], nearest)
        for name, axes in self.mixable.items():
            for axis in axes:
                result[name] = self.moved(result[name], name, axis, matrices)
        return tied(result, sym)

    def value_at(self, params: Params, reference: Params, at: Sequence[Tensor]) -> Tensor:
        """Similarity of every member, for one matrix of any kind per table, or one order."""
        value = torch.zeros(len(next(iter(params.values()))), dtype=torch.float64)
        for name, axes in self.pieces.items():
            w = params[name]
            for axis in axes:
                w = self.moved(w, name, axis, at)
            value += (w * reference[name].to(w)).flatten(1).sum(1, dtype=torch.float64).cpu()
        return value

    # -------------------------------------------------------- permutations
    def best(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Of every member, the permutation of every table that a linear similarity likes best."""
        rows = [t.detach().cpu() for t in tables]
        if not rows:
            return []
        members = [self._best_of_one([r[m] for r in rows]) for m in range(len(rows[0]))]
        return [torch.stack(orders) for orders in zip(*members, strict=True)]

    def _best_of_one(self, tables: Sequence[Tensor]) -> list[Tensor]:
        left, result = iter(tables), list[Tensor]()
        for family in self.families:
            if not family.inner:
                result.append(assign(next(left)))
                continue
            rest = next(left)
            n = len(rest)
            inside = [next(left) for _ in family.inner]
            parts = [t.reshape(n, len(t) // n, n, len(t) // n) for t in inside]
            order, orders = assign_blocks(rest, parts)
            result.append(order)
            result += [(order[:, None] * o.shape[1] + o).reshape(-1) for o in orders]
        return result

    def elements(self, orders: Sequence[Tensor]) -> list[Tensor]:
        """The permutations of all groups, for the orders of all tables of every member."""
        members = len(orders[0]) if orders else 1
        found = [self.element([o[m] for o in orders]) for m in range(members)]
        return [torch.stack(rows) for rows in zip(*found, strict=True)]

    def element(self, orders: Sequence[Tensor]) -> list[Tensor]:
        """The permutations of all groups, for the orders of all tables of one network."""
        result, left = identity(self.plan.sym), iter(orders)
        for family in self.families:
            order = next(left)
            result[family.group] = order
            for row in family.inner:
                inside = next(left).reshape(len(order), -1)
                for slot, block in enumerate(order.tolist()):
                    result[row[block]] = inside[slot] % inside.shape[1]
        return result

    def orders(self, permutations: Sequence[Tensor]) -> list[Tensor]:
        """The orders of all tables, for permutations of every member: the inverse of `elements`."""
        result = []
        for family in self.families:
            order = permutations[family.group]
            result.append(order)
            for row in family.inner:
                inside = torch.stack([permutations[g] for g in row], 1)  # (members, blocks, units)
                chosen = inside.gather(1, order[:, :, None].expand(-1, -1, inside.shape[2]))
                result.append((order[:, :, None] * inside.shape[2] + chosen).flatten(1))
        return result


_WORTH_A_LOOK = 128
"""Units from which it pays to see whether a matrix is constant or a permutation."""


def _product(matrices: Tensor, rows: Tensor) -> Tensor:
    """Matrices times rows of units: constant matrices and permutations need no multiplication."""
    if matrices.shape[1] < _WORTH_A_LOOK:
        return torch.matmul(matrices, rows)
    if bool((matrices == matrices[:, :1, :1]).all()):
        return (matrices[:, :1, :1] * rows.sum(1, keepdim=True)).expand_as(rows)
    largest, order = matrices.max(2)
    if bool((largest == 1).all()) and bool((matrices.count_nonzero(2) == 1).all()):
        return rows.gather(1, order[:, :, None].expand(-1, -1, rows.shape[2]))
    return torch.matmul(matrices, rows)
