r"""Log scales of least mass by Newton's method, with a certificate, or the limit of the mass.

The mass is least if as much mass enters every unit as leaves it. Newton steps are for the logs of
the ratios, :math:`\log in_v - \log out_v = 0`, which are linear if each has a single term: few
steps suffice, however different the scales of the layers are. If such a step fails, and for many
scales, steps are for the gradient, and always descend.

Some terms go to zero at the least value. A term with the exponent :math:`a \cdot u` does not grow
along directions d with :math:`a \cdot d \le 0`. The terms that fall along any of these directions
can vanish together, since directions add up. Units that mass only enters, or only leaves, are moved
first, one layer after the other. Then a graph decides for terms of two scales, and a linear program
for those of several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix, diags, hstack, identity, vstack
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from weightsym.forms.mass_problem import Posynomial

_LARGEST = 40_000  # entries of the Hessians of all members together that are solved as they are
_MOST = 100  # products for a direction as long as terms may be on their way to zero
_ROUGHEST = 0.1
"""Residual of the gradient that a direction by conjugate gradients may leave."""
_FLAT = 1e-15
"""Share of the curvature, relative to independent scales, that is rounding."""


class Balanced(NamedTuple):
    """Log scales, the terms there, a bound on the remaining gain, and the number of steps."""

    logs: Tensor
    terms: Posynomial
    gap: Tensor
    steps: int


def balance(problem: Posynomial, u: Tensor, tolerance: float, most: int) -> Balanced:
    """Take Newton steps until the certificate shows that the mass is least.

    Args:
        problem: the terms at log scales of zero.
        u: initial log scales, ``(members, scales)``.
        tolerance: certified relative gap at which to stop.
        most: largest number of steps.
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
    r"""Bound the remaining gain by a Newton direction.

    With y the terms, g what enters less what leaves and L t = -g, the terms :math:`y (1 + \delta)`
    with :math:`\delta = a \cdot t` are a flow that is conserved at every unit: a point of the dual
    problem, whose value there is :math:`\sum y (1 + \delta)(1 - \log(1 + \delta))`. So

    .. math:: m - m^* \le \frac{1}{2} \frac{t^T L t}{1 - \max|\delta|} + 2 |L t + g|_1,

    with a last term for the residual of the direction. A flow that is positive everywhere also
    proves that finite scales reach the minimum.

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
    """Yield search directions: of the ratios, of the gradient, and parts of it."""
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
    """Solve for a direction by conjugate gradients, until the slowest member is done.

    Far from the minimum a rough direction suffices: the residual is at most a tenth, and falls with
    the excess itself, so that steps converge as fast as exact ones. Directions along which the mass
    is flat are skipped: excess along them is rounding.
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


# ------------------------------------------------------------ terms that vanish
_PATIENCE = 12  # steps without a certificate after which terms may be on their way to zero


class Minimum(NamedTuple):
    """The least sum of the terms that do not vanish.

    Attributes:
        problem: these terms at log scales of zero.
        logs: the log scales, ``(members, scales)``.
        value: the least sum.
        gap: certified relative bound on the remaining gain.
        steps: number of steps.
        fall: a direction along which the other terms fall, and these do not change.
        attained: whether there are no other terms, however small, for every member.
    """

    problem: Posynomial
    logs: Tensor
    value: Tensor
    gap: Tensor
    steps: int
    fall: Tensor
    attained: Tensor


def minimise(whole: Posynomial, start: Tensor, tolerance: float, most: int) -> Minimum:
    """Find the least sum of terms, or its limit if some of them vanish.

    Args:
        whole: the terms at log scales of zero.
        start: initial log scales, ``(members, scales)``.
        tolerance: certified relative gap at which to stop.
        most: largest number of steps.
    """
    problem, fall = one_sided(whole)
    start = start * (problem.inflow > 0)
    solution = balance(problem, start, tolerance, min(most, _PATIENCE))
    steps, stuck = solution.steps, solution.gap > max(tolerance, 1e-12)
    if bool(stuck.any()):
        further = torch.zeros_like(fall)
        further[stuck] = recession(problem.members(stuck))
        fall = fall * (1 + problem.degree * further.abs().amax(-1, keepdim=True)) + further
        problem = problem.without(further)
        falls = further.any(-1, keepdim=True)
        start = torch.where(falls, start, solution.logs) * (problem.inflow > 0)
        solution = balance(problem, start, tolerance, most - steps)
        steps += solution.steps
    attained = ~fall.any(-1)
    if not bool(attained.all()):
        attained = problem.support.value == whole.support.value
    return Minimum(
        problem, solution.logs, solution.terms.value, solution.gap, steps, fall, attained
    )


