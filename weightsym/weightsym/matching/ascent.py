"""Coordinate ascent: one group after the other takes the assignment that suits the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from weightsym.groups.elements import compose, identity, standing_at
from weightsym.groups.symmetries import Placement
from weightsym.groups.units import unit_rows
from weightsym.matching.plan import Plan, assign, assign_blocks, split
from weightsym.matching.sketches import MANY, Sketches
from weightsym.matching.standing import Recent, Standing, gram, inner_products
from weightsym.params import Params

_ROUNDING = 1e-13  # of the similarity, in double precision
SMALL = 2**15  # weights that cost no more in double precision
LARGE = 2**24
"""Weights that are visited in the order of their layers, and in single precision only."""
_GAIN = 1e-7  # of the similarity, by exchanging branches; less is rounding
Assigned = tuple[np.ndarray, list[np.ndarray], np.ndarray]
"""The members that gain, the orders of all tables, and the signs of units."""


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
        params: Mapping[str, Tensor],
        reference: Mapping[str, Tensor],
        signs: Sequence[Tensor] | None = None,
        exact: bool = False,
    ) -> None:
        self.plan, self.sym = plan, plan.sym
        self.signs = None if signs is None else list(signs)
        self.exact, self.settled = exact or plan.size <= SMALL, True
        self.members = len(params[next(iter(plan.compared or params))])
        self._unmoved = [p.expand(self.members, -1) for p in identity(self.sym)]
        if self.exact and not exact:
            params, reference = (_doubled(w, plan.compared) for w in (params, reference))
        self.current = Standing(params, self.sym, self.signs)
        self.sure = np.zeros((len(plan.families), self.members), bool)
        self.look_at(reference)
        self.stand(None)

    def look_at(self, reference: Mapping[str, Tensor]) -> None:
        """Compare with another network, or with one for each member of the stack."""
        self.reference = reference
        self.goals, self.products = Recent[Placement](), Recent[Placement]()
        self.sketches = Sketches(self.sym, self.current, reference)

    def stand(self, permutations: Sequence[Tensor] | None) -> None:
        """Stand in some order, one permutation per group and member, or as the networks are."""
        self.permutations = list(permutations or self._unmoved)
        self.current.permutations = None if permutations is None else self.permutations
        self._forget()

    @property
    def element(self) -> list[Tensor]:
        """Permutations and signs of every member."""
        return [*self.permutations, *(self.signs or ())]

    # -------------------------------------------------------- how alike units are
    def _real(self, w: Tensor) -> torch.dtype:
        return torch.float64 if self.exact or w.dtype == torch.float64 else torch.float32

    def score(self, names: Sequence[str] | None = None) -> Tensor:
        """Similarity of every member as it stands now, over some tensors or all."""
        total = torch.zeros(self.members, dtype=torch.float64)
        for n in self.plan.compared if names is None else names:
            w = self.current[n]
            total += inner_products(w, self.reference[n], self._real(w))
        return total

    def similarity(self, views: Sequence[Placement]) -> Tensor | None:
        """Inner products of all pairs of units, over some places."""
        total = None
        for view in views:
            summand = self._product(view)
            total = summand if total is None else total + summand
        return total

    def _known(self, views: Sequence[Placement], settled: set[int] | None) -> Sequence[Placement]:
        return views if settled is None else [v for v in views if self.plan.across[v] <= settled]

    def _product(self, view: Placement) -> Tensor:
        product = self.products.get(view)
        if product is None:
            moving, goal = unit_rows(self.current, self.sym, view), self.goals.get(view)
            if goal is None:
                goal = unit_rows(self.reference, self.sym, view)
                self.goals[view] = goal
            product = gram(goal.to(moving.device), moving, self._real(moving)).cpu()
            self.products[view] = product
        return product

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
            family, known = self.plan.families[k], settled or set()
            settled = known | family.members
            if not family.members <= known:  # otherwise their blocks have just been matched
                self._improve(k, everyone, settled)
        pending = np.zeros((families, self.members), bool)
        alone = not self.plan.couples and not any(f.inner for f in self.plan.families)
        pending[list(chosen)] = settled is None or not alone  # a first pass is all that they need
        allowed = pending[:, :1].copy()
        for _ in range(max_sweeps):
            order = torch.randperm(families, generator=generator).tolist()
            for k in sorted(order) if self.plan.size > LARGE else order:
                if pending[k].any():
                    changed = self._improve(k, pending[k], None)
                    pending[k] = False
                    if self.plan.size > LARGE:
                        pending[self.plan.within[k]] = False
                    pending[self.plan.neighbours[k]] |= changed & allowed[self.plan.neighbours[k]]
            if not pending.any():
                break
        self.settled = not pending.any()

    def _improve(self, k: int, due: np.ndarray, settled: set[int] | None) -> np.ndarray:
        """Reassign one family of the members that are due, and return which of them change."""
        family, before = self.plan.families[k], None
        mirror = None if self.signs is None else self.plan.mirrors[family.group]
        views = [self._known(of_table, settled) for of_table in self.plan.views[k]]
        if not any(views):
            return np.zeros(self.members, bool)
        if settled is None and self.plan.sees_itself[k]:
            before = self.element, self.score(self.plan.names[k])
        found = None
        if self.members == len(views) == 1 and family.tables[0].units >= MANY and not self.exact:
            found = self._by_sketches(k, views[0], mirror is not None)
        better, orders, factors = found or self._by_products(k, views, due, mirror is not None)
        if better.any():
            self._move(k, split(family, [torch.from_numpy(order) for order in orders]))
            if mirror is not None:
                self._flip(k, mirror, torch.from_numpy(factors))
            if before is not None:
                better = self._kept(k, better, *before)
        return better

    def _by_sketches(self, k: int, views: Sequence[Placement], flips: bool) -> Assigned | None:
        """Orders and signs of thousands of units, unless sketches leave most of them in doubt."""
        found = self.sketches.partners(views, flips)
        if found is None:
            return None
        self.sure[k] = found.sure
        order, units = found.order[None], np.arange(len(found.order))
        factors = np.where(found.products.numpy() < 0, -1.0, 1.0)[None]
        values = found.products.abs() if flips else found.products
        gain = 0.0
        if (found.order != units).any() or (flips and (factors < 0).any()):
            gain = float((values - self.sketches.standing(views)).sum())
        better = np.array([gain > self._least(1e-6) * float(values.abs().sum())])
        return better, [order if better[0] else units[None]], factors

    def _by_products(
        self, k: int, views: Sequence[Sequence[Placement]], due: np.ndarray, flips: bool
    ) -> Assigned:
        """The members that gain by the best orders of their units, the orders, and their signs."""
        rows, tables = np.flatnonzero(due), list[np.ndarray]()
        for of_table, table in zip(views, self.plan.families[k].tables, strict=True):
            total = self.similarity(of_table)
            empty = (self.members, table.units, table.units)
            tables.append(np.zeros(empty) if total is None else total.numpy())
        values = [np.abs(t[rows]) if flips else t[rows] for t in tables]
        every = [assign_blocks(*each) for each in zip(*values, strict=True)]
        best = [np.stack(order) for order in zip(*every, strict=True)]
        picked = [_picked(v, o) for v, o in zip(values, best, strict=True)]
        gains = sum(p.sum(1) for p in picked)
        gains -= sum(np.trace(t[rows], axis1=1, axis2=2) for t in tables)
        largest = [v.max(2) for v in values]
        least = self._least(1e-6) * sum(np.abs(v).sum(1) for v in largest)
        self.sure[k, rows] = [
            all(is_sure(v[m], p[m], r[m]) for v, p, r in zip(values, picked, largest, strict=True))
            for m in range(len(rows))
        ]
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

    def _kept(self, k: int, better: np.ndarray, element: list[Tensor], score: Tensor) -> np.ndarray:
        """Go back where a family that sees itself has not gained anything."""
        now = self.score(self.plan.names[k])
        worse = torch.from_numpy(better) & ~(now > score + self._least(1e-7) * score.abs())
        if bool(worse.any()):
            count = len(self.permutations)
            parts = [where_members(worse, a, b) for a, b in zip(element, self.element, strict=True)]
            self.permutations[:] = parts[:count]
            if self.signs is not None:
                self.signs[:] = parts[count:]
            self._forget(self.plan.names[k])
        return better & ~worse.numpy()

    # -------------------------------------------------------- moves
    def _move(self, k: int, step: Mapping[int, Tensor]) -> None:
        """Reorder the units of a family as they stand."""
        family = self.plan.families[k]
        self._compose(step)
        if family.inner or family.group in self.plan.homes:
            self._forget(self.plan.names[k])
            return
        order, moved = step[family.group], dict[Placement, Tensor]()
        tensors = [axis.tensor for _, axis in self.plan.places_of[k]]
        for view, axis in self.plan.places_of[k]:
            product = self.products.get(view)
            if product is not None and tensors.count(axis.tensor) == 1:
                moved[view] = product.gather(2, order[:, None].expand_as(product))
            self.current.reorder(axis.tensor, axis, view, order)
        self._forget_products(self.plan.names[k])
        for view, product in moved.items():
            self.products[view] = product

    def _compose(self, step: Mapping[int, Tensor]) -> None:
        """Update the orders by a step, in which blocks are numbered as they stand."""
        before, self.current.permutations = list(self.permutations), self.permutations
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
        if bool((factors < 0).any()):
            self._forget(self.plan.names[k])

    def _forget(self, names: Sequence[str] | None = None) -> None:
        """Drop tensors that have moved, by default all, and the products of their units."""
        self.current.forget(names)
        if names is None:
            self.products.clear()
        self._forget_products(names or ())

    def _forget_products(self, names: Sequence[str]) -> None:
        for name in names:
            for view in self.plan.views_at.get(name, ()):
                self.products.pop(view)

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
        total = torch.zeros(branches.units, dtype=torch.float64)
        for row in branches.tensors:
            if row[0] in compared:
                total += torch.stack([self.score([name])[0] for name in row])
        for placement in branches.placements:
            if self.sym.axes[placement.axis].tensor in compared:
                rows = (unit_rows(w, self.sym, placement) for w in (self.reference, self.current))
                a, b = (r.double().reshape(branches.units, -1) for r in rows)
                total += (a * b).sum(-1).cpu()
        return total


def _doubled(params: Mapping[str, Tensor], names: Sequence[str]) -> Params:
    return {n: params[n].double() for n in names}


def where_members(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Members of one stacked tensor or another, or all of one where the mask is a single number."""
    wide = mask.reshape([*mask.shape, *[1] * (a.ndim - mask.ndim)])
    return torch.where(wide.to(a.device), a, b)


def is_sure(table: np.ndarray, chosen: np.ndarray, largest: np.ndarray) -> bool:
    """True if every unit and its partner suit each other best, or there is nothing to compare.

    Args:
        table: how much units suit each other.
        chosen: the entries of the partners.
        largest: the largest entry of every row.
    """
    if (chosen < largest).any():
        return False
    return not largest.any() or bool((np.sort(chosen) >= np.sort(table.max(0))).all())


def _picked(tables: np.ndarray, orders: np.ndarray) -> np.ndarray:
    starts = np.arange(0, tables.size, tables.shape[2]).reshape(orders.shape)
    return tables.reshape(-1)[starts + orders]
