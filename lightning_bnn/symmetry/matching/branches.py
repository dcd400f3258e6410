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
        ascent: has run; it ends where the similarity is largest, one member after the other.
        generator: of the order of the sweeps.
        max_sweeps: sweeps per climb, and rounds.
    """
    if not ascent.plan.branches:
        return
    for member in range(ascent.now.members):
        one = ascent.of(member)
        _exchange(one, generator, max_sweeps)
        ascent.become(member, one)


def _exchange(ascent: Ascent, generator: torch.Generator, max_sweeps: int) -> None:
    """The same for one member."""
    every = range(len(ascent.plan.families))
    for _ in range(max_sweeps):
        start = float(ascent.score())
        for group in ascent.plan.branches:
            best, before = float(ascent.score()), _standing(ascent)
            order = assign(_table(ascent, group, generator, max_sweeps))
            _face(ascent, before, group, order, generator, max_sweeps)
            ascent.climb(every, generator, max_sweeps)
            if not float(ascent.score()) > best + _GAIN * abs(best):
                ascent.at([p[None] for p in before])
        if not float(ascent.score()) > start + _GAIN * abs(start):
            return


def _standing(ascent: Ascent) -> list[Tensor]:
    return [p[0] for p in ascent.now.permutations]


def _table(ascent: Ascent, group: int, generator: torch.Generator, max_sweeps: int) -> Tensor:
    """How alike branches of the reference (rows) and of the network (columns) can become."""
    before = _standing(ascent)
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
    ascent.at([p[None] for p in compose(before, step, plan.sym)])
    inside = plan.families_inside(group)
    moving = {g for k in inside for g in plan.families[k].members}
    known = set(range(len(plan.sym.permutations))) - moving
    ascent.climb(inside, generator, max_sweeps, known)


def _similarity(ascent: Ascent, group: int) -> Tensor:
    """Of every branch with what stands in its place, with its rows in a router."""
    plan, branches = ascent.plan, ascent.plan.sym.permutations[group]
    own = {n: t[0] for n, t in ascent.now.current.items()}
    goal = {n: ascent.now.reference[n] for n in plan.compared}
    total = torch.zeros(branches.units, dtype=torch.float64)
    for row in branches.tensors:
        if row[0] in plan.compared:
            total += torch.stack([(goal[n].double() * own[n].double()).sum().cpu() for n in row])
    for place in branches.placements:
        if plan.sym.axes[place.axis].tensor in plan.compared:
            a, b = (unit_rows(w, plan.sym, place).double() for w in (goal, own))
            total += (a * b).sum(-1).cpu()
    return total
