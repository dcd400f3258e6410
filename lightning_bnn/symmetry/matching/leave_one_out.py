"""Sweeps over networks in which each is matched to the sum of the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params, stack_size, unstack
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.branches import exchange_branches
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.plan import Plan

__all__ = ["LeaveOneOut"]

_log = logging.getLogger(__name__)

Elements = list[list[Tensor]]
Flips = list[list[Tensor]] | None


class LeaveOneOut:
    """Leave-one-out sweeps over the networks of one stack."""

    def __init__(self, plan: Plan, stack: Params, signs: bool, seed: int) -> None:
        self.plan, self.sym, self.seed = plan, plan.sym, seed
        self.stack, self.signs, self.size = stack, signs, stack_size(stack)
        self.members = unstack({n: stack[n] for n in plan.compared})
        self.norms = sum(self._square(m) for m in self.members)

    def as_given(self) -> tuple[Elements, Flips]:
        """Every network where it stands."""
        one = [torch.ones(g.units) for g in self.sym.signs]
        flips = [[s.clone() for s in one] for _ in self.members] if self.signs else None
        return [identity(self.sym) for _ in self.members], flips

    def at_the_first(self) -> tuple[Elements, Flips]:
        """Every network matched to the first."""
        first = {n: t[0] for n, t in self.stack.items()}
        found = match(self.stack, first, self.sym, signs=self.signs, seed=self.seed)
        every = range(self.size)
        flips = None if found.signs is None else [[s[m] for s in found.signs] for m in every]
        return [[p[m] for p in found] for m in every], flips

    def run(
        self, elements: Elements, flips: Flips, sweeps: int
    ) -> tuple[list[Tensor], list[Tensor] | None, list[float]]:
        """Sweep until no network moves; elements, flips and the spread after every sweep."""
        generator = torch.Generator().manual_seed(self.seed)
        ascents = [
            Ascent(self.plan, member, {}, None if flips is None else flips[m])
            for m, member in enumerate(self.members)
        ]
        current = [a.at(e) for a, e in zip(ascents, elements, strict=True)]
        total = self._sum(current)
        spread = [self._spread_of(total)]
        pending = set(range(self.size)) if sweeps else set()
        for _ in range(sweeps):
            moved = False
            for m in torch.randperm(self.size, generator=generator).tolist():
                others = {n: t - current[m][n] for n, t in total.items()}
                new = _towards(others, ascents[m], elements[m], generator)
                if new is None:
                    continue
                elements[m], moved = new, True
                total = {n: others[n] + ascents[m].current[n] for n in total}
                current[m] = {n: ascents[m].current[n] for n in total}
            total = self._sum(current)  # without the rounding of many differences
            spread.append(self._spread_of(total))
            pending = pending if moved else set()
            if not moved:
                break
        if pending:
            _log.warning("align: networks still move after %d sweeps.", sweeps)
        signs = None
        if flips is not None:
            signs = [
                torch.stack(rows) for rows in zip(*(a.signs or () for a in ascents), strict=True)
            ]
        return [torch.stack(rows) for rows in zip(*elements, strict=True)], signs, spread

    def _spread_of(self, total: Params) -> float:
        return self.norms - self._square(total) / self.size

    @staticmethod
    def _sum(networks: Sequence[Params]) -> Params:
        return {n: torch.stack([w[n] for w in networks]).double().sum(0) for n in networks[0]}

    @staticmethod
    def _square(network: Params) -> float:
        return sum(float(t.double().square().sum()) for t in network.values())


def _towards(
    reference: Params, ascent: Ascent, start: Sequence[Tensor], generator: torch.Generator
) -> list[Tensor] | None:
    """Ascend to another reference from some permutations; None if they stay."""
    ascent.reference, ascent.reference_rows = reference, {}
    signs = None if ascent.signs is None else [s.clone() for s in ascent.signs]
    ascent.run(start, generator, 100, forward_pass=False)
    exchange_branches(ascent, generator, 100)
    new = ascent.permutations
    same = all(torch.equal(a, b) for a, b in zip(start, new, strict=True))
    flipped = signs is not None and any(
        not torch.equal(a, b) for a, b in zip(signs, ascent.signs or (), strict=True)
    )
    return None if same and not flipped else new
