"""Coordinate ascent: one group after the other takes the assignment that suits the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.axis_actions import Element
from lightning_bnn.symmetry.matching.assignment import Family, assign_all, assign_blocks
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.rows import Rows, some
from lightning_bnn.symmetry.matching.standing import Standing

__all__ = ["Ascent"]

_ROUNDING = 1e-13  # of the similarity, in double precision


class Ascent:
    """Coordinate ascent of all members of a stack at once.

    Products, gains and orders are computed for all members that have the same group to improve;
    assignments are solved one by one. After `run`, ``settled`` says of every member whether nothing
    changed any more.
    """

    def __init__(
        self, plan: Plan, params: Params, reference: Params, signs: Element | None = None
    ) -> None:
        self.plan, self.sym = plan, plan.sym
        self.now = Standing(plan, params, reference, signs)
        self.settled: np.ndarray = np.ones(self.now.members, bool)

    @property
    def signs(self) -> list[Tensor] | None:
        """Flips that come before the permutations, if there are any."""
        return self.now.signs

    def score(self) -> Tensor:
        """Similarity of every member as it stands now."""
        return self.now.score(None, self.now.everyone)

    def run(
        self,
        start: Sequence[Tensor],
        generator: torch.Generator,
        max_sweeps: int,
        forward_pass: bool,
    ) -> list[Tensor]:
        """Ascend from some permutations until no family of any member changes any more.

        Args:
            start: one permutation per group and member.
            generator: of the order of the families, the same for all members.
            max_sweeps: sweeps at most.
            forward_pass: first go through the network once, by what is known already.
        """
        self.now.begin(start)
        every = range(len(self.plan.families))
        self.climb(every, generator, max_sweeps, set() if forward_pass else None)
        return self.now.permutations

    def climb(
        self,
        chosen: Collection[int],
        generator: torch.Generator,
        max_sweeps: int,
        known: set[int] | None = None,
    ) -> None:
        """Ascend by some families from where the networks stand.

        Args:
            chosen: indices of the families.
            generator: of their order within a sweep, the same for all members.
            max_sweeps: sweeps at most.
            known: the groups to compare with in a first pass, in graph order; None for no such
                pass.
        """
        for k in chosen if known is not None else ():
            known = (known or set()) | set(self.plan.families[k].members)
            self._improve(k, self.now.everyone, known)
        self._sweep(chosen, generator, max_sweeps)

    def finish(self, generator: torch.Generator, max_sweeps: int) -> None:
        """Ascend in double precision: what exchanging units gains is quadratic in their difference.

        Args:
            generator: of the order of the families.
            max_sweeps: sweeps at most.
        """
        self.now.look_closely()
        self.climb(range(len(self.plan.families)), generator, max_sweeps)

    def at(self, permutations: Sequence[Tensor]) -> Params:
        """The tensors that count, for some permutations."""
        self.now.begin(permutations)
        return dict(self.now.current)

    def of(self, member: int) -> Ascent:
        """The ascent of one member alone, where it stands."""
        now, one = self.now, slice(member, member + 1)
        params = {n: t[one] for n, t in now.params.items()}
        reference = now.reference
        if now.several:
            reference = {n: t[member] for n, t in reference.items()}
        signs = None if now.signs is None else [s[one] for s in now.signs]
        alone = Ascent(self.plan, params, reference, signs)
        alone.at([p[one] for p in now.permutations])
        return alone

    def become(self, member: int, other: Ascent) -> None:
        """Let one member stand where it has come to alone.

        Args:
            member: which.
            other: of this member, see `of`.
        """
        rows = np.array([member])
        self.now.stand(rows, other.now.permutations, other.signs)
        self.settled[member] = other.settled[0]

    def _sweep(self, chosen: Collection[int], generator: torch.Generator, max_sweeps: int) -> None:
        """Families in random order, until none of the chosen has anything to gain."""
        families = len(self.plan.families)
        pending = np.zeros((self.now.members, families), bool)
        pending[:, list(chosen)] = True
        for _ in range(max_sweeps):
            shuffled = torch.randperm(families, generator=generator).tolist()
            due = pending.copy()
            self.settled = np.asarray(~due.any(1))
            if self.settled.all():
                return
            for k in shuffled:
                rows = np.flatnonzero(due[:, k])
                pending[rows, k] = False
                changed = self._improve(k, rows, None) if len(rows) else rows
                for other in self.plan.neighbours[k] & set(chosen) if len(changed) else ():
                    pending[changed, other] = True

    def _improve(self, k: int, rows: Rows, known: set[int] | None) -> Rows:
        """Reassign one family by what is known already; the members that it changes."""
        family = self.plan.families[k]
        if family.inner:
            return self._improve_blocks(k, rows, known)
        similarity = self.now.similarity(self.plan.views[k].own, rows, known)
        if similarity is None:
            return rows[:0]
        mirror = None if self.signs is None else self.plan.mirrors[family.group]
        values = similarity if mirror is None else similarity.abs()
        order = assign_all(values)
        chosen = similarity.gather(2, order[:, :, None])[:, :, 0]
        reached = (chosen if mirror is None else chosen.abs()).sum(1)
        gain = reached - similarity.diagonal(dim1=1, dim2=2).sum(1)
        better = (gain > self._least(1e-6) * values.amax(2).abs().sum(1)).numpy()
        if not better.any():
            return rows[:0]
        moving, order = rows[better], some(order, np.flatnonzero(better))
        names = self.plan.names_of[k]
        guarded = known is None and self.plan.sees_itself(family)
        before = (self.now.saved(), self.now.score(names, moving)) if guarded else None
        self.now.reorder(family.group, order, moving)
        if mirror is not None:
            factors = torch.where(some(chosen, np.flatnonzero(better)) < 0, -1.0, 1.0)
            self.now.flip(family.group, mirror, factors, moving)
        return moving if before is None else self._kept(names, moving, *before)

    def _least(self, coarse: float) -> float:
        """The share of the similarity that is a gain and no rounding."""
        return _ROUNDING if self.now.precise else coarse

    def _kept(
        self,
        names: Sequence[str],
        rows: Rows,
        saved: tuple[list[Tensor], list[Tensor] | None],
        score: Tensor,
    ) -> Rows:
        """The members for which a family that sees itself is better now; the others go back."""
        better = (self.now.score(names, rows) > score + self._least(1e-7) * score.abs()).numpy()
        if not better.all():
            self.now.go_back(saved, rows[~better])
            self.now.regather(names, rows[~better])
        return rows[better]

    # -------------------------------------------------------- blocks
    def _improve_blocks(self, k: int, rows: Rows, known: set[int] | None) -> Rows:
        family, names, saved = self.plan.families[k], self.plan.names_of[k], self.now.saved()
        rest, tables = self._block_tables(k, rows, known)
        score = self.now.score(names, rows)
        changed = []
        for i, m in enumerate(rows.tolist()):
            order, orders = assign_blocks(rest[i], [t[i] for t in tables])
            changed.append(self._place_blocks(family, order, orders, m))
        moved = np.array(changed)
        if not moved.any():
            return rows[:0]
        moving = rows[moved]
        self.now.regather(names, moving)
        if known is not None:
            return moving
        return self._kept(names, moving, saved, some(score, np.flatnonzero(moved)))

    def _block_tables(
        self, k: int, rows: Rows, known: set[int] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Similarities of what is fixed in a block, and of every class of channels inside."""
        family, views = self.plan.families[k], self.plan.views[k]
        blocks = self.sym.permutations[family.group].units
        rest = self.now.similarity(views.own, rows, known)
        tables = []
        for row, places in zip(family.inner, views.inside, strict=True):
            units = self.sym.permutations[row[0]].units
            table = self.now.similarity(places, rows, known)
            if table is None:
                table = torch.zeros(len(rows), blocks * units, blocks * units)
            tables.append(table.reshape(len(rows), blocks, units, blocks, units))
        return torch.zeros(len(rows), blocks, blocks) if rest is None else rest, tables

    def _place_blocks(
        self, family: Family, order: Tensor, orders: Sequence[Tensor], member: int
    ) -> bool:
        """Give the blocks of one member their places; whether any unit moves."""
        rows, permutations = np.array([member]), self.now.permutations
        group = next(iter(self.now.standing_at(family.group, rows)))
        at_slots = permutations[group][member]
        new = {group: at_slots[order]}
        for row, inside in zip(family.rows, orders, strict=True):
            for slot in range(len(order)):
                g = self.sym.permutations[group].inner[row][int(at_slots[order[slot]])]
                new[g] = permutations[g][member][inside[slot]]
        moves = [g for g, p in new.items() if not torch.equal(p, permutations[g][member])]
        for g in moves:
            self.now.reset_order(g, rows, new[g][None])
        return bool(moves)
