"""The least mass over all rescalings, or its limit if none reaches it, with a certificate.

The minimum over scales and the matrices of heads is found by alternating closed forms. The mass is
convex along geodesics of the positive scales and symmetric matrices, so that there are no other
minima. With fixed matrices, `minimise` solves for the scales. With fixed scales, the spaces of a
group have a closed form, `balance_spaces`, whose minimum is twice the nuclear norm of the product
of their two sides. Complex numbers act as scales, since phases do not matter.

If the product has no full rank, no matrix reaches the minimum. The weights then go to their limit,
with zeros along the vanishing directions, and matrices near it are returned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from weightsym.forms.balanced_form import balance_group, balance_spaces, sides
from weightsym.forms.balancing import minimise, no_worse
from weightsym.forms.mass_problem import Posynomial, mass_problem, square_sums
from weightsym.groups.actions import act, multiply_sides
from weightsym.groups.elements import identity_mixings
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import (
    check_element,
    check_finite,
    check_params,
    check_some,
    check_squares,
)
from weightsym.networks.dicts import Computed
from weightsym.params import Params, is_stacked

_log = logging.getLogger(__name__)
_PATIENCE = 16  # rounds without half the gap, after which rounding is to blame
_EXACT = 1e-24  # of the scales: their gap is of the order of the square of the joint one


@dataclass(frozen=True)
class MinMass:
    r"""The least mass over all rescalings, of one network or of every member of a stack.

    .. math:: \text{excess} = 100\, (M / M_{min} - 1)

    Attributes:
        mass: mass of the given network.
        minimum: the least mass, or its infimum if no finite scales reach it.
        scales: scales that reach it, for `rescale`; if there are none, finite ones that balance all
            other units without more mass than before.
        gap: certified bound on ``(minimum - true minimum) / minimum``; with ``mixing`` it holds
            where no log scale is farther than one from its best.
        iterations: Newton steps; with ``mixing``, rounds of scales and matrices.
        dead: units without incoming or without outgoing weight; their scale is one.
        attained: whether finite scales reach the minimum. They do not if weights lead only to, or
            come only from, units that cannot be balanced, such as those before a head of zeros.
        matrices: with ``mixing``, matrices for `mix` that reach it together with the scales, or
            nearly so if none do.
        falling: units that lose all of their weights in the limit, such as the rows of
            a normalised weight, or all of those above.
        excess: mass above the minimum, in percent of it.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, min_mass
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> least = min_mass(P.populate(net, 5), discover(net, torch.randn(8, 2)))
    >>> bool((least.gap < 1e-9).all()), bool((least.excess > 0).all()), least.minimum.shape
    (True, True, torch.Size([5]))
    """

    mass: Float64[Tensor, "*members"]
    minimum: Float64[Tensor, "*members"]
    scales: tuple[Float64[Tensor, "*members _units"], ...] = field(repr=False)
    gap: Float64[Tensor, "*members"]
    iterations: int
    dead: Int[Tensor, "*members"]
    attained: Bool[Tensor, "*members"]
    matrices: tuple[Tensor, ...] = field(default=(), repr=False)
    falling: tuple[Bool[Tensor, "*members _units"], ...] = field(default=(), repr=False)

    @property
    def excess(self) -> Tensor:
        """Mass above the minimum, in percent of it, and infinite above a minimum of zero."""
        return excess(self.mass, self.minimum)


def excess(mass: Tensor, minimum: Tensor) -> Tensor:
    """Return the excess of masses over a minimum, in percent, and zero between zeros.

    >>> excess(torch.tensor([3.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.0]))
    tensor([50.,  0., inf])
    """
    nothing = (mass == 0) & (minimum == 0)
    return torch.where(nothing, 0, 100 * (mass / minimum - 1))


def min_mass(
    params: Mapping[str, Tensor],
    sym: Symmetries,
    *,
    mixing: bool | Literal["only"] = False,
    start: Sequence[Tensor] | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
) -> MinMass:
    r"""Find the scales of least mass (P1, the min-mass problem), or scales and matrices.

    .. math:: \min_{s > 0} M(s \cdot \theta)

    Args:
        params: one network or a stack.
        sym: result of `discover`.
        mixing: also over the matrices that mix the channels of heads and adapters (``sym.linear``);
            ``"only"`` for these alone, with no other scale. Rotations do not change the mass.
        start: initial scales, such as those of the previous step.
        tolerance: certified relative gap at which to stop.
        max_iterations: largest number of steps or rounds.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, mass, min_mass, rescale
    >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    >>> w = P.of(net) | {"0.weight": torch.tensor([[4.0]]), "2.weight": torch.tensor([[1.0]])}
    >>> sym = discover(net, torch.randn(8, 1))
    >>> least = min_mass(w, sym)  # at s = 1/2, both weights are 2
    >>> least.mass.item(), round(least.minimum.item(), 4), least.scales[0].round(decimals=4)
    (17.0, 8.0, tensor([0.5000], dtype=torch.float64))
    >>> torch.allclose(mass(rescale(w, sym, least.scales), sym), least.minimum)
    True
    """
    if not tolerance > 0 or max_iterations < 1:
        raise ValueError(
            "`tolerance` must be positive and `max_iterations` at least 1, "
            f"got {tolerance} and {max_iterations}."
        )
    if mixing not in (False, True, "only"):
        raise ValueError(f"`mixing` must be True, False or 'only', got {mixing!r}.")
    stacked = check_params(params, sym)
    check_some(params, sym)
    members = len(next(iter(params.values()))) if stacked else None
    start = None if start is None else check_element("scalings", start, sym, members, "start")
    if mixing is False:
        solution = _over_scales(params, sym, start, tolerance, max_iterations)
    else:
        check_finite(params, sym)
        only, far = mixing == "only", [n for n in sym.weights if n in params]
        near = set(far) if only else _near_matrices(sym) & set(far) or set(far)
        far = [n for n in far if n not in near]
        some = {n: params[n] for n in sym.weights if n in near}
        solution = _jointly(some, sym, only, start, tolerance, max_iterations)
        if far:
            others = Computed(far, params.__getitem__, params)
            exact = max(1e-2 * tolerance**2, _EXACT)
            alone = _over_scales(others, sym, start, exact, max_iterations)
            solution = _together(solution, alone)
    if stacked:
        return solution
    return replace(solution, **{n: _first(v) for n, v in vars(solution).items()})


def _near_matrices(sym: Symmetries) -> set[str]:
    """Return the tensors of general matrices, and of all scales that meet these, one by another."""
    near = {n for group in sym.linear if group.kind == "general" for n in sym.moved_by(group)}
    moved, size = [sym.moved_by(group) for group in sym.scalings], -1
    while len(near) != size:
        size = len(near)
        near |= {n for names in moved if names & near for n in names}
    return near


def _concerned(params: Mapping[str, Tensor], sym: Symmetries) -> Tensor:
    """Return a mask of the scales of some tensors."""
    return _joined(
        [torch.full((g.units,), bool(sym.moved_by(g) & params.keys())) for g in sym.scalings]
    )


def _together(joint: MinMass, alone: MinMass) -> MinMass:
    """Return the least mass of all tensors, in two parts that share no scale."""
    least = joint.minimum + alone.minimum
    gaps = joint.gap * joint.minimum + alone.gap * alone.minimum
    return replace(
        joint,
        mass=joint.mass + alone.mass,
        minimum=least,
        scales=tuple(a * b for a, b in zip(joint.scales, alone.scales, strict=True)),
        gap=torch.where(least > 0, gaps / least, 0),
        dead=joint.dead + alone.dead,
        attained=joint.attained & alone.attained,
        falling=tuple(a | b for a, b in zip(joint.falling, alone.falling, strict=True)),
    )


def _over_scales(
    params: Mapping[str, Tensor],
    sym: Symmetries,
    start: Sequence[Tensor] | None,
    tolerance: float,
    most: int,
) -> MinMass:
    whole = mass_problem(params, sym)
    u = torch.zeros_like(whole.inflow)
    here = _concerned(params, sym).to(u.device)
    dead = (here & ((whole.inflow == 0) | (whole.outflow == 0))).sum(-1)
    if bool((dead > 0).any()):
        _log.info(
            "min_mass: %d units without incoming or outgoing weight keep their scale.",
            int(dead.max()),
        )
    u = u if start is None else _join(start, u)
    solution = minimise(whole, u, tolerance, most)
    scales = no_worse(whole, solution).exp().split([g.units for g in sym.scalings], -1)
    reached = solution.gap, solution.steps, dead, solution.attained
    falling = _falling(whole, solution.problem, sym)
    return MinMass(whole.value, solution.value, scales, *reached, falling=falling)


def _falling(whole: Posynomial, left: Posynomial, sym: Symmetries) -> tuple[Tensor, ...]:
    """Return the units with weights of which none is left in the limit."""
    some, still = ((p.inflow != 0) | (p.outflow != 0) for p in (whole, left))
    return (some & ~still).split([g.units for g in sym.scalings], -1)


def _first(value: Any) -> Any:
    """Return the value of the first member of a stack."""
    if isinstance(value, tuple):
        return tuple(t[0] for t in value)
    return value[0] if isinstance(value, Tensor) else value


def _join(scales: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([s.to(like).log().expand(like.shape[0], s.shape[-1]) for s in scales], -1)


# ------------------------------------------------------------ scales and matrices
def _jointly(
    params: Mapping[str, Tensor],
    sym: Symmetries,
    only: bool,
    start: Sequence[Tensor] | None,
    tolerance: float,
    most: int,
) -> MinMass:
    """Alternate scales and matrices until the gap is below the tolerance, for a stack.

    With ``only`` no scales change except those in groups of matrices.
    """
    state = _Balance(params, sym, only, tolerance)
    before = state.terms.value
    if start is not None and not only:
        state.rescale(state.free * _join(start, state.logs))
    state.mix()
    gap = least = state.gap()
    iteration = wait = 0
    while iteration < most and wait < _PATIENCE and not bool((gap <= tolerance).all()):
        state.round()
        iteration, gap = iteration + 1, state.gap()
        wait = 0 if bool((gap < 0.5 * least).any()) else wait + 1
        least = torch.where(gap < 0.5 * least, gap, least)
    scales, matrices = state.elements(before)
    found = gap, iteration, state.dead(), state.attained
    whole, moving = (mass_problem(w, sym) for w in (state.given, state.moving))
    alone, mixed = (_falling(whole, p, sym) for p in (moving, state.terms))
    reached = state.attained[:, None]  # else the channels that matrices move have no least mass
    falling = [torch.where(reached, *masks) for masks in zip(alone, mixed, strict=True)]
    mass, minimum = before + state.still, state.terms.value + state.still
    return MinMass(mass, minimum, tuple(scales), *found, tuple(matrices), tuple(falling))


class _Balance:
    """The weights, moved by the current scales and matrices, and their mass."""

    def __init__(
        self, params: Mapping[str, Tensor], sym: Symmetries, only: bool, tolerance: float
    ) -> None:
        self.sym, self.tolerance = sym, tolerance
        self.groups = [k for k, g in enumerate(sym.linear) if g.kind == "general"]
        offset = is_stacked(params, sym.shapes)
        moved = {n for group in sym.scalings for n in sym.moved_by(group)}
        moved |= {n for group in sym.linear for n in sym.moved_by(group)}
        weights = {n: params[n].detach() for n in sym.weights if n in params}
        moved = moved & weights.keys() or set(weights)
        still = [w if offset else w[None] for n, w in weights.items() if n not in moved]
        norms = [square_sums(w, ()) for w in still]
        self.still = torch.stack(norms).sum(0) if norms else torch.zeros(())
        weights = {n: w.double() for n, w in weights.items() if n in moved}
        check_squares(weights)
        self.given = weights if offset else {n: w[None] for n, w in weights.items()}
        like = next(iter(self.given.values()))
        free = _joined(sym.covered(sym.scalings, ("general",))).logical_not()
        if only:
            free &= _joined(sym.covered(sym.scalings, ("complex",)))
        free &= _concerned(params, sym)
        self.moving, self.free = self.given, free.to(like.device)
        self.logs = like.new_zeros(len(like), sym.scaling_dof)
        self.total = identity_mixings(sym, self.given)
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
        self._move(act(self.moving, self.sym, {"scalings": self._split(u.exp())}))

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
        """Remove the weights that scales drive to zero."""
        ones = {n: torch.ones_like(t) for n, t in self.moving.items()}
        factors = act(ones, self.sym, {"scalings": self._split(fall.exp())})
        self._move({n: torch.where(factors[n] < 0.6, 0, w) for n, w in self.moving.items()})

    def mix(self) -> None:
        """Balance the spaces of every group, or approach the limit if no matrix balances them."""
        for k in self.groups:
            group = self.sym.linear[k]
            solution = balance_group(self.moving, self.sym, group)
            matrices = solution.forward, solution.inverse_transpose
            self._move(multiply_sides(self.moving, self.sym, k, *matrices))
            self.total[k] = solution.reached @ self.total[k]
            self.full[k] = self.full[k] & solution.full
            self.attained &= solution.full.all(-1)

    def gap(self) -> Tensor:
        r"""Bound the relative gap of every member, if log scales are within one of their best.

        The mass is convex along :math:`\exp(t X)`, and lies above its tangent:

        .. math:: m - m^* \le 2 \max_h \|X_h\| \sum_h \|A_h A_h^T - B_h B_h^T\|_*
            + 2 \max_i |x_i| \sum_i |in_i - out_i|
        """
        excess = (self.terms.inflow - self.terms.outflow).abs().sum(-1)
        for k in self.groups:
            a, b = sides(self.moving, self.sym, self.sym.linear[k])
            excess = excess + torch.linalg.eigvalsh(a @ a.mT - b @ b.mT).abs().sum((-1, -2))
        mass = self.terms.value + self.still
        return torch.where(mass > 0, 2 * excess / mass, 0)

    def dead(self) -> Tensor:
        """Count the units and spaces that cannot be balanced."""
        units = self.free & ((self.terms.inflow == 0) | (self.terms.outflow == 0))
        return torch.stack([units.sum(-1), *((~full).sum(-1) for full in self.full)]).sum(0)

    def elements(self, before: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return scales and matrices, near the limit if none reaches it, never with more mass."""
        scales, total = self._split(self.logs.exp()), list(self.total)
        if bool(self.attained.all()):
            return scales, total
        stack = act(self.given, self.sym, {"scalings": scales})
        for k in self.groups:
            near = _near_limit(*sides(stack, self.sym, self.sym.linear[k]))
            total[k] = torch.where(self.full[k][..., None, None], total[k], near)
            inverse = torch.linalg.inv(total[k]).mT
            stack = multiply_sides(stack, self.sym, k, total[k], inverse)
        worse = mass_problem(stack, self.sym).value > before * (1 + 1e-12)
        eyes = (torch.eye(t.shape[-1]).to(t).expand_as(t) for t in total)
        total = [
            torch.where(worse[:, None, None, None], e, t) for e, t in zip(eyes, total, strict=True)
        ]
        return [torch.where(worse[:, None], 1, s) for s in scales], total


def _joined(masks: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.bool), *masks])


def _near_limit(a: Tensor, b: Tensor) -> Tensor:
    """Return matrices that nearly balance both sides, unless they would add mass."""
    size = a.shape[-2]
    eye = torch.eye(size).to(a)
    before = a.square().sum((-1, -2)) + b.square().sum((-1, -2))
    little = 1e-3 * (before / size).sqrt()[..., None, None] * eye
    solution = balance_spaces(torch.cat([a, little], -1), torch.cat([b, little], -1))
    after = (solution.forward @ a).square().sum((-1, -2))
    after = after + (solution.inverse_transpose @ b).square().sum((-1, -2))
    better = (after <= before) & solution.full
    return torch.where(better[..., None, None], solution.forward, eye)
