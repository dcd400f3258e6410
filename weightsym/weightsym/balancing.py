r"""Log scales of least mass by Newton's method, with a certificate.

Where as much mass enters every unit as leaves it, the mass is least. Newton's steps are for the
logs of the ratios, :math:`\log in_v - \log out_v = 0`, which are linear where one term is all of
each: few steps do, however far the layers lie apart. Where such a step fails, and where there are
many scales, steps are for the gradient, and lead down for certain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from weightsym.mass_problem import Posynomial

__all__ = ["Balanced", "balance", "bound"]

_LARGEST = 40_000  # entries of the Hessians of all members together that are solved as they are
_MOST = 100  # products for a direction as long as terms may be on their way to zero
_ROUGHEST = 0.1
"""Of the gradient, what a direction by conjugate gradients may leave open."""
_FLAT = 1e-15
"""Of the curvature if every scale had mass of its own, what is no more than rounding."""


class Balanced(NamedTuple):
    """Log scales, the terms there, a bound on what is left to gain, and the number of steps."""

    logs: Tensor
    terms: Posynomial
    gap: Tensor
    steps: int


def balance(problem: Posynomial, u: Tensor, tolerance: float, most: int) -> Balanced:
    """Newton steps until the certificate says that the mass is least.

    Args:
        problem: the terms at log scales of zero.
        u: log scales to start from, ``(members, scales)``.
        tolerance: certified relative gap at which to stop.
        most: steps after which to stop in any case.
    """
    terms = problem.moved(u) if bool(u.any()) else problem
    gap, last, worst = torch.full_like(terms.value, torch.inf), math.inf, math.inf
    steps = 0
    while worst > tolerance and steps < most:
        steps += 1
        directions = _directions(terms, steps <= 4, _MOST if worst > 1e-2 else 4 * u.shape[1] + 10)
        t = next(directions)
        gap = torch.minimum(gap, bound(terms, t))
        last, worst = worst, float(_relative(gap, terms).max())
        if 1e-12 > worst > last / 2:  # down to rounding
            break
        before = terms.value * (1 + 1e-14)
        terms = problem.moved(u + t / 2)
        while bool((worse := ~(terms.value <= before)).any()):
            t = torch.where(worse[:, None], next(directions, torch.zeros_like(t)), t)
            terms = problem.moved(u + t / 2)
        u = u + t / 2
    return Balanced(u, terms, _relative(gap, terms), steps)


def _relative(gap: Tensor, terms: Posynomial) -> Tensor:
    return gap / terms.value.clamp_min(1e-300)


def bound(terms: Posynomial, t: Tensor | None = None) -> Tensor:
    r"""Bound what is left to gain, by a Newton direction.

    With y the terms, g what enters less what leaves and L t = -g, the terms :math:`y (1 + \delta)`
    with :math:`\delta = a \cdot t` are a flow that is conserved at every unit: a point of the dual
    problem, whose value there is :math:`\sum y (1 + \delta)(1 - \log(1 + \delta))`. So

    .. math:: m - m^* \le \frac{1}{2} \frac{t^T L t}{1 - \max|\delta|} + 2 |L t + g|_1,

    the last term for what the direction leaves open. A flow that is positive everywhere also says
    that finite scales reach the minimum.

    Args:
        terms: of the mass.
        t: the direction, ``(members, scales)``.
    """
    t = next(_directions(terms, False, _MOST)) if t is None else t
    product = terms.laplacian(t)
    widest = terms.logs(t).abs().amax(-1) * (2 if terms.matrices else 1)
    quadratic = torch.linalg.vecdot(t, product) / 2
    open_ = (product + terms.inflow - terms.outflow).abs().sum(-1)
    return torch.where(widest < 1, quadratic / (1 - widest) + 2 * open_, torch.inf)


# ------------------------------------------------------------ directions
def _directions(terms: Posynomial, first: bool, most: int) -> Iterator[Tensor]:
    """Directions to be tried in turn: that of the ratios, that of the gradient, and parts of it."""
    inflow, outflow = (x.clamp_min(1e-300) for x in (terms.inflow, terms.outflow))
    ratios, gradient = (inflow / outflow).log(), terms.inflow - terms.outflow
    members, n = ratios.shape
    if members * n**2 <= _LARGEST:
        entering, leaving = terms.slopes
        scaled = entering / inflow[..., None] - leaving / outflow[..., None]
        yield _solved(scaled, ratios)
        t = _solved(entering - leaving, gradient)
    else:
        if first:
            yield -ratios / 2
        t = _conjugate_gradients(terms, -gradient, most)
    for k in range(30):
        yield t / 2**k


def _solved(slopes: Tensor, values: Tensor) -> Tensor:
    slopes.diagonal(dim1=-2, dim2=-1).mul_(1 + 1e-13).clamp_min_(1e-300)
    return -torch.linalg.solve_ex(slopes, values)[0]


def _conjugate_gradients(terms: Posynomial, b: Tensor, most: int) -> Tensor:
    """Solve for a direction, all members at once, until the slowest is done.

    Far from the minimum a rough direction will do: what is left open is at most a tenth, and falls
    with the excess itself, so that steps converge as fast as exact ones. Nothing is done along
    directions in which the mass is flat: what is there of the excess is rounding.
    """
    diagonal = terms.inflow + terms.outflow
    diagonal = torch.where(diagonal > 0, diagonal, 1)
    x, r = torch.zeros_like(b), b
    z = r / diagonal
    p, rz = z, torch.linalg.vecdot(r, z)
    forcing = (rz / diagonal.sum(-1)).clamp(1e-26, _ROUGHEST**2)
    stop = forcing * rz.clamp_min(1e-300) + 1e-32 * diagonal.sum(-1)
    for _ in range(most):
        lp = terms.laplacian(p)
        curvature = torch.linalg.vecdot(p, lp)
        curved = curvature > _FLAT * torch.linalg.vecdot(diagonal * p, p)
        if not bool((goes_on := (rz > stop) & curved).any()):
            break
        alpha = torch.where(goes_on, rz / curvature, 0)[:, None]
        x, r = torch.addcmul(x, alpha, p), torch.addcmul(r, alpha, lp, value=-1)
        z = r / diagonal
        new = torch.linalg.vecdot(r, z)
        p, rz = torch.addcmul(z, (new / rz.clamp_min(1e-300))[:, None], p), new
    return x
