"""Sweeps over networks in which each is matched to the sum of the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params, stack_size
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.branches import exchange_branches
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.plan import Plan

__all__ = ["LeaveOneOut"]

_log = logging.getLogger(__name__)

Elements = list[Tensor]
Flips = list[Tensor] | None


class LeaveOneOut:
    """Leave-one-out sweeps over the networks of one stack.

    Elements and flips have one row per network.

    Args:
        plan: of the groups.
        stack: networks of one kind.
        signs: whether units may be flipped.
        seed: of the order of the networks.
        counts: how often each network counts in the sum; by default once.
    """

    def __init__(
        self, plan: Plan, stack: Params, signs: bool, seed: int, counts: Tensor | None = None
    ) -> None:
        self.plan, self.sym, self.seed = plan, plan.sym, seed
        self.stack, self.signs, self.size = stack, signs, stack_size(stack)
        self.counts = [1.0] * self.size if counts is None else counts.tolist()
        self.members = [{n: stack[n][m : m + 1] for n in plan.compared} for m in range(self.size)]
        pairs = zip(self.counts, self.members, strict=True)
        self.norms = sum(count * self._square(member) for count, member in pairs)

    def as_given(self) -> tuple[Elements, Flips]:
        """Every network where it stands."""
        flips = [torch.ones(self.size, g.units) for g in self.sym.signs] if self.signs else None
        return [p.repeat(self.size, 1) for p in identity(self.sym)], flips

    def at_the_first(self) -> tuple[Elements, Flips]:
        """Every network matched to the first."""
        first = {n: t[0] for n, t in self.stack.items()}
        found = match(self.stack, first, self.sym, signs=self.signs, seed=self.seed)
        return list(found), None if found.signs is None else list(found.signs)

    def run(
        self, elements: Elements, flips: Flips, sweeps: int
    ) -> tuple[list[Tensor], list[Tensor] | None, list[float]]:
        """Sweep until no network moves; elements, flips and the spread after every sweep."""
        generator = torch.Generator().manual_seed(self.seed)
        ascents = [self._ascent(m, flips) for m in range(self.size)]
        current = [a.at([p[m : m + 1] for p in elements]) for m, a in enumerate(ascents)]
        total = self._sum(current)
        spread, moved = [self._spread_of(total)], False
        for _ in range(sweeps):
            moved = False
            for m in torch.randperm(self.size, generator=generator).tolist():
                count = self.counts[m]
                others = {n: t - count * current[m][n][0] for n, t in total.items()}
                if not _moves(ascents[m], others, generator):
                    continue
                moved, current[m] = True, dict(ascents[m].now.current)
                total = {n: others[n] + count * current[m][n][0] for n in total}
            total = self._sum(current)  # without the rounding of many differences
            spread.append(self._spread_of(total))
            if not moved:
                break
        if moved:
            _log.warning("align: networks still move after %d sweeps.", sweeps)
        orders = [
            torch.cat(rows) for rows in zip(*(a.now.permutations for a in ascents), strict=True)
        ]
        if flips is not None:
            flips = [
                torch.cat(rows) for rows in zip(*(a.signs or () for a in ascents), strict=True)
            ]
        return orders, flips, spread

    def _ascent(self, member: int, flips: Flips) -> Ascent:
        """Of one network alone: the others move between its steps."""
        own = None if flips is None else [s[member : member + 1] for s in flips]
        return Ascent(self.plan, self.members[member], self._nothing, own)

    @property
    def _nothing(self) -> Params:
        return {n: t[0] for n, t in self.members[0].items()}

    def _spread_of(self, total: Params) -> float:
        return self.norms - self._square(total) / sum(self.counts)

    def _sum(self, networks: Sequence[Params]) -> Params:
        def total(name: str) -> Tensor:
            rows = torch.cat([w[name] for w in networks]).double()
            return torch.tensordot(torch.tensor(self.counts).to(rows), rows, 1)

        return {name: total(name) for name in networks[0]}

    @staticmethod
    def _square(network: Params) -> float:
        return sum(float(t.double().square().sum()) for t in network.values())


def _moves(ascent: Ascent, reference: Params, generator: torch.Generator) -> bool:
    """Ascend to another reference from where a network stands; whether it moves."""
    orders, signs = ascent.now.saved()
    ascent.now.look_at(reference)
    ascent.climb(range(len(ascent.plan.families)), generator, 100)
    exchange_branches(ascent, generator, 100)
    new = (*ascent.now.permutations, *(ascent.signs or ()))
    pairs = zip((*orders, *(signs or ())), new, strict=True)
    return not all(a is b or torch.equal(a, b) for a, b in pairs)
