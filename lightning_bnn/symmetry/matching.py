"""Rebasin by weights: the permutation that brings a network closest to another."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params, unstack
from lightning_bnn.symmetry.actions import permuted_tensor
from lightning_bnn.symmetry.assignment import Family, assign, assign_blocks, families
from lightning_bnn.symmetry.axis_actions import axes_by_tensor, permute_axis
from lightning_bnn.symmetry.elements import identity, random_permutations
from lightning_bnn.symmetry.groups import Placement, Symmetries
from lightning_bnn.symmetry.units import other_axis, unit_rows
from lightning_bnn.symmetry.validation import check_finite, check_one_network, check_params

__all__ = ["match"]

_log = logging.getLogger(__name__)


@torch.no_grad()
def match(
    params: Params,
    reference: Params,
    sym: Symmetries,
    *,
    restarts: int = 0,
    seed: int = 0,
    max_sweeps: int = 100,
) -> list[Tensor]:
    r"""Permutations after which a network is closest to a reference, by coordinate ascent.

    A first pass goes from the input to the output and compares only with what is already matched;
    sweeps in random order follow until no group changes. Blocks (heads, convolution groups) are
    matched together with their inside.

    References:
        Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth, Hayase, Srinivasa,
        2023)

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        restarts: further tries from random permutations; the best is kept.
        seed: of the sweeps and restarts.
        max_sweeps: sweeps per try.

    Returns:
        One permutation per group, for `permute`.
    """
    if restarts < 0 or max_sweeps < 1:
        raise ValueError(
            f"`restarts` must be at least 0 and `max_sweeps` at least 1, got {restarts} and "
            f"{max_sweeps}."
        )
    check_one_network(reference, sym, "reference")
    check_finite(reference, sym, "reference")
    stacked = check_params(params, sym)
    check_finite(params, sym)
    if stacked:
        matched = [
            match(p, reference, sym, restarts=restarts, seed=seed, max_sweeps=max_sweeps)
            for p in unstack(params)
        ]
        return [torch.stack(rows) for rows in zip(*matched, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    ascent = _Ascent(params, reference, sym)
    best = ascent.run(identity(sym), generator, max_sweeps, forward_pass=True)
    score = ascent.score() if restarts else 0.0
    for _ in range(restarts):
        start = [
            torch.arange(group.units) if group.tensors else order
            for group, order in zip(
                sym.permutations, random_permutations(sym, generator), strict=True
            )
        ]
        other = ascent.run(start, generator, max_sweeps, forward_pass=False)
        if ascent.score() > score:
            best, score = other, ascent.score()
    return best


class _Ascent:
    """Coordinate ascent; similarities are kept until a group on the other side moves."""

    def __init__(self, params: Params, reference: Params, sym: Symmetries) -> None:
        self.sym, self.params, self.reference = sym, params, reference
        self.families = families(sym)
        self.tensors = axes_by_tensor(sym, "permutations")
        self.statistics = {a.tensor for a in sym.axes if a.role in ("mean", "variance")}
        places_by_axis = sym.placements_by_axis("permutations")
        groups_on: dict[int | None, set[int]] = {
            axis: {g for g, _ in places} for axis, places in places_by_axis.items()
        }
        self.across = {a: groups_on.get(other_axis(sym, a), set()) for a in places_by_axis}
        self.homes = {
            member: (g, k, slot)
            for g, group in enumerate(sym.permutations)
            for k, row in enumerate(group.inner)
            for slot, member in enumerate(row)
        }
        self.neighbours = self._neighbours()
        self.reference_rows: dict[tuple[int, bytes], Tensor] = {}

    def _neighbours(self) -> list[set[int]]:
        """Families that see a family on the other side of a tensor."""
        family_of: dict[int, set[int]] = {}
        for k, family in enumerate(self.families):
            for g in family.members:
                family_of.setdefault(g, set()).add(k)
        result: list[set[int]] = [set() for _ in self.families]
        for k, family in enumerate(self.families):
            for axis in self._axes_of(family):
                for g in self.across[axis]:
                    for other in family_of[g] - {k}:
                        result[other].add(k)
        return result

    def _axes_of(self, family: Family) -> set[int]:
        return {p.axis for g in family.members for p in self.sym.permutations[g].placements}

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
        if not forward_pass:
            self._regather(self.tensors)
        known: set[int] = set()
        for family in self.families if forward_pass else ():
            self._improve(family, known | set(family.members))
            known |= set(family.members)
        pending = set(range(len(self.families)))
        for _ in range(max_sweeps):
            shuffled = torch.randperm(len(self.families), generator=generator).tolist()
            order = [k for k in shuffled if k in pending]
            if not order:
                return self.permutations
            for k in order:
                pending.discard(k)
                if self._improve(self.families[k], None):
                    pending |= self.neighbours[k]
        _log.warning("match: still improving after %d sweeps.", max_sweeps)
        return self.permutations

    def score(self, names: Iterable[str] | None = None) -> float:
        """Similarity of the tensors as they stand now."""
        chosen = self.tensors if names is None else names
        pairs = [(self.reference[n], self.current[n]) for n in chosen if n not in self.statistics]
        return sum(float((a * b).sum(dtype=torch.float64)) for a, b in pairs)

    def _improve(self, family: Family, known: set[int] | None) -> bool:
        """Reassign one family by what is known already; return whether it changed."""
        group = self.sym.permutations[family.group]
        if family.inner:
            return self._improve_blocks(family, known)
        similarity = self._similarity(group.placements, known)
        if similarity is None:
            return False
        order = assign(similarity)
        units = torch.arange(len(order))
        gain = (similarity[units, order] - similarity.diagonal()).sum()
        if not gain > 1e-7 * similarity.diagonal().abs().sum():
            return False
        self._reorder(family.group, order)
        return True

    def _standing_at(self, group: int) -> int:
        """The group whose units stand in the places of another one: blocks may have moved."""
        if group not in self.homes:
            return group
        home, row, slot = self.homes[group]
        blocks = self._standing_at(home)
        return self.sym.permutations[blocks].inner[row][int(self.permutations[blocks][slot])]

    def _reorder(self, group: int, order: Tensor) -> None:
        """Reorder units as they stand: an inner order belongs to the block that sits there."""
        target = self._standing_at(group)
        self.permutations[target] = self.permutations[target][order]
        self.version[group] += 1
        for place in self.sym.permutations[group].placements:
            axis = self.sym.axes[place.axis]
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
        rest = self._similarity([p for p in family.rest if not self.across[p.axis] & inside], known)
        tables = []
        for row in family.inner:
            units = self.sym.permutations[row[0]].units
            table = self._similarity(self._joined(row, inside), known)
            table = torch.zeros(blocks * units, blocks * units) if table is None else table
            tables.append(table.reshape(blocks, units, blocks, units))
        order, orders = assign_blocks(torch.zeros(blocks, blocks) if rest is None else rest, tables)
        before = list(self.permutations)
        names = sorted({self.sym.axes[a].tensor for a in self._axes_of(family)})
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
        joined = []
        for k, place in enumerate(self.sym.permutations[row[0]].placements):
            if not self.across[place.axis] & inside:
                positions = [self.sym.permutations[g].placements[k].positions for g in row]
                joined.append(Placement(place.axis, torch.cat(positions)))
        return joined

    def _similarity(self, places: Sequence[Placement], known: set[int] | None) -> Tensor | None:
        """Inner products of all pairs of units, over the places whose other side is known."""
        parts = []
        for place in places:
            across = self.across[place.axis]
            counts = self.sym.axes[place.axis].tensor not in self.statistics
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
        for name in names:
            self.current[name] = permuted_tensor(
                self.params, self.sym, name, self.tensors[name], self.permutations
            )
