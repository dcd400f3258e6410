r"""Whether the least mass is reached by finite scales, and what is left of the mass where not.

Every term of the mass bounds a recession direction ``d`` of the log scales: its exponent must not
grow, :math:`\pm d_i \pm d_j \le 0`. These are edges of a graph whose nodes are the directions with
either sign, and a ground for what has no scale. A term stays as it is along all of them exactly if
its edge lies on a cycle; every other term can be driven to zero, at infinite scales. Terms of more
than two scales are no edges: see `recession`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lightning_bnn.symmetry.mass_problem import MassProblem, Matrix
from lightning_bnn.symmetry.recession import Flat, without_receding_terms

__all__ = ["Flat", "Floating", "without_vanishing_terms"]

Ints = NDArray[np.int64]


class Floating(NamedTuple):
    """Log scales that can be shifted together without a change of the mass.

    Attributes:
        component: of every scale, ``(members, scales)``; 0 for those that cannot be shifted.
        sign: whether a scale grows or falls as its component is shifted.
        fall: a direction along which the terms that can be driven to zero fall, and no other moves.
    """

    component: Tensor
    sign: Tensor
    fall: Tensor

    def pinned(self) -> Tensor:
        """The first scale of every component."""
        units = torch.arange(self.component.shape[1], device=self.component.device)
        units = units.expand_as(self.component)
        last = units.new_full((len(units), 2 * units.shape[1] + 2), units.shape[1])
        first = last.scatter_reduce(1, self.component, units, "amin")
        return (self.component > 0) & (first.gather(1, self.component) == units)

    def centred(self, u: Tensor) -> Tensor:
        """Log scales whose mean is zero in every component."""
        sums = u.new_zeros(u.shape[0], 2 * u.shape[1] + 2)
        counts = sums.scatter_add(1, self.component, torch.ones_like(u)).clamp_min(1)
        means = sums.scatter_add(1, self.component, self.sign * u) / counts
        means[:, 0] = 0
        return u - self.sign * means.gather(1, self.component)


def without_vanishing_terms(problem: MassProblem) -> tuple[MassProblem, Tensor, Floating | Flat]:
    """The terms whose sum has a least value at finite scales.

    Returns:
        The problem without those that can be driven to zero; for every member whether there are
        none; and the scales that can be shifted then.
    """
    if problem.composites.count:
        return without_receding_terms(problem)
    n = problem.variables
    linked = _reached_from_ground(problem).all(-1)
    nodes = torch.zeros(len(linked), 2 * n + 1, dtype=torch.int64, device=linked.device)
    levels = torch.zeros_like(nodes)
    for k in (~linked).nonzero()[:, 0].tolist():
        edges = _edges(problem, k)
        components = _components(edges, n)
        nodes[k] = torch.from_numpy(components).to(nodes.device)
        levels[k] = torch.from_numpy(_levels(edges, components)).to(nodes.device)
    plus, minus = nodes[:, :n], nodes[:, n + 1 :]
    component = torch.where(plus == minus, 0, torch.minimum(plus, minus))
    sign = torch.where(plus <= minus, 1.0, -1.0).to(problem.plus)
    fall = (levels[:, :n] - levels[:, n + 1 :]).to(problem.plus) / 2
    floating = Floating(component, sign, fall)
    if bool(linked.all()):
        return problem, linked, floating
    kept = _only_within(problem, nodes)
    start = torch.zeros_like(problem.plus)
    return kept, kept.value(start) == problem.value(start), floating


def _negated(index: Tensor, n: int) -> Tensor:
    """The node of the other sign: ``v`` and ``n + 1 + v``; the ground ``n`` is its own."""
    return torch.where(index == n, n, (index + n + 1) % (2 * n + 2))


def _reached_from_ground(problem: MassProblem) -> Tensor:
    """Nodes that a path from the ground reaches, ``(members, 2 n + 1)``.

    By symmetry a path leads back from the negated node: if all are reached, all are on cycles.
    """
    n = problem.variables
    reached = torch.cat(
        [problem.minus > 0, torch.ones_like(problem.plus[:, :1]) > 0, problem.plus > 0], -1
    )
    reached = reached.to(problem.plus.dtype)
    while True:
        before = reached.sum()
        if before == reached.numel():
            return reached > 0
        for m in (*problem.matrices, *reversed(problem.matrices)):
            for start, stop, squares in (
                (m.rows, m.columns, m.squares.mT),
                (m.columns, m.rows, m.squares),
            ):
                arrives = torch.matmul(squares, reached[:, start][..., None])[..., 0] > 0
                target = _negated(stop, n).reshape(-1).expand(len(reached), -1)
                reached = reached.scatter_reduce(1, target, arrives.flatten(1).to(reached), "amax")
        if bool(reached.sum() == before):
            return reached > 0


def _edges(problem: MassProblem, member: int) -> Ints:
    """The graph of one member: along no edge may the direction of the log scales fall."""
    n = problem.variables
    nodes = torch.arange(n)
    edges = []
    for mass, literal in ((problem.plus, nodes), (problem.minus, nodes + n + 1)):
        start = literal[mass[member].cpu() > 0]
        ground = torch.full_like(start, n)
        edges += [_edge(start, ground), _edge(ground, _negated(start, n))]
    for m in problem.matrices:
        block, row, column = (m.squares[member].cpu() > 0).nonzero(as_tuple=True)
        r, c = m.rows.cpu()[block, row], m.columns.cpu()[block, column]
        edges += [_edge(r, _negated(c, n)), _edge(c, _negated(r, n))]
    return np.concatenate(edges, 1)


def _components(edges: Ints, ground: int) -> Ints:
    """Strongly connected components; that of the ground is 0."""
    size = 2 * ground + 1
    graph = coo_matrix((np.ones(edges.shape[1], np.bool_), tuple(edges)), (size, size))
    components = connected_components(graph, connection="strong")[1].astype(np.int64)
    return np.where(components == components[ground], 0, components + 1)


def _levels(edges: Ints, components: Ints) -> Ints:
    """Numbers that grow along every edge between components, and are one number inside each."""
    start, stop = components[edges]
    start, stop = start[start != stop], stop[start != stop]
    level = np.zeros(int(components.max()) + 1, np.int64)
    while True:
        new = level.copy()
        np.maximum.at(new, stop, level[start] + 1)
        if (new == level).all():
            return level[components]
        level = new


def _edge(start: Tensor, stop: Tensor) -> Ints:
    return torch.stack([start, stop]).numpy()


def _only_within(problem: MassProblem, components: Tensor) -> MassProblem:
    """The terms whose edge lies inside one component."""
    n = problem.variables

    def within(m: Matrix) -> Tensor:
        start, stop = components[:, m.rows], components[:, _negated(m.columns, n)]
        return m.squares * (start[..., :, None] == stop[..., None, :])

    return replace(
        problem,
        plus=problem.plus * (components[:, :n] == 0),
        minus=problem.minus * (components[:, n + 1 :] == 0),
        matrices=tuple(replace(m, squares=within(m)) for m in problem.matrices),
    )
