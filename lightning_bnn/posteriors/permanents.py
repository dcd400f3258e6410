r"""Permanents of positive matrices, given as logarithms: exact, and with bounds from both sides.

.. math:: \mathrm{perm}_B(A) \le \mathrm{perm}(A) \le \min(2^{n/2}\, \mathrm{perm}_B(A),
    \mathrm{cap}(A)), \qquad \mathrm{perm}(A) \ge \prod_i A_{ii} \Big(1 + \sum_{i<j}
    \frac{A_{ij} A_{ji}}{A_{ii} A_{jj}}\Big)

All functions take ``(..., n, n)`` and return ``(...)``. Gradients of the Bethe permanent and of the
capacity are doubly stochastic matrices that the iterations end with: nothing is differentiated
through them.

References:
    | The Bethe Permanent of a Nonnegative Matrix (Vontobel, 2013)
    | https://arxiv.org/abs/1107.4196
    | A Tight Analysis of Bethe Approximation for Permanent (Anari and Rezaei, 2019)
    | https://arxiv.org/abs/1811.02933
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.posteriors.doubly_stochastic import (
    bethe_functional,
    is_doubly_stochastic,
    likeliest_permutation,
    to_unit_sums,
)
from lightning_bnn.posteriors.quick_bethe import quick_bethe

__all__ = ["log_bethe", "log_capacity", "log_permanent", "log_transpositions"]

_EXACT_UP_TO = 14
_SAFE = 200
"""Exponents up to here leave room in float64 for what sums of them do."""


def log_permanent(logs: Tensor) -> Tensor:
    """Logarithm of the permanent, by summing over sets of columns; for at most 14 rows.

    >>> log_permanent(torch.zeros(3, 3)).exp()
    tensor(6.)
    """
    n = logs.shape[-1]
    if n > _EXACT_UP_TO:
        raise ValueError(f"`logs` must have at most {_EXACT_UP_TO} rows, got {n}.")
    sums = {0: logs.new_zeros(logs.shape[:-2])}
    for row in range(n):
        following: dict[int, list[Tensor]] = {}
        for columns, value in sums.items():
            for j in range(n):
                if not columns >> j & 1:
                    following.setdefault(columns | 1 << j, []).append(value + logs[..., row, j])
        sums = {key: torch.stack(terms).logsumexp(0) for key, terms in following.items()}
    return sums[(1 << n) - 1]


def log_transpositions(logs: Tensor) -> Tensor:
    """A lower bound: the identity and all exchanges of two.

    >>> log_transpositions(torch.zeros(3, 3)).exp()
    tensor(4.)
    """
    diagonal = logs.diagonal(dim1=-2, dim2=-1)
    ratios = logs + logs.mT - diagonal[..., :, None] - diagonal[..., None, :]
    n = logs.shape[-1]
    upper = torch.ones(n, n, dtype=torch.bool, device=logs.device).triu(1)
    terms = torch.cat([torch.zeros_like(diagonal[..., :1]), ratios[..., upper]], -1)
    return terms.logsumexp(-1) + diagonal.sum(-1)


def log_capacity(logs: Tensor, sweeps: int = 20) -> Tensor:
    """An upper bound, by Sinkhorn scaling; it holds after any number of sweeps.

    >>> log_capacity(torch.zeros(3, 3)).exp().round(decimals=3)
    tensor(27.)
    """
    return _Bound.apply(logs, _capacity(logs.detach(), sweeps))


def log_bethe(logs: Tensor, iterations: int = 200, tolerance: float = 1e-9) -> Tensor:
    """A lower bound, by sum-product messages between rows and columns.

    It holds after any number of iterations; :math:`2^{n/2}` times it is an upper bound once
    messages have settled.

    >>> log_bethe(torch.zeros(2, 2)).exp().round(decimals=3)
    tensor(1.)
    """
    quick = quick_bethe(logs.detach(), iterations, tolerance)
    return _Bound.apply(logs, quick or _bethe(logs.detach(), iterations, tolerance))


class _Bound(torch.autograd.Function):
    """A value whose gradient is known (envelope theorem)."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor, solved: tuple[Tensor, Tensor]) -> Tensor:
        value, shares = solved
        ctx.save_for_backward(shares)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (shares,) = ctx.saved_tensors
        return grad[..., None, None] * shares, None


def _capacity(logs: Tensor, sweeps: int) -> tuple[Tensor, Tensor]:
    rows = logs.logsumexp(-1, keepdim=True)
    columns = torch.zeros_like(rows.mT)
    for _ in range(sweeps):
        columns = (logs - rows).logsumexp(-2, keepdim=True)
        rows = (logs - columns).logsumexp(-1, keepdim=True)
    return rows.sum((-2, -1)) + columns.sum((-2, -1)), (logs - rows - columns).exp()


