"""Coordinate ascent: one group after the other takes the assignment that suits the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from weightsym.groups.element import Element, Values
from weightsym.groups.symmetries import Placement
from weightsym.groups.units import unit_rows
from weightsym.matching.moved import Moved, Recent, gram, inner_products
from weightsym.matching.plan import Plan, assign, assign_blocks, greedy, split
from weightsym.matching.sketches import MANY, Sketches
from weightsym.params import Params

_ROUNDING = 1e-13  # of the similarity, in double precision
SMALL = 2**15  # weights that cost no more in double precision
LARGE = 2**24
"""Weights that are visited in the order of their layers, and in single precision only."""
_GAIN = 1e-7  # of the similarity, by exchanging branches; less is rounding
Assigned = tuple[np.ndarray, list[np.ndarray], np.ndarray]
"""The members that gain, the orders of all tables, and the signs of units."""


class Ascent:
    """Networks of a stack where an element has brought them, on their way to a reference.

    Products of units are computed for all members at once, and kept until another order or sign
    changes their tensor; assignments are solved one by one, where a neighbour has changed.

    Args:
        plan: of the groups.
        params: a stack.
        reference: one network, or one for every member.
        flips: flip units as well, where the same units are flipped everywhere.
        exact: compute in double precision, as small networks always do: what exchanging units gains
            is quadratic in their difference.
    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, Tensor],
        reference: Mapping[str, Tensor],
        flips: bool = False,
        exact: bool = False,
    ) -> None:
        self.plan, self.sym, self.flips = plan, plan.sym, flips
        self.exact, self.settled, self.rough = exact or plan.size <= SMALL, True, False
        self.members = len(params[next(iter(plan.compared or params))])
        if self.exact and not exact:
            params, reference = (_doubled(w, plan.compared) for w in (params, reference))
        self.current = Moved(params, Element(self.sym))
        self.sure = np.zeros((len(plan.families), self.members), bool)
        self.look_at(reference)

    def look_at(self, reference: Mapping[str, Tensor]) -> None:
        """Compare with another network, or with one for each member of the stack."""
        self.reference = reference
        self.goals, self.products = Recent[Placement](), Recent[Placement]()
        self.sketches = Sketches(self.sym, self.current, reference)

    def stand(self, element: Element) -> None:
        """Stand where another element brings the networks as they were given."""
        self.current.stand(element)
        self.products.clear()

    @property
    def element(self) -> Element:
        """What has brought the networks where they stand."""
        return self.current.element

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
        start: Element | None,
        generator: torch.Generator,
        max_sweeps: int,
    ) -> None:
        """Ascend from an element, or once through the network first where there is none."""
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
        least: float = 0.0,
    ) -> None:
        """Ascend by families in random order, until none has anything to gain.

        Args:
            generator: of the order of the families within a sweep, the same for all members.
            max_sweeps: sweeps at most.
            chosen: indices of the families, by default all.
            settled: the groups to compare with in a first pass, in graph order; None for no such
                pass.
            least: if a sweep gains no more than this share of the similarity, it is the last, and
                good orders of thousands of units do.
        """
        families = len(self.plan.families)
        chosen = range(families) if chosen is None else chosen
        if settled is not None:
            self._pass(chosen, settled)
        pending = np.zeros((families, self.members), bool)
        self.rough, alone = least > 0, not self.plan.couples
        alone = alone and not any(f.inner for f in self.plan.families)
        pending[list(chosen)] = settled is None or not alone  # a first pass is all that they need
        allowed = pending[:, :1].copy()
        score = self.score() if least else None
        for _ in range(max_sweeps):
            order = torch.randperm(families, generator=generator).tolist()
            for k in sorted(order) if self.plan.size > LARGE else order:
                if pending[k].any():
                    changed = self._improve(k, pending[k], None)
                    pending[k] = False
                    if self.plan.size > LARGE:  # they have been matched with their blocks
                        pending[self.plan.within[k]] = False
                        self.sure[self.plan.within[k]] = self.sure[k]
                    pending[self.plan.neighbours[k]] |= changed & allowed[self.plan.neighbours[k]]
            before, slow = score, False
            if before is not None:
                score = self.score()
                slow = bool((score < (1 + least) * before).all())
            if slow or not pending.any():
                break
        self.settled = not pending.any()

    def _pass(self, chosen: Sequence[int], known: set[int]) -> None:
        """Reassign families once in graph order, comparing with what has been matched."""
        for k in chosen:
            members = self.plan.families[k].members
            if not members <= known:  # otherwise their blocks have just been matched
                self._improve(k, np.ones(self.members, bool), known | members)
            known = known | members

    def _improve(self, k: int, due: np.ndarray, settled: set[int] | None) -> np.ndarray:
        """Reassign one family of the members that are due, and return which of them change."""
        family, before = self.plan.families[k], None
        mirror = self.plan.mirrors[family.group] if self.flips else None
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
            self._move(k, orders, mirror, factors)
            gained = better if before is None else better & self._gained(k, before[1])
            if before is not None and (gained != better).any():
                self.stand(before[0])
                orders = [np.where(gained[:, None], o, np.arange(o.shape[1])) for o in orders]
                self._move(k, orders, mirror, np.where(gained[:, None], factors, 1.0))
            better = gained
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
            gain = float((values - self.sketches.products(views)).sum())
        better = np.array([gain > self._least(1e-6) * float(values.abs().sum())])
        return better, [order if better[0] else units[None]], factors

    def _by_products(
        self, k: int, views: Sequence[Sequence[Placement]], due: np.ndarray, flips: bool
    ) -> Assigned:
        """The members that gain by the best orders of their units, the orders, and their signs."""
        rows, tables = np.flatnonzero(due), list[np.ndarray]()
        for of_table, table in zip(views, self.plan.families[k].tables, strict=True):
            total = self.similarity(of_table)
            every = np.zeros((self.members, *2 * [table.units])) if total is None else total.numpy()
            tables.append(every if len(rows) == self.members else every[rows])
        values = [np.abs(t) for t in tables] if flips else tables
        solved = [self._assigned(*each) for each in zip(*values, strict=True)]
        best = [np.stack(order) for order in zip(*solved, strict=True)]
        picked = [_picked(v, o) for v, o in zip(values, best, strict=True)]
        largest = [v.max(2) for v in values]
        sure = [is_sure(v, p, r) for v, p, r in zip(values, picked, largest, strict=True)]
        self.sure[k, rows] = np.logical_and.reduce(sure)
        gains = sum(p.sum(1) for p in picked) - sum(t.trace(axis1=1, axis2=2) for t in tables)
        gained = gains > self._least(1e-6) * sum(np.abs(v).sum(1) for v in largest)
        better, factors = np.zeros(self.members, bool), np.ones((self.members, len(best[0][0])))
        better[rows[gained]] = True
        orders = [np.arange(t.shape[1])[None].repeat(self.members, 0) for t in tables]
        for order, new in zip(orders, best, strict=True):
            order[better] = new[gained]
        if flips:
            factors[better] = np.where(_picked(tables[0], best[0])[gained] < 0, -1.0, 1.0)
        return better, orders, factors

    def _assigned(self, *tables: np.ndarray) -> list[np.ndarray]:
        """The best orders of all tables; of thousands of units a good one, if that is enough."""
        if self.rough and len(tables) == 1 and len(tables[0]) >= MANY:
            return [greedy(torch.from_numpy(tables[0])).numpy()]
        return assign_blocks(*tables)

    def _least(self, coarse: float) -> float:
        """The share of the similarity that is a gain and no rounding."""
        return _ROUNDING if self.exact else coarse

    def _gained(self, k: int, score: Tensor) -> np.ndarray:
        """The members that are closer by the tensors of a family than they were."""
        now = self.score(self.plan.names[k])
        return (now > score + self._least(1e-7) * score.abs()).numpy()

    # -------------------------------------------------------- moves
    def _move(
        self, k: int, orders: Sequence[np.ndarray], mirror: int | None, factors: np.ndarray
    ) -> None:
        """Reorder the units of a family as they stand, then flip them."""
        family, sym = self.plan.families[k], self.sym
        step = split(family, [torch.from_numpy(order) for order in orders])
        every = [step.get(g) for g in range(len(sym.permutations))]
        values: Values = {"permutations": every}
        if flipped := mirror is not None and bool((factors < 0).any()):
            signs = [torch.from_numpy(factors) if g == mirror else None
                     for g in range(len(sym.signs))]  # fmt: skip
            values = {"permutations": every, "signs": signs}
        names = set(self.plan.moved[k])
        if flipped and mirror is not None:
            names |= sym.moved_by(sym.signs[mirror])
        moved = {} if flipped else self._moved_products(k, step)
        self.current.move(Element.of_values(sym, values, names=names))
        for view in (v for name in names for v in self.plan.views_at.get(name, ())):
            self.products.pop(view)
        for view, product in moved.items():
            self.products[view] = product

    def _moved_products(self, k: int, step: Mapping[int, Tensor]) -> dict[Placement, Tensor]:
        """Products of channels that move alone, after their step."""
        family = self.plan.families[k]
        if family.inner or family.group in self.plan.homes:
            return {}
        order, moved = step[family.group], dict[Placement, Tensor]()
        tensors = [axis.tensor for _, axis in self.plan.places_of[k]]
        for view, axis in self.plan.places_of[k]:
            product = self.products.get(view)
            if product is not None and tensors.count(axis.tensor) == 1:
                moved[view] = product.gather(2, order[:, None].expand_as(product))
        return moved

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
                best, before = float(self.score()), self.element
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
        before: Element,
        group: int,
        order: Tensor,
        generator: torch.Generator,
        max_sweeps: int,
    ) -> None:
        """Reorder branches as they stood, and match the units inside of those that meet.

        Where they have none of their own, as two layers whose units are compared, match all units.
        """
        groups = range(len(self.sym.permutations))
        step: Values = {"permutations": [order if g == group else None for g in groups]}
        self.stand(Element.of_values(self.sym, step) @ before)
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


def is_sure(tables: np.ndarray, chosen: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """True where every unit and its partner suit each other best, or there is nothing to compare.

    Args:
        tables: how much units suit each other, ``(..., units, units)``.
        chosen: the entries of the partners.
        largest: the largest entry of every row.
    """
    best = np.asarray((chosen >= largest).all(-1))
    if best.any():
        columns = np.sort(tables.max(-2))
        best &= (np.sort(chosen) >= columns).all(-1) | ~largest.any(-1)
    return best


def _picked(tables: np.ndarray, orders: np.ndarray) -> np.ndarray:
    starts = np.arange(0, tables.size, tables.shape[2]).reshape(orders.shape)
    return tables.reshape(-1)[starts + orders]
