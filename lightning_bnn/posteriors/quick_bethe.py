"""Bethe permanents of matrices in which no permutation stands out: in float32, by plain sums.

Where every share is well below one, nothing is lost when an entry is subtracted from a sum that it
is part of, and messages settle in a few rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.posteriors.doubly_stochastic import bethe_functional

__all__ = ["quick_bethe"]

_FEWEST = 32
"""Rows of matrices for which it pays."""
_LARGEST = 0.9
"""Shares up to here leave a tenth of every sum to the other entries."""
_FINEST = 1e-6
_SWEEPS = 3


def quick_bethe(logs: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Logarithms of Bethe permanents and their gradients; None where that needs float64.

    Args:
        logs: of the matrices, ``(..., n, n)``.
        iterations: rounds of messages at most.
        tolerance: change of the shares in two rounds at which to stop.
    """
    if logs.dtype != torch.float32 or logs.shape[-1] < _FEWEST or tolerance < _FINEST:
        return None
    rows = logs.amax(-1, keepdim=True)
    scaled = logs - rows
    shares = _with_unit_sums(_settled(scaled.exp(), iterations, tolerance))
    misses = [float((shares.sum(dim) - 1).abs().amax()) for dim in (-2, -1)]
    if not (max(misses) < 10 * _FINEST and float(shares.amax()) < _LARGEST):
        return None
    return bethe_functional(scaled, shares) + rows.sum((-2, -1)), shares


def _settled(odds: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Shares after rounds of messages, as `_beliefs` of `permanents` has them."""
    up = torch.full_like(odds, 1 / (odds.shape[-1] - 1))
    shares, down = torch.zeros_like(odds), torch.empty_like(odds)
    for step in range(iterations):
        torch.mul(odds, up, out=down)
        torch.sub(down.sum(-1, keepdim=True), down, out=down)
        torch.div(odds, down, out=down)
        torch.sub(down.sum(-2, keepdim=True), down, out=up).reciprocal_()
        if step % 2 == 1:
            before, shares = shares, _shares(down, up)
            if not float((shares - before).abs_().amax()) >= tolerance:
                return shares
    return _shares(down, up)


def _shares(down: Tensor, up: Tensor) -> Tensor:
    both = down * up
    return both.div_(both + 1)


def _with_unit_sums(shares: Tensor) -> Tensor:
    rows = torch.ones_like(shares[..., :1])
    for _ in range(_SWEEPS):
        columns = 1 / (shares.mT @ rows)
        rows = 1 / (shares @ columns)
    return shares.mul_(rows).mul_(columns.mT)
