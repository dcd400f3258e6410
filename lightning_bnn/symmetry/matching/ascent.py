"""Coordinate ascent: one group after the other takes the assignment that suits the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_bnn.params import Params, is_stacked, stack_size
from lightning_bnn.symmetry.actions import (
    multiplied_tensor,
    multiply,
    permute_some,
    permuted_tensor,
)
from lightning_bnn.symmetry.axis_actions import Element, Kind, permute_axis
from lightning_bnn.symmetry.composition import compose, standing_at
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.matching.plan import Plan, View, assign, assign_blocks, split
from lightning_bnn.symmetry.units import unit_rows

__all__ = ["SMALL", "Ascent"]

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
        self._unmoved = [p.repeat(self.members, 1) for p in identity(self.sym)]
        if self.exact and not exact:
            self.params, reference = (_doubled(w, plan.compared) for w in (params, reference))
        self.look_at(reference)
        self.stand(None)

    def look_at(self, reference: Params) -> None:
        """Compare with another network, or with one for each member of the stack."""
        self.reference = reference
        self.goals, self.products = dict[View, Tensor](), dict[View, Tensor]()
        self.several = is_stacked({n: reference[n] for n in self.plan.compared}, self.sym.shapes)

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

    def similarity(self, views: Sequence[View], known: Collection[int] | None) -> Tensor | None:
        """Inner products of all pairs of units, over the places whose other side is known."""
        total = None
        for view in views:
            if known is None or view.across <= known:  # type: ignore[operator]
                part = self._product(view)
                total = part if total is None else total + part
        return total

    def _product(self, view: View) -> Tensor:
        if view not in self.products:
            if view not in self.goals:
                goal = self.reference[view.tensor]
                goal = view.rows(goal) if self.several else view.rows(goal[None])[0]
                self.goals[view] = self._real(goal)
            own = self._real(view.rows(self.current[view.tensor]))
            self.products[view] = (self.goals[view].to(own) @ own.mT).cpu()
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
        self.climb(generator, max_sweeps, known=set() if start is None else None)
        self.exchange(generator, max_sweeps)

    def climb(
        self,
        generator: torch.Generator,
        max_sweeps: int,
        chosen: Sequence[int] | None = None,
        known: set[int] | None = None,
    ) -> None:
        """Ascend by families in random order, until none has anything to gain.

        Args:
            generator: of the order of the families within a sweep, the same for all members.
            max_sweeps: sweeps at most.
            chosen: indices of the families, by default all.
            known: the groups to compare with in a first pass, in graph order; None for no such
                pass.
        """
        families, everyone = len(self.plan.families), np.ones(self.members, bool)
        chosen = range(families) if chosen is None else chosen
        for k in chosen if known is not None else ():
            known = (known or set()) | self.plan.families[k].members
            self._improve(k, everyone, known)
        pending = np.zeros((families, self.members), bool)
        pending[list(chosen)] = True
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

    def _improve(self, k: int, due: np.ndarray, known: set[int] | None) -> np.ndarray:
        """Reassign one family of the members that are due; say which of them change."""
        own, *inside = self.plan.views[k]
        group = self.plan.families[k].group
        similarity = self.similarity(own, known)
        mirror = None if self.signs is None else self.plan.mirrors[group]
        guarded = known is None and (self.plan.sees_itself[k] or bool(inside))
        before = None
        if guarded:
            before = self.element, dict(self.current), self.score(self.plan.names[k])
        if inside:
            better = self._place_blocks(k, similarity, due, known)
        elif similarity is None:
            return np.zeros(self.members, bool)
        else:
            better = self._reorder(k, similarity, due, mirror)
        if before is not None and better.any():
            better = self._kept(k, better, *before)
        return better

    def _least(self, coarse: float) -> float:
        """The share of the similarity that is a gain and no rounding."""
        return _ROUNDING if self.exact else coarse

    def _reorder(
        self, k: int, similarity: Tensor, due: np.ndarray, mirror: int | None
    ) -> np.ndarray:
        """Assign the units of a family of channels, and flip what fits better so."""
        table, group = similarity.numpy(), self.plan.families[k].group
        values = table if mirror is None else np.abs(table)
        better, order = np.zeros(self.members, bool), self._unmoved[group].numpy().copy()
        factors = np.ones(order.shape)
        for m in np.flatnonzero(due):
            rows, columns = linear_sum_assignment(values[m], maximize=True)
            gain = values[m][rows, columns].sum() - table[m].trace()
            if gain > self._least(1e-6) * np.abs(values[m].max(1)).sum():
                better[m], order[m] = True, columns
                factors[m] = np.where(table[m][rows, columns] < 0, -1, 1)
        if better.any():
            self._move(k, {group: torch.from_numpy(order)})
            if mirror is not None:
                self._flip(k, mirror, torch.from_numpy(factors))
        return better

    def _place_blocks(
        self, k: int, rest: Tensor | None, due: np.ndarray, known: set[int] | None
    ) -> np.ndarray:
        """Assign blocks by the best that can be had inside each pair of them."""
        family, views = self.plan.families[k], self.plan.views[k][1:]
        blocks = self.plan.groups[family.group].units
        tables = [torch.zeros(self.members, blocks, blocks) if rest is None else rest]
        for row, view in zip(family.inner, views, strict=True):
            units = blocks * self.plan.groups[row[0]].units
            table = self.similarity(view, known)
            tables.append(torch.zeros(self.members, units, units) if table is None else table)
        unmoved = [torch.arange(t.shape[1]) for t in tables]
        every = [
            assign_blocks(*(t[m] for t in tables)) if d else unmoved for m, d in enumerate(due)
        ]
        orders = [torch.stack(o) for o in zip(*every, strict=True)]
        moves = [(o != u).any(1).numpy() for o, u in zip(orders, unmoved, strict=True)]
        better: np.ndarray = np.any(moves, axis=0)
        if better.any():
            self._move(k, split(family, orders))
        return better

    def _kept(
        self, k: int, better: np.ndarray, element: list[Tensor], current: Params, score: Tensor
    ) -> np.ndarray:
        """Go back where a family that sees itself, or blocks, has not gained anything."""
        now = self.score(self.plan.names[k])
        worse = torch.from_numpy(better) & ~(now > score + self._least(1e-7) * score.abs())
        if bool(worse.any()):
            count = len(self.permutations)
            parts = [_where(worse, a, b) for a, b in zip(element, self.element, strict=True)]
            self.permutations = parts[:count]
            self.signs = None if self.signs is None else parts[count:]
            for n in self.plan.names[k]:
                self.current[n] = _where(worse, current[n], self.current[n])
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
        tensors = [v.tensor for v in views]
        for view in views:
            self.current[view.tensor] = self._reordered(view, order)
            if view in products and tensors.count(view.tensor) == 1:
                index = order[:, None].expand_as(products[view])
                self.products[view] = products[view].gather(2, index)

    def _reordered(self, view: View, order: Tensor) -> Tensor:
        """The tensor of a view with its units in another order."""
        axis, place, index = self.sym.axes[view.place.axis], view.place.positions, order
        if view.dim is None:
            index = torch.arange(axis.blocks * axis.size).repeat(self.members, 1)
            index[:, place.reshape(-1)] = place[order].flatten(1)
        w = self.current[view.tensor]
        return permute_axis(w, axis, (index if self.members > 1 else index[0]).to(w.device), 1)

    def _compose(self, step: Mapping[int, Tensor]) -> None:
        """Orders after a step; one inside blocks belongs to the block that stands there."""
        before = list(self.permutations)
        for g, order in step.items():
            if g not in self.plan.homes:
                self.permutations[g] = before[g].gather(1, order)
                continue
            for m, own in enumerate(order):
                at = standing_at(g, [p[m] for p in before], self.sym, self.plan.homes)
                if self.permutations[at] is before[at]:
                    self.permutations[at] = before[at].clone()
                self.permutations[at][m] = before[at][m][own]

    def _flip(self, k: int, mirror: int, factors: Tensor) -> None:
        """Flip units as they stand."""
        assert self.signs is not None
        at = self.permutations[self.plan.families[k].group]
        signs = self.signs[mirror]
        self.signs[mirror] = signs.scatter(1, at, signs.gather(1, at) * factors.to(signs))
        step = [torch.ones(g.units) for g in self.sym.signs]
        step[mirror] = factors
        for n in self.plan.names[k]:
            axes: dict[int, list[Kind]] = self.plan.flipped[n]
            self.current[n] = multiplied_tensor(self.current[n], self.sym, axes, {"signs": step}, 1)
        self._forget(k)

    def _forget(self, k: int) -> None:
        """Drop the products of tensors on which a family acts."""
        names = self.plan.names[k]
        self.products = {v: p for v, p in self.products.items() if v.tensor not in names}

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
        """Reorder branches as they stood, and match the units inside of those that meet."""
        step = identity(self.sym)
        step[group] = order
        self.stand(compose(before, step, self.sym))
        inside = self.plan.inside(group)
        moving = {g for k in inside for g in self.plan.families[k].members}
        known = set(range(len(self.plan.groups))) - moving
        self.climb(generator, max_sweeps, inside, known)

    def _facing(self, group: int) -> Tensor:
        """Similarity of every branch with what stands in its place, with its rows in a router."""
        branches, compared = self.plan.groups[group], self.plan.compared
        own, goal = {n: t[0].double() for n, t in self.current.items()}, self.reference
        total = torch.zeros(branches.units, dtype=torch.float64)
        for row in branches.tensors:
            if row[0] in compared:
                total += torch.stack([(goal[n].double() * own[n]).sum().cpu() for n in row])
        for place in branches.placements:
            if self.sym.axes[place.axis].tensor in compared:
                a, b = (unit_rows(w, self.sym, place).double() for w in (goal, own))
                total += (a * b).sum(-1).cpu()
        return total


def _doubled(params: Params, names: Sequence[str]) -> Params:
    return {n: params[n].double() for n in names}


def _where(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Members of one stacked tensor or another."""
    return torch.where(mask.reshape(-1, *[1] * (a.ndim - 1)).to(a.device), a, b)
