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
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import multiply
from lightning_bnn.symmetry.balanced_form import balance_group, balance_spaces, weights_of_spaces
from lightning_bnn.symmetry.groups import LinearGroup, Symmetries
from lightning_bnn.symmetry.mass_problem import Posynomial, mass_problem, plan
from lightning_bnn.symmetry.mixing import identity_mixings, multiplied
from lightning_bnn.symmetry.recession import minimise
from lightning_bnn.symmetry.spaces import covered, sides, weight_places
from lightning_bnn.symmetry.units import unit_rows

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
    """Alternate scales and matrices until the certified gap is below the tolerance.

    Returns what `MinMass` lists, in its order, for a stack.

    Args:
        params: one network or a stack, checked.
        sym: what `discover` returned.
        only: whether no other scales than those that groups of matrices contain may change.
        start: scales to start from.
        tolerance: certified relative gap at which to stop.
        most: rounds after which to stop in any case.
    """
    state = _State(params, sym, only, tolerance)
    before = value = state.problem().value
    if start is not None and not only:
        state.rescale(state.free * torch.cat([s.to(state.logs).log() for s in start], -1))
    state.mix()
    gap = torch.full_like(before, torch.inf)
    iteration, look, wait = 0, 0, 1
    while iteration < most and wait <= _PATIENCE:
        iteration += 1
        last, value = value, state.round()
        rests = bool(((last - value).abs() <= max(1e-4 * tolerance, 1e-15) * value).all())
        if (rests and iteration >= look) or iteration == most:
            seen, gap = gap, state.gap()
            if bool((gap <= tolerance).all()):
                break
            wait = 1 if bool((gap < 0.5 * seen).any()) else 2 * wait
            look = iteration + wait
    scales, matrices = state.elements(before)
    state_of_all = gap, iteration, state.dead(), state.attained
    return before, value, tuple(scales), *state_of_all, tuple(matrices)


