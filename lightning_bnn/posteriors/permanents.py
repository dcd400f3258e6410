r"""Permanents of positive matrices, given as logarithms: exact, and bounded from both sides.

.. math:: \mathrm{perm}_B(A) \le \mathrm{perm}(A) \le \min(2^{n/2}\, \mathrm{perm}_B(A),
    \mathrm{cap}(A)), \qquad \mathrm{perm}(A) \ge \prod_i A_{ii} \Big(1 + \sum_{i<j}
    \frac{A_{ij} A_{ji}}{A_{ii} A_{jj}}\Big)

All functions take ``(..., n, n)`` and return ``(...)``. Gradients of the Bethe permanent and of the
capacity are the final doubly stochastic matrices of the iterations, through which nothing is
differentiated.

References:
    | The Bethe Permanent of a Nonnegative Matrix (Vontobel, 2013)
    | https://arxiv.org/abs/1107.4196
    | A Tight Analysis of Bethe Approximation for Permanent (Anari and Rezaei, 2019)
    | https://arxiv.org/abs/1811.02933
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from weightsym.params import precise

_EXACT_UP_TO = 14
_SAFE = 200
"""Largest exponent whose sums stay in the range of float64."""
_TOLERANCE, _LEAST = 1e-12, 1e-100
_QUICK_FROM, _QUICK_SHARE, _QUICK_TOLERANCE = 32, 0.9, 1e-6
"""Rows from which float32 pays, the largest share that it can tell from one, and its precision."""


def log_permanent(logs: Tensor) -> Tensor:
    """Return the logarithm of the permanent by summing over sets of columns, up to 14 rows.

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
    """Return a lower bound: the identity and all exchanges of two.

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
    """Return an upper bound by Sinkhorn scaling, valid after any number of sweeps.

    >>> log_capacity(torch.zeros(3, 3)).exp().round(decimals=3)
    tensor(27.)
    """
    return _Bound.apply(logs, _capacity(logs.detach(), sweeps))


def log_bethe(logs: Tensor, iterations: int = 200, tolerance: float = 1e-9) -> Tensor:
    """Return a lower bound by sum-product messages between rows and columns.

    It is valid after any number of iterations, and :math:`2^{n/2}` times it is an upper bound once
    the messages have converged.

    >>> log_bethe(torch.zeros(2, 2)).exp().round(decimals=3)
    tensor(1.)
    """
    quick = quick_bethe(logs.detach(), iterations, tolerance)
    return _Bound.apply(logs, quick or _bethe(logs.detach(), iterations, tolerance))


class _Bound(torch.autograd.Function):
    """A value with a known gradient (envelope theorem)."""

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


def bethe_functional(logs: Tensor, shares: Tensor) -> Tensor:
    r"""Return a lower bound of the log-permanents at any doubly stochastic ``shares``.

    .. math:: \log \mathrm{perm}(A) \ge \sum_{ij} b_{ij} \log \frac{A_{ij}}{b_{ij}}
        + (1 - b_{ij}) \log(1 - b_{ij})

    The largest of these values is the Bethe permanent.

    References:
        | Unleashing the Power of Schrijver's Permanental Inequality (Gurvits, 2011)
        | https://arxiv.org/abs/1106.2844

    >>> bethe_functional(torch.zeros(3, 3), torch.full((3, 3), 1 / 3)).exp().round(decimals=3)
    tensor(2.3700)
    """
    others = (1 - shares).clamp(min=0)
    entropies = torch.xlogy(others, others) - torch.xlogy(shares, shares)
    return (entropies + torch.where(shares > 0, shares * logs, 0)).sum((-2, -1))


# ------------------------------------------------------------ the Bethe permanent
def quick_bethe(logs: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Return Bethe permanents in float32 by plain sums, or None if a permutation dominates.

    If every share is well below one, subtracting an entry from a sum that contains it loses no
    precision.

    Args:
        logs: of the matrices, ``(..., n, n)``.
        iterations: largest number of rounds of messages.
        tolerance: change of the shares at which to stop.

    Returns:
        Logarithms, and the shares that are their gradients.
    """
    n = logs.shape[-1]
    if logs.dtype != torch.float32 or n < _QUICK_FROM or tolerance < _QUICK_TOLERANCE:
        return None
    rows = logs.amax(-1, keepdim=True)
    scaled = logs - rows
    shares = _sinkhorn(_beliefs(scaled.exp(), iterations, tolerance, 2, _plain_others), 3)
    misses, largest = _misses(shares).amax(), shares.amax()
    if not bool((misses < 10 * _QUICK_TOLERANCE) & (largest < _QUICK_SHARE)):
        return None
    return bethe_functional(scaled, shares) + rows.sum((-2, -1)), shares


