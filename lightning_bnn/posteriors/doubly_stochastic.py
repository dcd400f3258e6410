r"""Doubly stochastic matrices near given ones, and the lower bound of a permanent at any of them.

.. math:: \log \mathrm{perm}(A) \ge \sum_{ij} b_{ij} \log \frac{A_{ij}}{b_{ij}}
    + (1 - b_{ij}) \log(1 - b_{ij})

for every doubly stochastic b; the largest of these values is the Bethe permanent.

References:
    | Unleashing the Power of Schrijver's Permanental Inequality (Gurvits, 2011)
    | https://arxiv.org/abs/1106.2844
    | The Sinkhorn-Knopp Algorithm: Convergence and Applications (Knight, 2008)
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

__all__ = ["bethe_functional", "is_doubly_stochastic", "likeliest_permutation", "to_unit_sums"]

_TOLERANCE = 1e-12
_SWEEPS, _STEPS = 10, 10
_LEAST = 1e-100


def bethe_functional(logs: Tensor, shares: Tensor) -> Tensor:
    """A lower bound of the log-permanents of ``logs``, ``(..., n, n)``.

    >>> bethe_functional(torch.zeros(3, 3), torch.full((3, 3), 1 / 3)).exp().round(decimals=3)
    tensor(2.3700)
    """
    others = (1 - shares).clamp(min=0)
    entropies = torch.xlogy(others, others) - torch.xlogy(shares, shares)
    return (entropies + torch.where(shares > 0, shares * logs, 0)).sum((-2, -1))


def is_doubly_stochastic(shares: Tensor) -> Tensor:
    """Whether rows and columns sum to one, up to rounding; one answer for each matrix."""
    misses = [(shares.sum(dim) - 1).abs().amax(-1) for dim in (-2, -1)]
    return torch.maximum(*misses) < _TOLERANCE


def to_unit_sums(shares: Tensor) -> Tensor:
    """Factors on rows and columns make them sum to one, as far as entries that are zero allow it.

    Sinkhorn's sweeps hardly move where a few tiny entries connect the rest; Newton's steps do.

    Args:
        shares: not negative, ``(matrices, n, n)``, in float64.
    """
    scaled = torch.where(shares > 0, shares.clamp(min=_LEAST), 0)
    rows = torch.ones_like(scaled[..., :1])
    for _ in range(_SWEEPS):
        columns = 1 / (scaled.mT @ rows)
        rows = 1 / (scaled @ columns)
    scaled = rows * scaled * columns.mT
    for _ in range(_STEPS):
        far = ~is_doubly_stochastic(scaled) & scaled.isfinite().all(-1).all(-1)
        if not bool(far.any()):
            break
        scaled[far] = _newton(scaled[far])
    return scaled.clamp(max=1)


def _newton(scaled: Tensor) -> Tensor:
    """Factors 1 + u + v after which all sums are one, where none of them would be negative.

    What is left is a Laplacian of the columns, which is built without differences; columns that
    nothing connects are left alone.
    """
    gram = (scaled.mT @ scaled).tril(-1)
    gram = gram + gram.mT
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    laplacian = torch.diag_embed(gram.sum(-1)) - gram + 1 / len(identity) + _TOLERANCE * identity
    columns = torch.linalg.solve(laplacian, 1 - scaled.sum(-2, keepdim=True).mT)
    moved = scaled * (1 - scaled @ columns + columns.mT).clamp(1e-3, 1e3)
    return moved / moved.sum(-1, keepdim=True)


def likeliest_permutation(logs: Tensor) -> Tensor:
    """The matrix of the permutation of largest weight; the identity where none is possible."""
    try:
        _, columns = linear_sum_assignment(logs.cpu().numpy(), maximize=True)
    except ValueError:  # scipy's word for a matrix without a possible permutation
        columns = range(len(logs))
    return torch.eye(len(logs)).to(logs)[torch.as_tensor(columns)]