class _State:
    """The weights as the scales and matrices found so far move them.

    Those that matrices act on are there as they are, the others are summed up.
    """

    def __init__(self, params: Params, sym: Symmetries, only: bool, tolerance: float) -> None:
        self.sym, self.tolerance = sym, tolerance
        self.groups = [k for k, g in enumerate(sym.linear) if g.kind == "general"]
        spaces = replace(sym, linear=tuple(sym.linear[k] for k in self.groups))
        stack, stacked = weights_of_spaces(params, spaces)
        self.first = params if stacked else {n: t[None] for n, t in params.items()}
        self.moving = {n: t for n, t in stack.items() if self.groups and n in sym.weights}
        self.free = _joined(covered(sym, sym.scalings, ("general",))).logical_not()
        if only:
            self.free &= _joined(covered(sym, sym.scalings, ("complex",)))
        rest = {n: self.first[n] for n in sym.weights if n not in self.moving}
        self.rest = mass_problem(rest, sym) if rest else None
        like = next(iter(stack.values()))
        self.free = self.free.to(like.device)
        self.logs = like.new_zeros(len(like), sym.scaling_dof)
        self.total = [m.to(like).repeat(len(like), 1, 1, 1) for m in identity_mixings(sym)]
        self.full = [torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) for t in self.total]
        self.attained = torch.ones(len(like), dtype=torch.bool, device=like.device)

    def problem(self) -> Posynomial:
        """The mass as a function of further log scales."""
        parts = [mass_problem(self.moving, self.sym)] if self.moving else []
        parts += [self.rest] if self.rest is not None else []
        matrices = tuple(m for part in parts for m in part.matrices)
        single = torch.stack([part.single for part in parts]).sum(0)
        return replace(parts[0], single=single, matrices=matrices, free=self.free)

    def rescale(self, u: Tensor) -> None:
        """Move all weights by log scales."""
        self.logs = self.logs + u
        self.moving = multiply(self.moving, self.sym, {"scalings": self._split(u.exp())})
        self.rest = None if self.rest is None else self.rest.moved(u)

    def _split(self, values: Tensor) -> list[Tensor]:
        return list(values.split([g.units for g in self.sym.scalings], -1))

    def round(self) -> Tensor:
        """Solve for scales, then for matrices, and return the mass."""
        problem = self.problem()
        exact = max(1e-2 * self.tolerance**2, _EXACT)
        solution = minimise(problem, torch.zeros_like(self.logs), exact, 200)
        if bool((solution.fall != 0).any()):
            self.attained &= solution.attained
            self._drop(solution.fall)
        self.rescale(solution.logs)
        self.mix()
        return self.problem().value

    def _drop(self, fall: Tensor) -> None:
        """The terms that scales drive to zero."""
        self.rest = None if self.rest is None else self.rest.without(fall)
        ones = {n: torch.ones_like(t) for n, t in self.moving.items()}
        for n, factor in multiply(ones, self.sym, {"scalings": self._split(fall.exp())}).items():
            self.moving[n] = torch.where(factor < 0.6, 0, self.moving[n])

    def mix(self) -> None:
        """Balance the spaces of every group, or go to the limit where none does."""
        for k in self.groups:
            group = self.sym.linear[k]
            solution = balance_group(self.moving, self.sym, group)
            matrices = solution.forward, solution.inverse_transpose
            self.moving = multiplied(self.moving, self.sym, group, *matrices)
            self.total[k] = solution.reached @ self.total[k]
            self.full[k] = self.full[k] & solution.full
            self.attained &= solution.full.all(-1)

    def gap(self) -> Tensor:
        """Certified relative gap of every member."""
        problem = self.problem()
        gap = certified_gap(problem, self.moving, self.sym)
        return torch.where(problem.value > 0, gap / problem.value, 0)

    def dead(self) -> Tensor:
        """Units, and spaces of matrices, that nothing balances."""
        problem = self.problem()
        units = self.free & ((problem.inflow == 0) | (problem.outflow == 0))
        return torch.stack([units.sum(-1), *((~full).sum(-1) for full in self.full)]).sum(0)

    def elements(self, before: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The scales and matrices, near the limit where none reaches it, never with more mass."""
        scales, total = self._split(self.logs.exp()), list(self.total)
        if bool(self.attained.all()):
            return scales, total
        stack = {n: t.double() for n, t in self.first.items() if n in self.sym.weights}
        stack = multiply(stack, self.sym, {"scalings": scales})
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


# ------------------------------------------------------------ certificate
_PASSES = 50


def certified_gap(problem: Posynomial, weights: Params, sym: Symmetries) -> Tensor:
    r"""Bound on the distance of the mass above its least value, for every member.

    Let m be the mass at a point. Every other point of the orbit has the mass of :math:`\exp(X)`
    acting on this one, up to rotations, with a symmetric matrix :math:`X_h` for every space and a
    log scale :math:`x_i` for every unit. Along :math:`\exp(t X)` each squared weight, in the
    eigenbasis of X, is multiplied by an exponential of t, so that the mass is convex in t, with the
    derivative

    .. math:: 2 \sum_h \langle X_h, A_h A_h^T - B_h B_h^T \rangle + 2 \sum_i x_i (in_i - out_i)

    at zero. A convex function lies above its tangent. With any bounds :math:`\|X_h\| \le L_h` and
    :math:`|x_i| \le U_i` that hold wherever the mass is at most m, the least mass is at least

    .. math:: m - 2 \sum_h L_h \|A_h A_h^T - B_h B_h^T\|_* - 2 \sum_i U_i |in_i - out_i|.

    The bounds: no part of the mass is larger than m. If the factors at the other end of the weights
    of unit i are known to be at least :math:`l_j`, then :math:`e^{2 x_i} \sum_j W_{ij}^2 l_j \le
    m`. For a space, :math:`\|e^X N^{1/2}\|^2 \ge \|e^X\|^2 \lambda_{min}(N)` with :math:`N = W
    diag(l) W^T` gives :math:`\log \|e^X\| \le \log(m / \lambda_{min}(N)) / 2`, and its other side
    bounds :math:`e^{-X}`. A space at the other end has the factor :math:`\sigma_{min}^2`
    everywhere. Inputs and outputs have factor one; from there the bounds spread through the
    network, all of them valid. A sum of log scales that is bounded bounds each of them where the
    others cannot fall without end.

    Args:
        problem: the mass as a function of the log scales that are free, at zero.
        weights: the tensors that matrices act on, as a stack.
        sym: what `discover` returned.
    """
    radii = _Radii(problem, weights, sym)
    widest = torch.maximum(radii.up, radii.down)
    gap = _product(widest, (problem.inflow - problem.outflow).abs())
    for group, owner in radii.spaces:
        a, b = radii.grams(group, owner, torch.zeros_like(widest), torch.zeros_like(widest))
        nuclear = torch.linalg.eigvalsh(a - b).abs().sum(-1)
        gap = gap + _product(widest[:, owner[:, 0]], nuclear)
    return 2 * gap


def _product(bound: Tensor, moment: Tensor) -> Tensor:
    return torch.where(moment == 0, 0, bound * moment).sum(-1)


class _Radii:
    """Bounds of how far the log scales of units, and of the channels of spaces, grow and fall."""

    def __init__(self, problem: Posynomial, weights: Params, sym: Symmetries) -> None:
        self.problem, self.weights, self.sym = problem, weights, sym
        general = [g for g in sym.linear if g.kind == "general"]
        self.spaces = [(g, _owners(sym, g).to(problem.single.device)) for g in general]
        assert problem.free is not None
        self.free = problem.free
        moving = torch.cat(
            [self.free.nonzero()[:, 0], *(owner.reshape(-1) for _, owner in self.spaces)]
        )
        self.up = torch.zeros_like(problem.inflow)
        self.up[:, moving] = torch.inf
        self.down = self.up.clone()
        for _ in range(_PASSES):
            before = torch.cat([self.up, self.down], -1)
            self._tighten()
            after = torch.cat([self.up, self.down], -1)
            if not bool((after < 0.95 * before).any()):
                break

    def _tighten(self) -> None:
        """One pass over all units, then one over all spaces."""
        n, mass, free = self.problem.variables, self.problem.value[:, None], self.free
        lowest = self._falls(self.up, self.down)
        bound = _half_log(mass, self.problem.beside((-2 * lowest).exp()))
        self.up = torch.where(free, self.up.minimum(bound[:, :n]), self.up)
        self.down = torch.where(free, self.down.minimum(bound[:, n + 1 : 2 * n + 1]), self.down)
        if len(self.problem.powers):
            self._tighten_products(bound[:, 2 * n + 1 :])
        for group, owner in self.spaces:
            for side, gram in zip(
                (self.up, self.down), self.grams(group, owner, self.up, self.down), strict=True
            ):
                larger = _half_log(mass, _least_eigenvalue(gram, mass))[..., None]
                side[:, owner] = side[:, owner].minimum(larger)

    def _against(self, up: Tensor, down: Tensor) -> Tensor:
        """For every power in a product, how far at most it can lower it."""
        _, variable = self.problem.powers.indices()
        power = self.problem.powers.values()
        return torch.where(power > 0, down[:, variable], up[:, variable]) * power.abs()

    def _falls(self, up: Tensor, down: Tensor) -> Tensor:
        """The largest fall of every log factor."""
        products = self._by_product(self._against(up, down))
        return torch.cat([down, up.new_zeros(len(up), 1), up, products], -1)

    def _by_product(self, values: Tensor) -> Tensor:
        zero = values.new_zeros(len(values), len(self.problem.powers))
        return zero.index_add(1, self.problem.powers.indices()[0], values)

    def _tighten_products(self, bound: Tensor) -> None:
        """Bound each log scale of a sum that is bounded, if the others are bounded below."""
        factor, variable = self.problem.powers.indices()
        power, against = self.problem.powers.values(), self._against(self.up, self.down)
        unknown = against.isinf()
        known = torch.where(unknown, 0, against)
        missing = self._by_product(unknown.to(bound))[:, factor] - unknown.to(bound)
        rest = (bound + self._by_product(known))[:, factor] - known
        rest = torch.where(missing > 0, torch.inf, rest / power.abs()).clamp_min(0)
        for side, here in ((self.up, power > 0), (self.down, power < 0)):
            here = here & self.free[variable]
            at = variable[here].expand(len(side), -1)
            side.scatter_reduce_(-1, at, rest[:, here], "amin")

    def grams(
        self, group: LinearGroup, owner: Tensor, up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        """W diag(l) W^T of both sides of every space of a group, for the least factors l."""
        least = (-self._falls(up, down)).exp()
        others = torch.ones(self.problem.variables, dtype=torch.bool, device=up.device)
        others[owner.reshape(-1)] = False
        beside = (-self._falls(*(torch.where(others, side, 0) for side in (up, down)))).exp()
        size = len(least), group.spaces, group.size, group.size
        result = {1: least.new_zeros(size), -1: least.new_zeros(size)}
        for placement in weight_places(self.sym, group):
            axis = self.sym.axes[placement.axis]
            w, recipe = self.weights[axis.tensor], plan(self.sym)[0][axis.tensor]
            if recipe.whole:
                w = w * least[:, recipe.factors[0].to(w.device)].reshape(w.shape)
            for side, index in zip(recipe.axes, recipe.factors, strict=False):
                table = beside if side.dim == axis.dim else least
                factors = table[:, index.reshape(-1).to(w.device)]
                w = w * side.spread(factors, w.shape[1:])
            rows = unit_rows({}, self.sym, placement, w)
            result[placement.exponent] = result[placement.exponent] + rows @ rows.mT
        return result[1], result[-1]


def _owners(sym: Symmetries, group: LinearGroup) -> Tensor:
    """The variables of the scales that the channels of every space have, ``(spaces, size)``."""
    placement, start = group.placements[0], 0
    axis = sym.axes[placement.axis]
    variable = torch.full((axis.blocks * axis.size,), -1)
    for scaling, own in zip(sym.scalings, covered(sym, sym.scalings, ("general",)), strict=True):
        for p in scaling.placements:
            if p.axis == placement.axis:
                units = start + torch.arange(scaling.units)[own]
                variable[p.positions[own]] = units[:, None].expand_as(p.positions[own])
        start += scaling.units
    return variable[placement.positions[..., 0]]


def _least_eigenvalue(gram: Tensor, mass: Tensor) -> Tensor:
    """Of the channels that are there: the rows of the others are zero, and count as fixed."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    gram = gram + torch.diag_embed(torch.where(diagonal == 0, mass[..., None], 0))
    values = torch.linalg.eigvalsh(gram)
    return (values[..., 0] - 1e-15 * gram.shape[-1] * values[..., -1]).clamp_min(0)


def _half_log(mass: Tensor, part: Tensor) -> Tensor:
    """Largest log of a factor whose square times a part of the mass is at most the mass."""
    return torch.where(part > 0, (mass / part).log() / 2, torch.inf).clamp_min(0)
