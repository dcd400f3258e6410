"""Coordinate ascent: one group after the other takes the assignment that suits the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from weightsym.groups.actions import (
    Element,
    Kind,
    multiplied_tensor,
    multiply,
    permute_some,
    permuted_tensor,
    reorder_units,
)
from weightsym.groups.elements import compose, identity, standing_at
from weightsym.groups.symmetries import Placement
from weightsym.groups.units import unit_rows
from weightsym.matching.plan import Plan, assign, assign_blocks, split
from weightsym.params import Params, stack_size

_ROUNDING = 1e-13  # of the similarity, in double precision
SMALL = 2**15  # weights that cost no more in double precision
_GAIN = 1e-7  # of the similarity, by exchanging branches; less is rounding


class Ascent:
    """Networks of a stack in the order of their units now, on their way to a reference.

    Products of units are computed for all members at once, and kept until another order or sign
    changes their tensor; assignments are solved one by one, where a neighbour has changed.

    Args:
        plan: of the groups.
        params: a stack.
        reference: one network, or one for every member.
        signs: flips that come before the permutations, if units may be flipped.
        exact: compute in double precision, as small networks always do: what exchanging units gains
            is quadratic in their difference.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        reference: Params,
        signs: Element | None = None,
        exact: bool = False,
    ) -> None:
        self.plan, self.sym, self.params = plan, plan.sym, {n: params[n] for n in plan.compared}
        self.signs = None if signs is None else list(signs)
        self.exact, self.settled = exact or plan.size <= SMALL, True
        self.members = stack_size(params)
        self._unmoved = [p.expand(self.members, -1) for p in identity(self.sym)]
        if self.exact and not exact:
            self.params, reference = (_doubled(w, plan.compared) for w in (params, reference))
        self.look_at(reference)
        self.stand(None)

    def look_at(self, reference: Params) -> None:
        """Compare with another network, or with one for each member of the stack."""
        self.reference = reference
        self.goals, self.products = dict[Placement, Tensor](), dict[Placement, Tensor]()

    def stand(self, permutations: Sequence[Tensor] | None) -> None:
        """Stand in some order, one permutation per group and member, or as the networks are."""
        self.permutations = list(permutations or self._unmoved)
        current = self.params
        if self.signs is not None:
            current = multiply(current, self.sym, {"signs": self.signs})
        if permutations is not None:
            current = permute_some(current, self.sym, self.permutations)
        self.current = {n: current[n] for n in self.plan.compared}
        self.products.clear()

    @property
    def element(self) -> list[Tensor]:
        """Permutations and signs of every member."""
        return [*self.permutations, *(self.signs or ())]

    # -------------------------------------------------------- how alike units are
    def _real(self, w: Tensor) -> Tensor:
        dtype = torch.float64 if self.exact or w.dtype == torch.float64 else torch.float32
        return w if w.dtype == dtype else w.to(dtype)

    def score(self, names: Sequence[str] | None = None) -> Tensor:
        """Similarity of every member as it stands now, over some tensors or all."""
        total = torch.zeros(self.members, dtype=torch.float64)
        for n in self.plan.compared if names is None else names:
            product = self._real(self.current[n]) * self._real(self.reference[n])
            total += product.reshape(self.members, -1).sum(1, dtype=torch.float64).cpu()
        return total

    def similarity(self, views: Sequence[Placement], settled: set[int] | None) -> Tensor | None:
        """Inner products of all pairs of units, over the places whose other side is known."""
        total = None
        for view in views:
            if settled is None or self.plan.across[view] <= settled:
                summand = self._product(view)
                total = summand if total is None else total + summand
        return total

    def _product(self, view: Placement) -> Tensor:
        if view not in self.products:
            if view not in self.goals:
                goal = unit_rows(self.reference, self.sym, view)
                self.goals[view] = self._real(goal)
            moving = self._real(unit_rows(self.current, self.sym, view))
            self.products[view] = (self.goals[view].to(moving) @ moving.mT).cpu()
        return self.products[view]

    # -------------------------------------------------------- climbing
    def run(
        self,
        start: Sequence[Tensor] | None,
        generator: torch.Generator,
        max_sweeps: int,
    ) -> None:
        """Ascend from permutations, or once through the network first where there are none."""
        if start is not None:
            self.stand(start)
        self.climb(generator, max_sweeps, settled=set() if start is None else None)
        self.exchange(generator, max_sweeps)

    def climb(
        self,
        generator: torch.Generator,
        max_sweeps: int,
        chosen: Sequence[int] | None = None,
        settled: set[int] | None = None,
    ) -> None:
        """Ascend by families in random order, until none has anything to gain.

        Args:
            generator: of the order of the families within a sweep, the same for all members.
            max_sweeps: sweeps at most.
            chosen: indices of the families, by default all.
            settled: the groups to compare with in a first pass, in graph order; None for no such
                pass.
        """
        families, everyone = len(self.plan.families), np.ones(self.members, bool)
        chosen = range(families) if chosen is None else chosen
        for k in chosen if settled is not None else ():
            settled = (settled or set()) | self.plan.families[k].members
            self._improve(k, everyone, settled)
        pending = np.zeros((families, self.members), bool)
        alone = not self.plan.couples and not any(f.inner for f in self.plan.families)
        pending[list(chosen)] = settled is None or not alone  # a first pass is all that they need
        allowed = pending[:, :1].copy()
        for _ in range(max_sweeps):
            for k in torch.randperm(families, generator=generator).tolist():
                if pending[k].any():
                    changed = self._improve(k, pending[k], None)
                    pending[k] = False
                    pending[self.plan.neighbours[k]] |= changed & allowed[self.plan.neighbours[k]]
            if not pending.any():
                break
        self.settled = not pending.any()

    def _improve(self, k: int, due: np.ndarray, settled: set[int] | None) -> np.ndarray:
        """Reassign one family of the members that are due, and return which of them change."""
        family, before = self.plan.families[k], None
        similarities = [self.similarity(views, settled) for views in self.plan.views[k]]
        if all(table is None for table in similarities):
            return np.zeros(self.members, bool)
        tables = [
            np.zeros((self.members, t.units, t.units)) if similarity is None else similarity.numpy()
            for similarity, t in zip(similarities, family.tables, strict=True)
        ]
        mirror = None if self.signs is None else self.plan.mirrors[family.group]
        if settled is None and self.plan.sees_itself[k]:
            before = self.element, dict(self.current), self.score(self.plan.names[k])
        better, orders, factors = self._assigned(tables, due, mirror is not None)
        if better.any():
            self._move(k, split(family, [torch.from_numpy(order) for order in orders]))
            if mirror is not None:
                self._flip(k, mirror, torch.from_numpy(factors))
            if before is not None:
                better = self._kept(k, better, *before)
        return better

    def _assigned(
        self, tables: Sequence[np.ndarray], due: np.ndarray, flips: bool
    ) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """The members that gain by the best orders of their units, the orders, and their signs."""
        rows = np.flatnonzero(due)
        values = [np.abs(t[rows]) if flips else t[rows] for t in tables]
        every = [assign_blocks(*each) for each in zip(*values, strict=True)]
        best = [np.stack(order) for order in zip(*every, strict=True)]
        gains = sum(_picked(v, o).sum(1) for v, o in zip(values, best, strict=True))
        gains -= sum(np.trace(t[rows], axis1=1, axis2=2) for t in tables)
        least = self._least(1e-6) * sum(np.abs(v.max(2)).sum(1) for v in values)
        better = np.zeros(self.members, bool)
        better[rows] = gains > least
        orders = [np.tile(np.arange(t.shape[1]), (self.members, 1)) for t in tables]
        for order, new in zip(orders, best, strict=True):
            order[better] = new[better[rows]]
        negative = better[:, None] & (_picked(tables[0], orders[0]) < 0)
        return better, orders, np.where(negative, -1.0, 1.0)

    def _least(self, coarse: float) -> float:
        """The share of the similarity that is a gain and no rounding."""
        return _ROUNDING if self.exact else coarse

    def _kept(
        self, k: int, better: np.ndarray, element: list[Tensor], current: Params, score: Tensor
    ) -> np.ndarray:
        """Go back where a family that sees itself has not gained anything."""
        now = self.score(self.plan.names[k])
        worse = torch.from_numpy(better) & ~(now > score + self._least(1e-7) * score.abs())
        if bool(worse.any()):
            count = len(self.permutations)
            parts = [where_members(worse, a, b) for a, b in zip(element, self.element, strict=True)]
            self.permutations = parts[:count]
            self.signs = None if self.signs is None else parts[count:]
            for n in self.plan.names[k]:
                self.current[n] = where_members(worse, current[n], self.current[n])
            self._forget(k)
        return better & ~worse.numpy()

    # -------------------------------------------------------- moves
    def _move(self, k: int, step: Mapping[int, Tensor]) -> None:
        """Reorder the units of a family as they stand."""
        family, names, products = self.plan.families[k], self.plan.names[k], dict(self.products)
        self._compose(step)
        self._forget(k)
        if family.inner or family.group in self.plan.homes:
            full = [step.get(g, p) for g, p in enumerate(self._unmoved)]
            for n in names:
                axes = self.plan.tensors[n]
                self.current[n] = permuted_tensor(self.current, self.sym, n, axes, full)
            return
        order, views = step[family.group], self.plan.views[k][0]
        every = [self.sym.axes[view.axis] for view in views]
        tensors = [axis.tensor for axis in every]
        for view, axis in zip(views, every, strict=True):
            w = self.current[axis.tensor]
            self.current[axis.tensor] = reorder_units(w, axis, [(view, order)])
            if view in products and tensors.count(axis.tensor) == 1:
                index = order[:, None].expand_as(products[view])
                self.products[view] = products[view].gather(2, index)

    def _compose(self, step: Mapping[int, Tensor]) -> None:
        """Update the orders by a step, in which blocks are numbered as they stand."""
        before = list(self.permutations)
        for g, order in step.items():
            if g not in self.plan.homes:
                self.permutations[g] = before[g].gather(1, order)
                continue
            for m, moving in enumerate(order):
                positions = standing_at(g, [p[m] for p in before], self.sym, self.plan.homes)
                if self.permutations[positions] is before[positions]:
                    self.permutations[positions] = before[positions].clone()
                self.permutations[positions][m] = before[positions][m][moving]

    def _flip(self, k: int, mirror: int, factors: Tensor) -> None:
        """Flip units as they stand."""
        assert self.signs is not None
        orders = self.permutations[self.plan.families[k].group]
        signs = self.signs[mirror]
        self.signs[mirror] = signs.scatter(1, orders, signs.gather(1, orders) * factors.to(signs))
        step = [torch.ones(g.units) for g in self.sym.signs]
        step[mirror] = factors
        for n in self.plan.names[k]:
            axes: dict[int, list[Kind]] = self.plan.flipped[n]
            self.current[n] = multiplied_tensor(self.current[n], self.sym, axes, {"signs": step}, 1)
        self._forget(k)

    def _forget(self, k: int) -> None:
        """Drop the products of tensors on which a family acts."""
        names = self.plan.names[k]
        tensors = {v: self.sym.axes[v.axis].tensor for v in self.products}
        self.products = {v: p for v, p in self.products.items() if tensors[v] not in names}

    # -------------------------------------------------------- branches
    def exchange(self, generator: torch.Generator, max_sweeps: int) -> None:
        """Give branches that have tensors of their own, such as experts, the best order.

        How alike two branches are is only known once their units are matched. With all branches
        moved on by one place, by two and so on, every pair stands face to face once, and coordinate
        ascent matches the insides of all of them at a time; an assignment then chooses among the
        pairs. One network at a time.

        Args:
            generator: of the order of the sweeps.
            max_sweeps: sweeps per climb, and rounds.
        """
        assert self.members == 1 or not self.plan.branches
        for _ in range(max_sweeps if self.plan.branches else 0):
            start = float(self.score())
            for group in self.plan.branches:
                best, before = float(self.score()), list(self.permutations)
                places = torch.arange(self.plan.groups[group].units)
                table = torch.zeros(len(places), len(places), dtype=torch.float64)
                for shift in range(len(places)):
                    order = places.roll(-shift)
                    self._face(before, group, order, generator, max_sweeps)
                    table[places, order] = self._facing(group)
                self._face(before, group, assign(table), generator, max_sweeps)
                self.climb(generator, max_sweeps)
                if not float(self.score()) > best + _GAIN * abs(best):
                    self.stand(before)
            if not float(self.score()) > start + _GAIN * abs(start):
                return

    def _face(
        self,
        before: Sequence[Tensor],
        group: int,
        order: Tensor,
        generator: torch.Generator,
        max_sweeps: int,
    ) -> None:
        """Reorder branches as they stood, and match the units inside of those that meet.

        Where they have none of their own, as two layers whose units are compared, match all units.
        """
        step = identity(self.sym)
        step[group] = order
        self.stand(compose(before, step, self.sym))
        inside = self.plan.inside(group) or range(len(self.plan.families))
        moving = {g for k in inside for g in self.plan.families[k].members}
        settled = set(range(len(self.plan.groups))) - moving
        self.climb(generator, max_sweeps, inside, settled)

    def _facing(self, group: int) -> Tensor:
        """Similarity of every branch with what stands in its place, with its rows in a router."""
        branches, compared = self.plan.groups[group], self.plan.compared
        moving = {n: t[0].double() for n, t in self.current.items()}
        goal = {n: self.reference[n].reshape(t.shape) for n, t in moving.items()}
        total = torch.zeros(branches.units, dtype=torch.float64)
        for row in branches.tensors:
            if row[0] in compared:
                total += torch.stack([(goal[n].double() * moving[n]).sum().cpu() for n in row])
        for placement in branches.placements:
            if self.sym.axes[placement.axis].tensor in compared:
                a, b = (unit_rows(w, self.sym, placement).double() for w in (goal, moving))
                total += (a * b).sum(-1).cpu()
        return total


def _doubled(params: Params, names: Sequence[str]) -> Params:
    return {n: params[n].double() for n in names}


def where_members(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Members of one stacked tensor or another, or all of one where the mask is a single number."""
    wide = mask.reshape([*mask.shape, *[1] * (a.ndim - mask.ndim)])
    return torch.where(wide.to(a.device), a, b)


def _picked(tables: np.ndarray, orders: np.ndarray) -> np.ndarray:
    starts = np.arange(0, tables.size, tables.shape[2]).reshape(orders.shape)
    return tables.reshape(-1)[starts + orders]
