"""Joint matching: Frank-Wolfe over the doubly stochastic matrices of all groups at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.matching.relaxation import Relaxation

__all__ = ["frank_wolfe"]


@torch.no_grad()
def frank_wolfe(
    relaxation: Relaxation,
    params: Params,
    reference: Params,
    start: Sequence[Tensor] | None = None,
    known: Sequence[tuple[Sequence[Tensor], Tensor]] = (),
    max_steps: int = 60,
) -> list[Tensor]:
    r"""Permutations of every table for every member of a stack, rounded at the end.

    .. math:: P \leftarrow P + \gamma (S - P), \quad S = \arg\max_S \langle \nabla f(P), S \rangle

    where one :math:`\gamma` for all groups maximises the polynomial :math:`f` on the segment.

    References:
        Fast Approximate Quadratic Programming for Graph Matching (Vogelstein et al., 2015)
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        relaxation: of the symmetries of the network.
        params: a stack, in single or double precision.
        reference: one network.
        start: doubly stochastic matrices, by default those that prefer nothing.
        known: orders of all tables where no table alone has anything to gain, and for which members
            that holds: no step leads on from there.
        max_steps: steps at most.
    """
    names = list(relaxation.pieces)
    goal, stack = ({n: w[n] for n in names} for w in (reference, params))
    like = stack[names[0]]
    matrices = list(start) if start is not None else relaxation.barycentre(len(like), like)
    active = torch.arange(len(like))
    for _ in range(max_steps):
        some = stack if len(active) == len(like) else {n: w[active] for n, w in stack.items()}
        current = [m[active] for m in matrices]
        moved, gamma, orders = _step(relaxation, some, goal, current)
        for m, new in zip(matrices, moved, strict=True):
            m[active] = new
        going = gamma > 0
        for corner, holds in known:
            same = [(o == c[active]).all(1) for o, c in zip(orders, corner, strict=True)]
            going &= ~((gamma == 1) & torch.stack(same).all(0) & holds[active])
        active = active[going]
        if not len(active):
            break
    return relaxation.best(matrices)


def _step(
    relaxation: Relaxation, params: Params, reference: Params, matrices: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Where the best corner leads, how far the members go towards it, and which it is."""
    value, gradients = relaxation.value_and_gradients(params, reference, matrices)
    orders = relaxation.best(gradients)
    corners = [
        torch.nn.functional.one_hot(o, o.shape[1]).to(m)
        for o, m in zip(orders, matrices, strict=True)
    ]
    directions = [s - m for s, m in zip(corners, matrices, strict=True)]
    slope = sum(
        (g * d).sum((1, 2), dtype=torch.float64).cpu()
        for g, d in zip(gradients, directions, strict=True)
    )
    assert isinstance(slope, Tensor)
    end = relaxation.value_of(params, reference, orders)
    points = [(1.0, end)]
    for k in range(1, relaxation.degree - 1):
        at = k / (relaxation.degree - 1)
        between = [m + at * d for m, d in zip(matrices, directions, strict=True)]
        points.append((at, relaxation.value_at(params, reference, between)))
    gamma = _line_search(value, slope, points)
    gamma[slope <= 1e-7 * value.abs()] = 0
    moved = [m + gamma.to(m)[:, None, None] * d for m, d in zip(matrices, directions, strict=True)]
    return moved, gamma, orders


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
