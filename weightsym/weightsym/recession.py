r"""Terms of a mass that go to zero at its least value, at infinite scales.

A term with the exponent :math:`a \cdot u` allows directions d with :math:`a \cdot d \le 0` only, if
it is not to grow. The terms that fall along any of these directions can vanish all together, for
directions add up. Units that mass only enters, or only leaves, are moved first, one layer after the
other. Then a graph decides for terms of two scales, and a linear program for those of several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix, diags, hstack, identity, vstack
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from weightsym.balancing import balance
from weightsym.mass_problem import Posynomial

__all__ = ["Minimum", "minimise", "no_worse", "one_sided", "recession"]

_PATIENCE = 12  # steps without a certificate after which terms may be on their way to zero


class Minimum(NamedTuple):
    """The least sum of the terms that are not driven to zero.

    Attributes:
        problem: these terms at log scales of zero.
        logs: the log scales, ``(members, scales)``.
        value: the least sum.
        gap: certified relative bound on what is left to gain.
        steps: how many there were.
        fall: a direction along which the other terms fall, and these stay as they are.
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
    """Find the least sum of terms, or its limit where some of them vanish.

    Args:
        whole: the terms at log scales of zero.
        start: log scales to start from, ``(members, scales)``.
        tolerance: certified relative gap at which to stop.
        most: steps after which to stop in any case.
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
    """Log scales far enough on the way to the limit that there is no more mass than at first.

    Args:
        whole: the terms at log scales of zero.
        solution: their minimum.
    """
    if not bool(solution.fall.any()):
        return solution.logs
    length = torch.zeros_like(solution.value)
    for _ in range(10):
        there = whole.moved(solution.logs + length[:, None] * solution.fall)
        worse = ~(there.value <= whole.value * (1 + 1e-12)) & (solution.fall != 0).any(-1)
        if not bool(worse.any()):
            break
        length = torch.where(worse, (2 * length).clamp_min(0.5), length)
    return solution.logs + length[:, None] * solution.fall


def one_sided(problem: Posynomial) -> tuple[Posynomial, Tensor]:
    """The terms without those of units that mass only enters or only leaves, again and again.

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
    """For every member a direction in which all terms fall that can vanish, and no other moves.

    Args:
        problem: terms.
    """
    known: dict[bytes, NDArray[np.float64]] = {}
    directions = []
    for k in range(len(problem.single)):
        rows = _exponents(problem, k)
        key = rows.indptr.tobytes() + rows.indices.tobytes() + rows.data.tobytes()
        if key not in known:
            several = rows.size and int(abs(rows).sum(1).max()) > 2
            known[key] = _steepest(rows) if several else _off_cycles(rows)
        directions.append(torch.from_numpy(known[key]))
    return torch.stack(directions).to(problem.single)


def _exponents(problem: Posynomial, member: int) -> csr_matrix:
    """The powers of the log scales in the terms of a member."""
    n = problem.variables
    own = identity(n, dtype=np.int64, format="csr")
    at, powers = problem.powers.indices().cpu().numpy(), problem.powers.values().cpu().numpy()
    several = coo_matrix((powers.astype(np.int64), at), tuple(problem.powers.shape))
    table = vstack([own, csr_matrix((1, n), dtype=np.int64), -own, several]).tocsr()
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
    """A direction in which all terms of two scales fall whose edge lies on no cycle.

    The nodes are the scales with either sign, and one for what has no scale: none may be above the
    node behind it, and those of a cycle are level.
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
    """The direction of the largest sum of falls, each of which counts up to one."""
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
