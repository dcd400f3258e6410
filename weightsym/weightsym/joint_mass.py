"""The least mass over scales and the matrices of heads together: closed forms in turn.

The mass is convex along geodesics of the positive scales and symmetric matrices, so that no other
minimum is in the way. With the matrices held, `minimise` solves for the scales; with the scales
held, the spaces of a group have a closed form, `balance_spaces`, whose minimum is twice the nuclear
norm of the product of their two sides. Complex numbers are scales here, for phases do not matter.

Where the product has no full rank no matrix reaches the minimum. The weights then go to their
limit, with zeros for the directions that lead nowhere; matrices near it are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weightsym.actions import multiply
from weightsym.balanced_form import balance_group, balance_spaces
from weightsym.groups import Symmetries
from weightsym.mass_problem import Posynomial, mass_problem
from weightsym.mixing import identity_mixings, multiplied
from weightsym.params import Params, is_stacked
from weightsym.recession import minimise
from weightsym.spaces import covered, sides
from weightsym.validation import check_squares

__all__ = ["solve_jointly"]

_PATIENCE = 16  # rounds without half the gap, after which rounding is to blame
_EXACT = 1e-24  # of the scales: their gap is of the order of the square of the joint one


def solve_jointly(
    params: Params,
    sym: Symmetries,
    only: bool,
    start: Sequence[Tensor] | None,
    tolerance: float,
    most: int,
) -> tuple[Any, ...]:
    """Alternate scales and matrices until the gap is below the tolerance.

    Returns what `MinMass` lists, in its order, for a stack.

    Args:
        params: one network or a stack, checked.
        sym: what `discover` returned.
        only: whether no other scales than those that groups of matrices contain may change.
        start: scales to start from.
        tolerance: relative gap at which to stop.
        most: rounds after which to stop in any case.
    """
    state = _State(params, sym, only, tolerance)
    before = state.terms.value
    if start is not None and not only:
        state.rescale(state.free * torch.cat([s.to(state.logs).log() for s in start], -1))
    state.mix()
    gap = least = torch.full_like(before, torch.inf)
    iteration = wait = 0
    while iteration < most and wait < _PATIENCE and not bool((gap <= tolerance).all()):
        state.round()
        iteration, gap = iteration + 1, state.gap()
        wait = 0 if bool((gap < 0.5 * least).any()) else wait + 1
        least = torch.where(gap < 0.5 * least, gap, least)
    scales, matrices = state.elements(before)
    state_of_all = gap, iteration, state.dead(), state.attained
    return before, state.terms.value, tuple(scales), *state_of_all, tuple(matrices)


class _State:
    """The weights as the scales and matrices found so far move them, and their mass."""

    def __init__(self, params: Params, sym: Symmetries, only: bool, tolerance: float) -> None:
        self.sym, self.tolerance = sym, tolerance
        self.groups = [k for k, g in enumerate(sym.linear) if g.kind == "general"]
        offset = is_stacked(params, sym.shapes)
        weights = {n: params[n].detach().double() for n in sym.weights if n in params}
        check_squares(weights)
        self.given = weights if offset else {n: w[None] for n, w in weights.items()}
        like = next(iter(self.given.values()))
        free = _joined(covered(sym, sym.scalings, ("general",))).logical_not()
        if only:
            free &= _joined(covered(sym, sym.scalings, ("complex",)))
        self.moving, self.free = self.given, free.to(like.device)
        self.logs = like.new_zeros(len(like), sym.scaling_dof)
        self.total = [m.to(like).repeat(len(like), 1, 1, 1) for m in identity_mixings(sym)]
        self.full = [torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) for t in self.total]
        self.attained = torch.ones(len(like), dtype=torch.bool, device=like.device)

    @cached_property
    def terms(self) -> Posynomial:
        """The mass as a function of further log scales."""
        return replace(mass_problem(self.moving, self.sym), free=self.free)

    def _move(self, moving: Params) -> None:
        self.moving = moving
        vars(self).pop("terms", None)

    def rescale(self, u: Tensor) -> None:
        """Move all weights by log scales."""
        self.logs = self.logs + u
        self._move(multiply(self.moving, self.sym, {"scalings": self._split(u.exp())}))

    def _split(self, values: Tensor) -> list[Tensor]:
        return list(values.split([g.units for g in self.sym.scalings], -1))

    def round(self) -> None:
        """Solve for scales, then for matrices."""
        exact = max(1e-2 * self.tolerance**2, _EXACT)
        solution = minimise(self.terms, torch.zeros_like(self.logs), exact, 200)
        if bool((solution.fall != 0).any()):
            self.attained &= solution.attained
            self._drop(solution.fall)
        self.rescale(solution.logs)
        self.mix()

    def _drop(self, fall: Tensor) -> None:
        """The weights that scales drive to zero."""
        ones = {n: torch.ones_like(t) for n, t in self.moving.items()}
        factors = multiply(ones, self.sym, {"scalings": self._split(fall.exp())})
        self._move({n: torch.where(factors[n] < 0.6, 0, w) for n, w in self.moving.items()})

    def mix(self) -> None:
        """Balance the spaces of every group, or go to the limit where none does."""
        for k in self.groups:
            group = self.sym.linear[k]
            solution = balance_group(self.moving, self.sym, group)
            matrices = solution.forward, solution.inverse_transpose
            self._move(multiplied(self.moving, self.sym, group, *matrices))
            self.total[k] = solution.reached @ self.total[k]
            self.full[k] = self.full[k] & solution.full
            self.attained &= solution.full.all(-1)

    def gap(self) -> Tensor:
        r"""Relative gap of every member, if no log scale is farther than one from its best.

        The mass is convex along :math:`\exp(t X)`, and lies above its tangent:

        .. math:: m - m^* \le 2 \max_h \|X_h\| \sum_h \|A_h A_h^T - B_h B_h^T\|_*
            + 2 \max_i |x_i| \sum_i |in_i - out_i|
        """
        excess = (self.terms.inflow - self.terms.outflow).abs().sum(-1)
        for k in self.groups:
            a, b = sides(self.moving, self.sym, self.sym.linear[k])
            excess = excess + torch.linalg.eigvalsh(a @ a.mT - b @ b.mT).abs().sum((-1, -2))
        return torch.where(self.terms.value > 0, 2 * excess / self.terms.value, 0)

    def dead(self) -> Tensor:
        """Units, and spaces of matrices, that nothing balances."""
        units = self.free & ((self.terms.inflow == 0) | (self.terms.outflow == 0))
        return torch.stack([units.sum(-1), *((~full).sum(-1) for full in self.full)]).sum(0)

    def elements(self, before: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The scales and matrices, near the limit where none reaches it, never with more mass."""
        scales, total = self._split(self.logs.exp()), list(self.total)
        if bool(self.attained.all()):
            return scales, total
        stack = multiply(self.given, self.sym, {"scalings": scales})
        for k in self.groups:
            near = _near_limit(*sides(stack, self.sym, self.sym.linear[k]))
            total[k] = torch.where(self.full[k][..., None, None], total[k], near)
            inverse = torch.linalg.inv(total[k]).mT
            stack = multiplied(stack, self.sym, self.sym.linear[k], total[k], inverse)
        worse = mass_problem(stack, self.sym).value > before * (1 + 1e-12)
        eyes = (torch.eye(t.shape[-1]).to(t).expand_as(t) for t in total)
        total = [
            torch.where(worse[:, None, None, None], e, t) for e, t in zip(eyes, total, strict=True)
        ]
        return [torch.where(worse[:, None], 1, s) for s in scales], total


def _joined(masks: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.bool), *masks])


def _near_limit(a: Tensor, b: Tensor) -> Tensor:
    """Matrices that balance both sides and a little of everything, unless that adds mass."""
    size = a.shape[-2]
    eye = torch.eye(size).to(a)
    before = a.square().sum((-1, -2)) + b.square().sum((-1, -2))
    little = 1e-3 * (before / size).sqrt()[..., None, None] * eye
    solution = balance_spaces(torch.cat([a, little], -1), torch.cat([b, little], -1))
    after = (solution.forward @ a).square().sum((-1, -2))
    after = after + (solution.inverse_transpose @ b).square().sum((-1, -2))
    better = (after <= before) & solution.full
    return torch.where(better[..., None, None], solution.forward, eye)
