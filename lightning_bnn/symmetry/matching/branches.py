"""Exchange branches that have tensors of their own, such as experts: every pair is tried once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.symmetry.composition import compose
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.assignment import assign
from lightning_bnn.symmetry.units import unit_rows

__all__ = ["exchange_branches"]

_GAIN = 1e-7  # of the similarity; less is rounding


def exchange_branches(ascent: Ascent, generator: torch.Generator, max_sweeps: int) -> None:
    """Give branches the best order that their units allow, as long as the similarity grows.

    How alike two branches are is only known once their units are matched. With all branches moved
    on by one place, by two and so on, every pair stands face to face once, and coordinate ascent
    matches the insides of all of them at a time; an assignment then chooses among the pairs.

    Args:
        ascent: has run; it ends where the similarity is largest.
        generator: of the order of the sweeps.
        max_sweeps: sweeps per climb, and rounds.
    """
    every = range(len(ascent.plan.families))
    for _ in range(max_sweeps):
        start = ascent.score()
        for group in ascent.plan.branches:
            best, before = ascent.score(), list(ascent.permutations)
            order = assign(_table(ascent, group, generator, max_sweeps))
            _face(ascent, before, group, order, generator, max_sweeps)
            ascent.climb(every, generator, max_sweeps, None)
            if not ascent.score() > best + _GAIN * abs(best):
                ascent.at(before)
        if not ascent.score() > start + _GAIN * abs(start):
            return


def _table(ascent: Ascent, group: int, generator: torch.Generator, max_sweeps: int) -> Tensor:
    """How alike branches of the reference (rows) and of the network (columns) can become."""
    before = list(ascent.permutations)
    places = torch.arange(ascent.plan.sym.permutations[group].units)
    table = torch.zeros(len(places), len(places), dtype=torch.float64)
    for shift in range(len(places)):
        order = places.roll(-shift)
        _face(ascent, before, group, order, generator, max_sweeps)
        table[places, order] = _similarity(ascent, group)
    return table


def _face(
    ascent: Ascent,
    before: Sequence[Tensor],
    group: int,
    order: Tensor,
    generator: torch.Generator,
    max_sweeps: int,
) -> None:
    """Reorder branches as they stood, and match the units inside of those that meet."""
    plan = ascent.plan
    step = identity(plan.sym)
    step[group] = order
    ascent.at(compose(before, step, plan.sym))
    inside = plan.families_inside(group)
    moving = {g for k in inside for g in plan.families[k].members}
    known = set(range(len(plan.sym.permutations))) - moving
    ascent.climb(inside, generator, max_sweeps, known)


def _similarity(ascent: Ascent, group: int) -> Tensor:
    """Of every branch with what stands in its place, with its rows in a router."""
    plan, branches = ascent.plan, ascent.plan.sym.permutations[group]
    total = torch.zeros(branches.units, dtype=torch.float64)
    for row in branches.tensors:
        if row[0] in plan.compared:
            pairs = ((ascent.reference[n], ascent.current[n]) for n in row)
            total += torch.stack([(a.double() * b.double()).sum().cpu() for a, b in pairs])
    for place in branches.placements:
        if plan.sym.axes[place.axis].tensor in plan.compared:
            goal, own = (
                unit_rows(p, plan.sym, place).double() for p in (ascent.reference, ascent.current)
            )
            total += (goal * own).sum(-1).cpu()
    return total
