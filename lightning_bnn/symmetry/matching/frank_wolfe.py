"""Joint matching: Frank-Wolfe over the doubly stochastic matrices of all groups at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_bnn.params import Params
from lightning_bnn.symmetry.matching.relaxation import Relaxation
from lightning_bnn.symmetry.matching.tangent import Similarity, Tangent, inner

__all__ = ["Walk", "frank_wolfe"]

Known = Sequence[tuple[Sequence[Tensor], Tensor]]

_ROUNDING = 1e-7  # of the largest inner product that norms allow
_CLOSE = 3e-3  # of what has been gained; ascent goes on from there
_FIRST = 3  # steps before a member may be given up
_REACH = 3  # slopes that a member may still gain: behind the first steps 1.5 to 3
_BLIND = 0.01  # of what is missing: slopes that tell nothing at the start


class Walk(NamedTuple):
    """Where Frank-Wolfe has come to, for every member.

    Attributes:
        orders: of every table.
        lost: given up, out of reach of what was known first.
        blind: where it began, nothing told permutations apart.
    """

    orders: list[Tensor]
    lost: Tensor
    blind: Tensor


@torch.no_grad()
def frank_wolfe(
    relaxation: Relaxation,
    params: Params,
    reference: Params,
    start: Sequence[Tensor] | None = None,
    known: Known = (),
    max_steps: int = 60,
) -> Walk:
    r"""Permutations of every table for every member of a stack, rounded at the end.

    .. math:: P \leftarrow P + \gamma (S - P), \quad S = \arg\max_S \langle \nabla f(P), S \rangle

    where one :math:`\gamma` for all groups maximises the polynomial :math:`f` on the segment. The
    slope :math:`g = \langle \nabla f(P), S - P \rangle` says what can be had nearby: steps end
    where it is small. After three steps a member is given up if :math:`f(P) + 3 g` is below what
    is known first, as between large networks that have nothing in common.

    References:
        Fast Approximate Quadratic Programming for Graph Matching (Vogelstein et al., 2015)
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        relaxation: of the symmetries of the network.
        params: a stack, in single or double precision.
        reference: one network.
        start: doubly stochastic matrices, by default those that prefer nothing.
        known: orders of all tables, and for which members no table alone has anything to gain
            there, so that no step leads on; all are measured by the first of them.
        max_steps: steps at most.
    """
    names = list(relaxation.pieces)
    goal, stack = ({n: w[n] for n in names} for w in (reference, params))
    members = len(stack[names[0]])
    matrices = list(start or relaxation.barycentre(members, stack[names[0]]))
    similarity = Similarity(relaxation, stack, goal)
    here, active = similarity.tangent(matrices), torch.arange(members)
    judge = _Judge(here.value, _floor(similarity, known), _most(stack, goal))
    for number in range(max_steps):
        way = _way(similarity, here, [m[active] for m in matrices])
        going = judge.going(active, number, here.value, way.slope)
        active = active[going]
        if not len(active):
            break
        similarity, here = similarity.of(going), here.of(going)
        step = _step(similarity, here, way.of(going))
        for m, new in zip(matrices, step.matrices, strict=True):
            m[active] = new
        moving = (step.share > 0) & ~_arrived(step, known, active)
        if not moving.any():
            break
        active, similarity, here = active[moving], similarity.of(moving), step.tangent.of(moving)
    return Walk(relaxation.best(matrices), judge.lost, judge.blind)


class _Judge:
    """Says which members go on, by their values and slopes.

    Args:
        first: values at the start.
        floor: values that are known already.
        most: what no value exceeds.
    """

    def __init__(self, first: Tensor, floor: Tensor, most: Tensor) -> None:
        self.first, self.floor, self.rounding = first, floor, _ROUNDING * most
        self.lost, self.blind = torch.zeros(2, len(first), dtype=torch.bool)

    def going(self, active: Tensor, number: int, value: Tensor, slope: Tensor) -> Tensor:
        """Which of the active members have something to gain after so many steps."""
        missing, rounding = self.floor[active] - value, self.rounding[active]
        if number == 0:
            self.blind = slope <= torch.maximum(_BLIND * missing, rounding)
        if number >= _FIRST:
            self.lost[active] = missing > _REACH * slope
        enough = torch.maximum(_CLOSE * (value - self.first[active]), rounding)
        return (slope > enough) & ~self.lost[active]


def _floor(similarity: Similarity, known: Known) -> Tensor:
    """The similarity at what is known first: to try more ways before must never lower the best."""
    for orders, _ in known:
        return similarity.value(orders)
    members = len(next(iter(similarity.params.values())))
    return torch.full((members,), -torch.inf, dtype=torch.float64)


def _most(params: Params, reference: Params) -> Tensor:
    """What norms allow two networks to agree in."""
    norms = [
        w.flatten(1).norm(dim=1).double() * reference[n].double().norm() for n, w in params.items()
    ]
    return torch.stack(norms).sum(0).cpu()


# ------------------------------------------------------------ steps
class _Way(NamedTuple):
    """From where to which corner, and how steep it is at first."""

    matrices: list[Tensor]
    orders: list[Tensor]
    slope: Tensor

    def of(self, rows: Tensor) -> _Way:
        """The same for some of the members."""
        matrices, orders = ([t[rows] for t in part] for part in (self.matrices, self.orders))
        return _Way(matrices, orders, self.slope[rows])


class _Step(NamedTuple):
    """Where a step has led, how far along its way, and to which corner that goes."""

    matrices: list[Tensor]
    tangent: Tangent
    share: Tensor
    orders: list[Tensor]


def _way(similarity: Similarity, here: Tangent, matrices: list[Tensor]) -> _Way:
    """To the corner that the slopes like best."""
    orders = similarity.relaxation.best(here.gradients)
    slope = torch.zeros_like(here.value)
    for gradient, order, matrix in zip(here.gradients, orders, matrices, strict=True):
        slope += inner(order, gradient) - inner(matrix, gradient)
    return _Way(matrices, orders, slope)


def _step(similarity: Similarity, here: Tangent, way: _Way) -> _Step:
    """As far along a way as the similarity likes best."""
    degree, matrices = similarity.relaxation.degree, way.matrices
    corners = [one_hot(o, o.shape[1]).to(m) for o, m in zip(way.orders, matrices, strict=True)]
    end = similarity.tangent(way.orders)
    points = [(1.0, end.value)]
    for k in range(1, degree - 1):
        at = k / (degree - 1)
        points.append((at, similarity.value(_between(matrices, corners, at))))
    share = _line_search(here.value, way.slope, points)
    moved = _between(matrices, corners, share)
    return _Step(moved, similarity.between(here, end, share, moved), share, way.orders)


def _between(start: Sequence[Tensor], end: Sequence[Tensor], share: Tensor | float) -> list[Tensor]:
    pairs = zip(start, end, strict=True)
    if isinstance(share, float):
        return [a.lerp(b, share) for a, b in pairs]
    return [a.lerp(b, share.to(a)[:, None, None]) for a, b in pairs]


def _arrived(step: _Step, known: Known, active: Tensor) -> Tensor:
    """Whether members stand at a corner from which no step leads on."""
    arrived = torch.zeros(len(active), dtype=torch.bool)
    for corner, holds in known:
        same = [(o == c[active]).all(1) for o, c in zip(step.orders, corner, strict=True)]
        arrived |= (step.share == 1) & torch.stack(same).all(0) & holds[active]
    return arrived


def _line_search(value: Tensor, slope: Tensor, points: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Where on the unit interval the polynomials with these values and slopes are largest."""
    at = np.array([t for t, _ in points])
    powers = at[:, None] ** np.arange(2, len(points) + 2)
    left = np.stack([v.numpy() for _, v in points]) - value.numpy() - at[:, None] * slope.numpy()
    higher = np.linalg.solve(powers, left)
    best = []
    for start, linear, rest in zip(value.numpy(), slope.numpy(), higher.T, strict=True):
        line = np.polynomial.Polynomial([start, linear, *rest])
        turns = [r.real for r in np.atleast_1d(line.deriv().roots()) if abs(r.imag) < 1e-9]
        candidates = np.array([0.0, 1.0, *[t for t in turns if 0 < t < 1]])
        best.append(candidates[line(candidates).argmax()])
    return torch.tensor(best, dtype=torch.float64)
