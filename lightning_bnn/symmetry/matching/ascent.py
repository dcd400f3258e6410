"""Coordinate ascent: one group after the other takes the assignment that suits the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import multiplied_tensor, permuted_tensor
from lightning_bnn.symmetry.axis_actions import Element, Kind, permute_axis
from lightning_bnn.symmetry.composition import standing_at
from lightning_bnn.symmetry.exchanges import source_of
from lightning_bnn.symmetry.groups import Placement
from lightning_bnn.symmetry.matching.assignment import Family, assign, assign_blocks
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.units import unit_rows

__all__ = ["Ascent"]


class Ascent:
    """Coordinate ascent; similarities are kept until a group on the other side moves.

    After `run`, ``settled`` says whether nothing changed any more.
    """

    def __init__(
        self, plan: Plan, params: Params, reference: Params, signs: Element | None = None
    ) -> None:
        self.plan, self.sym = plan, plan.sym
        self.params, self.reference = params, reference
        self.signs = None if signs is None else [s.clone() for s in signs]
        self.reference_rows: dict[tuple[int, bytes], Tensor] = {}
        self.settled = True

    def run(
        self,
        start: Sequence[Tensor],
        generator: torch.Generator,
        max_sweeps: int,
        forward_pass: bool,
    ) -> list[Tensor]:
        """Ascend from some permutations until no family changes any more."""
        self.permutations = list(start)
        self.version = [0] * len(self.permutations)
        self.cache: dict[tuple[int, bytes], tuple[list[int], Tensor]] = {}
        self.current = dict(self.params)
        if not forward_pass or self.signs is not None:
            self._regather(self.plan.compared)
        every = range(len(self.plan.families))
        self.climb(every, generator, max_sweeps, set() if forward_pass else None)
        return self.permutations

    def climb(
        self,
        chosen: Collection[int],
        generator: torch.Generator,
        max_sweeps: int,
        known: set[int] | None,
    ) -> None:
        """Ascend by some families from where the network stands.

        Args:
            chosen: indices of the families.
            generator: of the order within a sweep.
            max_sweeps: at most so many.
            known: the groups to compare with in a first pass, in graph order; None for no such
                pass.
        """
        for k in chosen if known is not None else ():
            family = self.plan.families[k]
            known = (known or set()) | set(family.members)
            self._improve(family, known)
        pending = set(chosen)
        for _ in range(max_sweeps):
            shuffled = torch.randperm(len(self.plan.families), generator=generator).tolist()
            order = [k for k in shuffled if k in pending]
            self.settled = not order
            if self.settled:
                return
            for k in order:
                pending.discard(k)
                if self._improve(self.plan.families[k], None):
                    pending |= self.plan.neighbours[k] & set(chosen)

    def at(self, permutations: Sequence[Tensor]) -> Params:
        """The tensors that count, for some permutations."""
        self.permutations, self.current = list(permutations), dict(self.params)
        self.version = [0] * len(self.permutations)
        self.cache = {}
        self._regather(self.plan.compared)
        return {n: self.current[n] for n in self.plan.compared}

    def score(self, names: Iterable[str] | None = None) -> float:
        """Similarity of the tensors as they stand now."""
        chosen = self.plan.compared if names is None else set(names) & set(self.plan.compared)
        pairs = [(self.reference[n], self.current[n]) for n in sorted(chosen)]
        return sum(float((a * b).sum(dtype=torch.float64)) for a, b in pairs)

    def _improve(self, family: Family, known: set[int] | None) -> bool:
        """Reassign one family by what is known already; return whether it changed."""
        group = self.sym.permutations[family.group]
        if family.inner:
            return self._improve_blocks(family, known)
        similarity = self._similarity(group.placements, known)
        if similarity is None:
            return False
        mirror = None if self.signs is None else self.plan.mirrors[family.group]
        values = similarity if mirror is None else similarity.abs()
        order = assign(values)
        chosen = similarity[torch.arange(len(order)), order]
        gain = (chosen if mirror is None else chosen.abs()).sum() - similarity.diagonal().sum()
        if not gain > 1e-6 * values.amax(1).abs().sum():
            return False
        before = None if known is not None else self._remembered(family)
        self._reorder(family.group, order)
        if mirror is not None:
            self._flip(family.group, mirror, chosen)
        return before is None or self._kept(family, *before)

    def _remembered(self, family: Family) -> tuple[Any, ...] | None:
        """What must be restored if a family that sees itself has got worse."""
        if not self.plan.sees_itself(family):
            return None
        names = sorted({self.sym.axes[a].tensor for a in self.plan.axes_of(family)})
        signs = None if self.signs is None else [s.clone() for s in self.signs]
        return names, self.score(names), list(self.permutations), signs

    def _kept(self, family: Family, names: Any, score: float, old: Any, signs: Any) -> bool:
        if self.score(names) > score + 1e-7 * abs(score):
            return True
        self.permutations, self.signs = old, signs
        self._regather(names)
        self.version[family.group] += 1
        return False

    def _flip(self, group: int, mirror: int, chosen: Tensor) -> None:
        """Flip the units whose best partner is their own opposite."""
        assert self.signs is not None
        factors = torch.where(chosen < 0, -1.0, 1.0).to(self.signs[mirror])
        self.signs[mirror][self.permutations[group]] *= factors
        self._regather(
            {self.sym.axes[p.axis].tensor for p in self.sym.permutations[group].placements}
        )

    def _standing_at(self, group: int) -> int:
        """The group whose units stand in the places of another one: blocks may have moved."""
        return standing_at(group, self.permutations, self.sym, self.plan.homes)

    def _reorder(self, group: int, order: Tensor) -> None:
        """Reorder units as they stand: an inner order belongs to the block that sits there."""
        target = self._standing_at(group)
        self.permutations[target] = self.permutations[target][order]
        self.version[group] += 1
        for place in self.sym.permutations[group].placements:
            axis = self.sym.axes[place.axis]
            if axis.tensor not in self.plan.compared:
                continue
            index = torch.arange(axis.blocks * axis.size)
            index[place.positions.reshape(-1)] = place.positions[order].reshape(-1)
            w = self.current[axis.tensor]
            self.current[axis.tensor] = permute_axis(w, axis, index.to(w.device))
            key = (place.axis, place.positions.numpy().tobytes())
            for other in [k for k in self.cache if k[0] == place.axis and k != key]:
                del self.cache[other]
            if key in self.cache:
                versions, part = self.cache[key]
                self.cache[key] = versions, part[:, order]

    def _improve_blocks(self, family: Family, known: set[int] | None) -> bool:
        inside = set(family.members)
        blocks = self.sym.permutations[family.group].units
        rest = self._similarity(
            [p for p in family.rest if not self.plan.across[p.axis] & inside], known
        )
        tables = []
        for row in family.inner:
            units = self.sym.permutations[row[0]].units
            table = self._similarity(self._joined(row, inside), known)
            table = torch.zeros(blocks * units, blocks * units) if table is None else table
            tables.append(table.reshape(blocks, units, blocks, units))
        order, orders = assign_blocks(torch.zeros(blocks, blocks) if rest is None else rest, tables)
        before = list(self.permutations)
        names = sorted({self.sym.axes[a].tensor for a in self.plan.axes_of(family)})
        score = self.score(names)
        self._place_blocks(family, order, orders)
        if all(torch.equal(a, b) for a, b in zip(before, self.permutations, strict=True)):
            return False
        self._regather(names)
        if known is None and not self.score(names) > score + 1e-7 * abs(score):
            self.permutations = before
            self._regather(names)
            return False
        for g in inside:
            self.version[g] += 1
        return True

    def _place_blocks(self, family: Family, order: Tensor, orders: Sequence[Tensor]) -> None:
        group = self._standing_at(family.group)
        at_slots, before = self.permutations[group], list(self.permutations)
        for row, new in zip(family.rows, orders, strict=True):
            for slot in range(len(order)):
                g = self.sym.permutations[group].inner[row][int(at_slots[order[slot]])]
                self.permutations[g] = before[g][new[slot]]
        self.permutations[group] = at_slots[order]

    def _joined(self, row: Sequence[int], inside: set[int]) -> list[Placement]:
        """The places of one class of channels in all blocks that are seen from outside."""
        return [p for p in self.plan.joined(row) if not self.plan.across[p.axis] & inside]

    def _similarity(self, places: Sequence[Placement], known: set[int] | None) -> Tensor | None:
        """Inner products of all pairs of units, over the places whose other side is known."""
        parts = []
        for place in places:
            across = self.plan.across[place.axis]
            counts = self.sym.axes[place.axis].tensor in self.plan.compared
            if counts and (known is None or across <= known):
                parts.append(self._part(place, [self.version[g] for g in sorted(across)]))
        return torch.stack(parts).sum(0) if parts else None

    def _part(self, place: Placement, versions: list[int]) -> Tensor:
        key = (place.axis, place.positions.numpy().tobytes())
        if key in self.cache and self.cache[key][0] == versions:
            return self.cache[key][1]
        if key not in self.reference_rows:
            self.reference_rows[key] = unit_rows(self.reference, self.sym, place).float()
        part = (self.reference_rows[key] @ unit_rows(self.current, self.sym, place).float().T).cpu()
        axis = self.sym.axes[place.axis]
        if axis.blocks * axis.size == place.positions.numel():
            self.cache[key] = versions, part
        return part

    def _regather(self, names: Iterable[str]) -> None:
        self.cache.clear()
        for name in set(names) & set(self.plan.compared):
            source = source_of(name, self.sym, self.permutations)
            tensor = self.params[source]
            if self.signs is not None and source in self.plan.flipped:
                flipped = self.plan.flipped[source]
                factors: dict[Kind, Element] = {"signs": self.signs}
                tensor = multiplied_tensor(tensor, self.sym, flipped, factors, 0)
            axes = self.plan.tensors.get(source, [])
            self.current[name] = permuted_tensor(
                {source: tensor}, self.sym, source, axes, self.permutations
            )
