"""The least mass over scales and the matrices of heads together: closed forms in turn.

The mass is convex along geodesics of the positive scales and symmetric matrices, so that no other
minimum is in the way. With the matrices held, `balance` solves for the scales; with the scales
held, the spaces of a group have a closed form, `balance_spaces`, whose minimum is twice the nuclear
norm of the product of their two sides. Complex numbers are scales here, for phases do not matter.

Where the product has no full rank no matrix reaches the minimum. The weights then go to their
limit, with zeros for the directions that lead nowhere; matrices near it are returned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import multiply
from lightning_bnn.symmetry.attainment import Flat, Floating, without_vanishing_terms
from lightning_bnn.symmetry.balanced_form import balance_spaces, weights_of_spaces
from lightning_bnn.symmetry.balancing import balance
from lightning_bnn.symmetry.groups import ScalingGroup, Symmetries
from lightning_bnn.symmetry.joint_bounds import JointPoint, certified_gap
from lightning_bnn.symmetry.joint_curvature import gap_by_curvature
from lightning_bnn.symmetry.mass_problem import MassProblem, mass_problem
from lightning_bnn.symmetry.mixing import identity_mixings
from lightning_bnn.symmetry.placements import Placement
from lightning_bnn.symmetry.spaces import coupled, covered, multiplied, sides

__all__ = ["JointMinimum", "solve_jointly", "without_free_scales"]


_PATIENCE = 16  # rounds without half the gap, after which rounding is to blame
_EXACT = 1e-24  # the gap falls with the step, not with its square


class JointMinimum(NamedTuple):
    """What `min_mass` reports, for a stack: see `MinMass`."""

    mass: Tensor
    minimum: Tensor
    logs: Tensor
    matrices: list[Tensor]
    gap: Tensor
    iterations: int
    dead: Tensor
    attained: Tensor


def solve_jointly(
    params: Params, sym: Symmetries, start: Tensor | None, tolerance: float, most: int
) -> JointMinimum:
    """Alternate scales and matrices until the certified gap is below the tolerance.

    Args:
        params: one network or a stack, checked.
        sym: what `discover` returned.
        start: log scales to start from.
        tolerance: certified relative gap at which to stop.
        most: rounds after which to stop in any case.
    """
    state = _State(params, sym, start)
    before = state.problem().value(torch.zeros_like(state.u))
    state.go_to_limit()
    value, gap = before, torch.full_like(before, torch.inf)
    iteration, look, wait = 0, 0, 1
    while iteration < most and wait <= _PATIENCE:
        iteration += 1
        last, value = value, state.round()
        rests = bool((last - value <= max(1e-4 * tolerance, 1e-15) * value).all())
        if (rests and iteration >= look) or iteration == most:
            seen, gap = gap, state.gap()
            if bool((gap <= tolerance).all()):
                break
            falls = bool((gap < 0.5 * seen).any())
            wait = 1 if falls else 2 * wait
            look = iteration + wait
    logs, matrices = _no_worse(params, state, before)
    return JointMinimum(before, value, logs, matrices, gap, iteration, state.dead(), state.attained)


class _State:
    """Log scales and weights: those that matrices act on are there, the others are summed up."""

    def __init__(self, params: Params, sym: Symmetries, start: Tensor | None) -> None:
        self.sym = sym
        self.groups = [k for k, g in enumerate(sym.linear) if g.kind == "general"]
        only = replace(sym, linear=tuple(sym.linear[k] for k in self.groups))
        stack, _ = weights_of_spaces(params, only)
        self.first = stack if self.groups else {}
        self.moving = {n: t for n, t in self.first.items() if n in sym.weights}
        rest = {n: params[n] for n in sym.weights if n not in self.moving}
        parts = [mass_problem(rest, sym)] if rest else []
        self.rest = parts[0] if parts else None
        self.known: MassProblem | None = None
        like = next(iter(stack.values()))
        self.u = like.new_zeros(like.shape[0], sym.scaling_dof)
        if start is not None:
            self.u = self.u + start.to(self.u)
        mixed = covered(sym, sym.scalings, ("general",))
        self.free = ~torch.cat([torch.zeros(0, dtype=torch.bool), *mixed]).to(like.device)
        self.u = self.u * self.free
        self.total = [m.to(like).repeat(like.shape[0], 1, 1, 1) for m in identity_mixings(sym)]
        self.full = [torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) for t in self.total]
        self.feeds = {k: coupled(sym, sym.linear[k], [sym.linear[k]]) for k in self.groups}
        self.attained = torch.ones_like(self.u[:, :0].sum(-1), dtype=torch.bool)
        self.fall = torch.zeros_like(self.u)
        self.alive = self.free.expand_as(self.u)
        self.owners = tuple(_owners(sym, k) for k in self.groups)

    def problem(self) -> MassProblem:
        """The mass as a function of the log scales, with the matrices found so far."""
        if self.known is None:
            self.known = self._problem()
        return self.known

    def _problem(self) -> MassProblem:
        if not self.moving:
            assert self.rest is not None
            return self.rest
        new = mass_problem(self.moving, self.sym)
        if self.rest is None:
            return new
        return MassProblem(
            self.rest.constant + new.constant,
            self.rest.plus + new.plus,
            self.rest.minus + new.minus,
            (*self.rest.matrices, *new.matrices),
            new.sizes,
            new.composites,
            self.rest.others + new.others,
        )

    def scaled(self, u: Tensor) -> Params:
        """The weights that matrices act on, with scales applied."""
        return multiply(self.moving, self.sym, {"scalings": self.split(u.exp())})

    def split(self, values: Tensor) -> list[Tensor]:
        """Values of all units, group by group."""
        return list(values.split([g.units for g in self.sym.scalings], -1))

    def round(self) -> Tensor:
        """Scales, then matrices; returns the mass."""
        self.u, _ = balance(self.problem(), self.u, self.alive, _EXACT, 200)
        self.mix()
        return self.problem().value(self.u)

    def mix(self) -> None:
        """Balance the spaces of every group, or go to the limit where none does."""
        scaled = self.scaled(self.u) if self.moving else {}
        for k in self.groups:
            group = self.sym.linear[k]
            found = balance_spaces(*sides(scaled, self.sym, group))
            forward, inverse, full = found.forward, found.inverse_transpose, found.full
            eye = torch.eye(group.size).to(forward).expand_as(forward)
            if self.feeds[k]:
                forward = torch.where(full[..., None, None], _half(forward, full), eye)
                inverse = torch.linalg.inv(forward).mT
            scaled = multiplied(scaled, self.sym, group, forward, inverse)
            reached = torch.where(full[..., None, None], forward, eye)
            self.total[k] = reached @ self.total[k]
            self.full[k] = self.full[k] & full
        if self.moving:
            self.moving = multiply(scaled, self.sym, {"scalings": self.split((-self.u).exp())})
            self.known = None

    def go_to_limit(self) -> None:
        """Drop what matrices or scales can drive to zero."""
        for _ in range(4):
            self.mix()
            kept, attained, floating = without_vanishing_terms(self.problem())
            self.attained &= attained
            self.fall = self.fall + floating.fall
            self._drop(kept, floating)
            if bool(attained.all()):
                break
        flow = kept.flow(torch.zeros_like(self.u))
        there = (flow.inflow > 0) & (flow.outflow > 0)
        self.alive = self.free & there & ~floating.pinned()
        self.u = self.u * self.alive
        for k in self.groups:
            self.attained &= self.full[k].all(-1)

    def _drop(self, kept: MassProblem, floating: Floating | Flat) -> None:
        if self.rest is not None:
            self.rest = replace(
                self.rest,
                plus=self.rest.plus * (kept.plus > 0),
                minus=self.rest.minus * (kept.minus > 0),
                others=self.rest.others * (kept.others > 0),
                matrices=kept.matrices[: len(self.rest.matrices)],
            )
        self.known = None
        far = self.split((40 * floating.fall).exp())
        ones = {n: torch.ones_like(t) for n, t in self.moving.items()}
        for n, factor in multiply(ones, self.sym, {"scalings": far}).items():
            self.moving[n] = torch.where(factor < 1e-6, 0, self.moving[n])

    def gap(self) -> Tensor:
        """Certified relative gap of every member."""
        problem = self.problem()
        groups = tuple(self.sym.linear[k] for k in self.groups)
        point = JointPoint(
            problem, self.u, self.alive, self.scaled(self.u), self.sym, groups, self.owners
        )
        value, gap = problem.value(self.u), certified_gap(point)
        if bool(gap.isinf().any()):
            gap = torch.minimum(gap, gap_by_curvature(point))
        return torch.where(value > 0, gap / value, 0)

    def dead(self) -> Tensor:
        """Units, and spaces of matrices, that nothing balances."""
        flow = self.problem().flow(self.u)
        units = self.free & ~((flow.inflow > 0) & (flow.outflow > 0))
        spaces = [(~self.full[k]).sum(-1) for k in self.groups]
        return torch.stack([units.sum(-1), *spaces]).sum(0)


def _half(step: Tensor, full: Tensor) -> Tensor:
    """Half of a step, for a space with one tensor on both sides."""
    eye = torch.eye(step.shape[-1]).to(step)
    values, vectors = torch.linalg.eigh(torch.where(full[..., None, None], step.mT @ step, eye))
    return vectors * values.clamp_min(1e-300)[..., None, :] ** 0.25 @ vectors.mT


def _owners(sym: Symmetries, k: int) -> Tensor:
    """The variables of the scales that the channels of every space have, ``(spaces, size)``."""
    group, start = sym.linear[k], 0
    place = group.placements[0]
    axis = sym.axes[place.axis]
    variable = torch.full((axis.blocks * axis.size,), -1)
    for scaling, own in zip(sym.scalings, covered(sym, sym.scalings, ("general",)), strict=True):
        units = start + torch.arange(scaling.units)
        for p in scaling.placements:
            if p.axis == place.axis:
                variable[p.positions[own]] = units[own, None].expand_as(p.positions[own])
        start += scaling.units
    return variable[place.positions[..., 0]]


# ------------------------------------------------------------ elements that come near
def _no_worse(params: Params, state: _State, before: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The scales and matrices found; near the limit where none reaches it, never with more mass."""
    if bool(state.attained.all()):
        return state.u, state.total
    sym, total = state.sym, list(state.total)
    scaled = multiply(state.first, sym, {"scalings": state.split(state.u.exp())})
    for k in state.groups:
        near = _near_limit(*sides(scaled, sym, sym.linear[k]))
        total[k] = torch.where(state.full[k][..., None, None], total[k], near)
        scaled = multiplied(scaled, sym, sym.linear[k], total[k], torch.linalg.inv(total[k]).mT)
    worse = _mass_after(params, state, scaled) > before * (1 + 1e-12)
    eyes = (torch.eye(t.shape[-1]).to(t).expand_as(t) for t in total)
    back = worse[:, None, None, None]
    u = torch.where(worse[:, None], 0, state.u)
    return u, [torch.where(back, eye, t) for eye, t in zip(eyes, total, strict=True)]