def no_worse(whole: Posynomial, solution: Minimum) -> Tensor:
    """Return log scales near the limit, with no more mass than at first.

    Args:
        whole: the terms at log scales of zero.
        solution: their minimum.
    """
    if not bool(solution.fall.any()):
        return solution.logs
    length = torch.zeros_like(solution.value)
    for _ in range(10):
        moved = whole.moved(solution.logs + length[:, None] * solution.fall)
        worse = ~(moved.value <= whole.value * (1 + 1e-12)) & (solution.fall != 0).any(-1)
        if not bool(worse.any()):
            break
        length = torch.where(worse, (2 * length).clamp_min(0.5), length)
    return solution.logs + length[:, None] * solution.fall


def one_sided(problem: Posynomial) -> tuple[Posynomial, Tensor]:
    """Remove the terms of units that mass only enters or only leaves, repeatedly.

    Args:
        problem: terms.

    Returns:
        What is left, and a direction of whole numbers along which all other terms fall.
    """
    direction = torch.zeros_like(problem.inflow)
    while True:
        step = (problem.outflow > 0).to(direction) - (problem.inflow > 0).to(direction)
        if not bool(step.any()):
            return problem, direction
        direction = (problem.degree - 1) * direction + direction.sign() + step
        problem = problem.without(step)


def recession(problem: Posynomial) -> Tensor:
    """Return for every member a direction in which all terms that can vanish fall.

    Args:
        problem: terms.
    """
    solved: dict[bytes, NDArray[np.float64]] = {}
    directions = []
    for k in range(len(problem.single)):
        rows = _exponents(problem, k)
        key = rows.indptr.tobytes() + rows.indices.tobytes() + rows.data.tobytes()
        if key not in solved:
            several = rows.size and int(abs(rows).sum(1).max()) > 2
            solved[key] = _steepest(rows) if several else _off_cycles(rows)
        directions.append(torch.from_numpy(solved[key]))
    return torch.stack(directions).to(problem.single)


def _exponents(problem: Posynomial, member: int) -> csr_matrix:
    """Return the powers of the log scales in the terms of a member."""
    n = problem.variables
    units = identity(n, dtype=np.int64, format="csr")
    indices, powers = problem.powers.indices().cpu().numpy(), problem.powers.values().cpu().numpy()
    several = coo_matrix((powers.astype(np.int64), indices), tuple(problem.powers.shape))
    table = vstack([units, csr_matrix((1, n), dtype=np.int64), -units, several]).tocsr()
    single = np.flatnonzero(problem.single[member].cpu() > 0)
    pairs = [np.stack([single, np.full_like(single, n)])]
    for m in problem.matrices:
        block, row, column = np.nonzero((m.terms[member] > 0).cpu().numpy())
        ends = m.rows.cpu().numpy()[block, row], m.columns.cpu().numpy()[block, column]
        pairs.append(np.stack(ends))
    first, second = np.concatenate(pairs, 1)
    if problem.free is not None:
        table = table @ diags(problem.free.cpu().numpy().astype(np.int64))
    return table[first] + table[second]


def _off_cycles(rows: csr_matrix) -> NDArray[np.float64]:
    """Return a direction in which all terms of two scales decrease whose edge is on no cycle.

    The nodes are the scales with either sign, and one for terms without a scale. No node may be
    above its successor, and the nodes of a cycle are level.
    """
    n, rows = rows.shape[1], rows[np.diff(rows.indptr) > 0]
    nodes = rows.indices + (n + 1) * (rows.data < 0)
    first, last = nodes[rows.indptr[:-1]], nodes[rows.indptr[1:] - 1]
    last = np.where(abs(rows).sum(1).A1 == 1, n, last)
    opposite = np.concatenate([np.arange(n + 1, 2 * n + 1), [n], np.arange(n)])
    edges = np.concatenate([[first, opposite[last]], [last, opposite[first]]], 1)
    size = 2 * n + 1
    graph = coo_matrix((np.ones(edges.shape[1], np.bool_), tuple(edges)), (size, size))
    components = connected_components(graph, connection="strong")[1]
    start, stop = components[edges].astype(np.int64)
    start, stop = np.divmod(np.unique((start * size + stop)[start != stop]), size)
    levels, before = np.zeros(size), -1.0
    while levels.sum() > before:
        before = levels.sum()
        np.maximum.at(levels, stop, levels[start] + 1)
    heights = levels[components]
    return (heights[:n] - heights[n + 1 :]) / 2


def _steepest(rows: csr_matrix) -> NDArray[np.float64]:
    """Return the direction of the largest sum of falls, each counted up to one."""
    marks = rows @ np.random.default_rng(0).integers(1, 2**62, rows.shape[1])
    different = rows[np.unique(marks, return_index=True)[1]]
    count, free = different.shape
    solution = linprog(
        np.concatenate([np.zeros(free), -np.ones(count)]),
        A_ub=hstack([different, identity(count)]).tocsr(),
        b_ub=np.zeros(count),
        bounds=[(None, None)] * free + [(0, 1)] * count,
        method="highs",
    )
    if solution.status != 0:
        raise RuntimeError(f"The linear program of the vanishing terms failed: {solution.message}")
    return solution.x[:free]