def _bethe(logs: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Bound permanents by the shares at which the messages have converged or ended."""
    matrices = precise(logs.reshape(-1, *logs.shape[-2:]))
    regular = (matrices < math.inf).all(-1).all(-1)
    matrices = torch.where(regular[:, None, None], matrices, 0)
    rows, columns = _potentials(_with_a_floor(matrices))
    scaled = matrices - rows - columns
    shares = _shares(scaled, iterations, tolerance)
    value = bethe_functional(scaled, shares) + (rows.sum((-2, -1)) + columns.sum((-2, -1)))
    value = torch.where(regular, value, torch.nan)
    return value.view(logs.shape[:-2]).to(logs), shares.view(logs.shape).to(logs)


def _shares(logs: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Return doubly stochastic matrices that nearly maximise Bethe's functional."""
    if logs.shape[-1] == 1:
        return torch.ones_like(logs)
    if logs.shape[-1] == 2:  # the functional is linear: one of the two permutations, or both
        identity, swapped = logs[:, 0, 0] + logs[:, 1, 1], logs[:, 0, 1] + logs[:, 1, 0]
        share = (identity > swapped) + (identity == swapped) / 2
        return torch.stack([share, 1 - share, 1 - share, share], -1).view(logs.shape).to(logs)
    shares = to_unit_sums(_beliefs(logs.exp(), iterations, tolerance, 4, _others))
    for k in (~(_misses(shares) < _TOLERANCE)).nonzero()[:, 0]:
        shares[k] = likeliest_permutation(logs[k])
    return shares


def _beliefs(
    odds: Tensor,
    iterations: int,
    tolerance: float,
    rounds: int,
    others: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Iterate messages, the odds of an edge: ``down`` from its row, ``up`` from its column.

    On this graph they converge (Vontobel), unless several permutations are equally likely; damping
    takes twice as many rounds. Near certainty they are clamped, so that products stay finite.
    """
    up = torch.full_like(odds, 1 / (odds.shape[-1] - 1))
    down = _clamped(odds / others(odds * up, -1))
    shares = torch.zeros_like(odds)
    for step in range(iterations):
        up = _clamped(others(down, -2).reciprocal_())
        down = others(odds * up, -1)
        down = _clamped(torch.div(odds, down, out=down))
        if step % rounds == rounds - 1:
            before, shares = shares, _shares_of(down, up)
            if not bool((shares - before).abs_().amax() >= tolerance):
                break
    return torch.where(odds > 0, _shares_of(down, up), 0)


def _shares_of(down: Tensor, up: Tensor) -> Tensor:
    both = down * up
    return both.div_(both + 1)


def _clamped(odds: Tensor) -> Tensor:
    return odds.clamp_(1e-150, 1e150) if odds.dtype == torch.float64 else odds


def _plain_others(x: Tensor, dim: int) -> Tensor:
    """Return the sum of all other entries along a dimension, for each; ``x`` is overwritten."""
    return torch.sub(x.sum(dim, keepdim=True), x, out=x)


def _others(x: Tensor, dim: int) -> Tensor:
    """Return the sums of `_plain_others`, without cancellation.

    All entries but the largest are at most half of the sum, so that subtracting them is safe. The
    sum without the largest is computed separately.
    """
    largest, where = x.max(dim, keepdim=True)
    remainder = x.scatter(dim, where, 0).sum(dim, keepdim=True)
    others = (largest + remainder).sub(x)
    return others.scatter_(dim, where, remainder)


def _with_a_floor(logs: Tensor) -> Tensor:
    """Replace impossible entries by tiny ones, used by a permutation only as a last resort."""
    possible = logs > -math.inf
    least = torch.where(possible, logs, math.inf).amin((-2, -1), keepdim=True)
    spread = logs.amax((-2, -1), keepdim=True) - least
    floor = least - len(logs[0]) * spread - 2 * _SAFE
    return torch.where(possible, logs, torch.where(floor.isfinite(), floor, 0))


def _potentials(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales of rows and columns that make the likeliest permutation dominant.

    If the diagonal is nearly that permutation already, the largest entry of each row suffices.
    Otherwise they are the dual variables of the linear assignment, found by scaling with ever less
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


# ------------------------------------------------------------ doubly stochastic matrices
def to_unit_sums(shares: Tensor) -> Tensor:
    """Scale rows and columns to sums of one, as far as zero entries allow.

    Sinkhorn's sweeps hardly move if a few tiny entries connect blocks; Newton's steps do.

    Args:
        shares: not negative, ``(matrices, n, n)``, in float64.

    References:
        | The Sinkhorn-Knopp Algorithm: Convergence and Applications (Knight, 2008)
    """
    scaled = _sinkhorn(torch.where(shares > 0, shares.clamp(min=_LEAST), 0), 10)
    for _ in range(10):
        far = (_misses(scaled) >= _TOLERANCE) & scaled.isfinite().all(-1).all(-1)
        if not bool(far.any()):
            break
        scaled[far] = _newton(scaled[far])
    return scaled.clamp(max=1)


def _sinkhorn(shares: Tensor, sweeps: int) -> Tensor:
    rows = torch.ones_like(shares[..., :1])
    for _ in range(sweeps):
        columns = (shares.mT @ rows).reciprocal_()
        rows = (shares @ columns).reciprocal_()
    return rows * shares * columns.mT


def _misses(shares: Tensor) -> Tensor:
    """Return the largest deviation of row and column sums from one, for each matrix."""
    return torch.maximum(*((shares.sum(dim) - 1).abs().amax(-1) for dim in (-2, -1)))


def _newton(scaled: Tensor) -> Tensor:
    """Return factors 1 + u + v that make all sums one, where none of them would be negative.

    The remaining matrix is a Laplacian of the columns, built without differences. Isolated columns
    are left alone.
    """
    gram = (scaled.mT @ scaled).tril(-1)
    gram = gram + gram.mT
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    laplacian = torch.diag_embed(gram.sum(-1)) - gram + 1 / len(identity) + _TOLERANCE * identity
    columns = torch.linalg.solve(laplacian, 1 - scaled.sum(-2, keepdim=True).mT)
    moved = scaled * (1 - scaled @ columns + columns.mT).clamp(1e-3, 1e3)
    return moved / moved.sum(-1, keepdim=True)


def likeliest_permutation(logs: Tensor) -> Tensor:
    """Return the matrix of the likeliest permutation, or the identity if none is possible."""
    try:
        _, columns = linear_sum_assignment(logs.cpu().numpy(), maximize=True)
    except ValueError:  # scipy's word for a matrix without a possible permutation
        columns = range(len(logs))
    return torch.eye(len(logs)).to(logs)[torch.as_tensor(columns)]