def _mass_after(params: Params, state: _State, scaled: Params) -> Tensor:
    """Mass of the network itself, not of its limit."""
    rest = {n: params[n] for n in state.sym.weights if n not in state.first}
    parts = [t.square().flatten(1).sum(-1) for t in scaled.values()]
    if rest:
        parts.append(mass_problem(rest, state.sym).value(state.u))
    return torch.stack(parts).sum(0)


def _near_limit(a: Tensor, b: Tensor) -> Tensor:
    """Matrices that balance both sides and a little of everything, unless that adds mass."""
    size = a.shape[-2]
    eye = torch.eye(size).to(a)
    before = a.square().sum((-1, -2)) + b.square().sum((-1, -2))
    little = 1e-3 * (before / size).sqrt()[..., None, None] * eye
    found = balance_spaces(torch.cat([a, little], -1), torch.cat([b, little], -1))
    after = (found.forward @ a).square().sum((-1, -2))
    after = after + (found.inverse_transpose @ b).square().sum((-1, -2))
    better = (after <= before) & found.full
    return torch.where(better[..., None, None], found.forward, eye)


# ------------------------------------------------------------ matrices without scales
def without_free_scales(sym: Symmetries) -> tuple[Symmetries, list[Tensor]]:
    """The symmetries with those scales only that groups of matrices contain, and which these are.

    Args:
        sym: what `discover` returned.
    """
    inside = covered(sym, sym.scalings, ("general", "complex"))
    groups = [
        ScalingGroup(
            int(units.sum()),
            g.name,
            tuple(Placement(p.axis, p.positions[units], p.exponent) for p in g.placements),
        )
        for g, units in zip(sym.scalings, inside, strict=True)
    ]
    return replace(sym, scalings=tuple(g for g in groups if g.units)), list(inside)