def _bethe(logs: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Where messages have not settled, the value is that of other shares: a bound all the same."""
    matrices = logs.reshape(-1, *logs.shape[-2:]).double()
    regular = (matrices < math.inf).all(-1).all(-1)
    matrices = torch.where(regular[:, None, None], matrices, 0)
    rows, columns = _potentials(_with_a_floor(matrices))
    scaled = matrices - rows - columns
    shares = _shares(scaled, iterations, tolerance)
    value = bethe_functional(scaled, shares) + (rows.sum((-2, -1)) + columns.sum((-2, -1)))
    value = torch.where(regular, value, torch.nan)
    return value.view(logs.shape[:-2]).to(logs), shares.view(logs.shape).to(logs)


def _shares(logs: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Doubly stochastic matrices at which Bethe's functional is largest, or nearly so."""
    if logs.shape[-1] == 1:
        return torch.ones_like(logs)
    if logs.shape[-1] == 2:  # the functional is linear: one of the two permutations, or both
        kept, swapped = logs[:, 0, 0] + logs[:, 1, 1], logs[:, 0, 1] + logs[:, 1, 0]
        share = (kept > swapped) + (kept == swapped) / 2
        return torch.stack([share, 1 - share, 1 - share, share], -1).view(logs.shape).to(logs)
    shares = to_unit_sums(_beliefs(logs.exp(), iterations, tolerance))
    for k in (~is_doubly_stochastic(shares)).nonzero()[:, 0]:
        shares[k] = likeliest_permutation(logs[k])
    return shares


def _beliefs(scaled: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Messages are odds of an edge: ``down`` from its row, ``up`` from its column.

    On this graph they converge (Vontobel), unless several permutations are equally likely; damping
    them takes twice as many rounds. They are clamped where an edge is as good as certain, so that
    no product leaves the numbers.
    """
    up = torch.full_like(scaled, 1 / (scaled.shape[-1] - 1))
    down = _clamped(scaled / _others(scaled * up, -1))
    beliefs = torch.zeros_like(scaled)
    for step in range(iterations):
        up = _clamped(1 / _others(down, -2))
        down = _clamped(scaled / _others(scaled * up, -1))
        if step % 4 == 3:
            before, beliefs = beliefs, 1 / (1 + 1 / (down * up))
            if bool((beliefs - before).abs().amax() < tolerance):
                break
    return torch.where(scaled > 0, 1 / (1 + 1 / (down * up)), 0)


def _with_a_floor(logs: Tensor) -> Tensor:
    """Impossible entries become so unlikely that a permutation with one is the last resort."""
    possible = logs > -math.inf
    least = torch.where(possible, logs, math.inf).amin((-2, -1), keepdim=True)
    spread = logs.amax((-2, -1), keepdim=True) - least
    floor = least - len(logs[0]) * spread - 2 * _SAFE
    return torch.where(possible, logs, torch.where(floor.isfinite(), floor, 0))


def _potentials(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of rows and columns after which the likeliest permutation is as likely as any entry.

    Where the diagonal is nearly that permutation already, the largest entry of each row will do;
    else they are the dual variables of the linear assignment, found by scaling with ever less
    smoothing.
    """
    rows = logs.amax(-1, keepdim=True)
    columns = torch.zeros_like(rows.mT)
    if bool((logs.diagonal(dim1=-2, dim2=-1) - rows[..., 0]).amin() > -_SAFE):
        return rows, columns
    spread = max(float(logs.amax() - logs.amin()) / 100, 1.0)
    levels = 1 + math.ceil(math.log(spread, 3))
    for level in reversed(range(levels)):
        smoothing = 3.0**level
        for _ in range(50):
            columns = smoothing * ((logs - rows) / smoothing).logsumexp(-2, keepdim=True)
            rows = smoothing * ((logs - columns) / smoothing).logsumexp(-1, keepdim=True)
    return rows, columns


def _clamped(odds: Tensor) -> Tensor:
    return odds.clamp_(1e-150, 1e150)


def _others(x: Tensor, dim: int) -> Tensor:
    """Sum of all other entries along a dimension, for each, without cancellation.

    All entries but the largest are at most half of the sum, so that subtracting them is safe; the
    sum without the largest is taken apart.
    """
    largest, where = x.max(dim, keepdim=True)
    rest = x.scatter(dim, where, 0).sum(dim, keepdim=True)
    others = (largest + rest).sub(x)
    return others.scatter_(dim, where, rest)
