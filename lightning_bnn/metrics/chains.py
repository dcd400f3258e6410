r"""Do parallel chains agree, and how many independent draws are they worth?

Rank-normalised, on chains split in halves, after

| Rank-normalization, folding, and localization: An improved R-hat (Vehtari et al., 2021)
| https://arxiv.org/abs/1903.08008
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["effective_sample_size", "rhat"]

_LEAST = 8


def rhat(draws: Float[Tensor, "chains samples *numbers"]) -> Tensor:
    r"""Potential scale reduction of every number: 1 when the chains cannot be told apart.

    .. math:: \hat R = \sqrt{\frac{(n - 1) W / n + B / n}{W}}

    with the variances between (B) and within (W) the halves of chains, of normal scores of ranks;
    the larger one of the numbers and of their distances from the median.

    Args:
        draws: of every chain, in order.

    >>> rhat(torch.arange(16.0).reshape(2, 8)) > 2
    tensor(True)
    """
    halves = _halves(draws)
    centred = (halves - _median(halves)).abs()
    found = torch.maximum(_reduction(_scores(halves)), _reduction(_scores(centred)))
    return found.reshape(draws.shape[2:])


def effective_sample_size(draws: Float[Tensor, "chains samples *numbers"]) -> Tensor:
    r"""Independent draws that estimate a mean as well as all draws of all chains do.

    .. math:: m n / \Big(1 + 2 \sum_t \rho_t\Big)

    with autocorrelations of normal scores of ranks, summed over Geyer's initial monotone sequence.

    Args:
        draws: of every chain, in order.

    >>> effective_sample_size(torch.arange(16.0).reshape(2, 8)) < 4
    tensor(True)
    """
    scores = _scores(_halves(draws))
    chains, samples = scores.shape[:2]
    covariance = _autocovariance(scores)
    within = covariance[:, 0].mean(0) * samples / (samples - 1)
    total = within * (samples - 1) / samples + scores.mean(1).var(0)
    correlation = 1 - (within - covariance.mean(0)) / total
    correlation[0] = 1
    pairs = correlation[: samples // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    alive = (pairs > 0).cumprod(0)
    pairs = torch.where(alive.bool(), pairs, torch.inf).cummin(0).values
    length = torch.where(alive.bool(), pairs, 0.0).sum(0) * 2 - 1
    count = chains * samples
    found = count / length.clamp(min=1 / math.log10(count))
    return found.reshape(draws.shape[2:])


def _halves(draws: Tensor) -> Tensor:
    """First and second half of every chain as chains of their own, ``(2 chains, n, numbers)``."""
    if draws.ndim < 2 or draws.shape[1] < _LEAST:
        raise ValueError(
            f"`draws` must have the shape (chains, samples, ...) with at least {_LEAST} samples, "
            f"got {tuple(draws.shape)}."
        )
    if not bool(torch.isfinite(draws).all()):
        raise ValueError("`draws` must be finite.")
    chains, samples = draws.shape[:2]
    half = samples // 2
    rows = draws.double().reshape(chains, samples, -1)
    return torch.cat([rows[:, :half], rows[:, samples - half :]])


def _median(x: Tensor) -> Tensor:
    """The mean of the middle two; halves always hold an even number of draws."""
    ordered = x.flatten(0, 1).sort(0).values
    middle = len(ordered) // 2
    return ordered[middle - 1 : middle + 1].mean(0)


def _scores(x: Tensor) -> Tensor:
    """Normal quantiles of the ranks among all draws; ties share their mean rank."""
    flat = x.flatten(0, 1)
    ordered = flat.sort(0).values.T.contiguous()
    values = flat.T.contiguous()
    low = torch.searchsorted(ordered, values)
    high = torch.searchsorted(ordered, values, right=True)
    rank = (low + high + 1).double() / 2
    scores = torch.special.ndtri((rank - 0.375) / (len(flat) + 0.25))
    return scores.T.reshape(x.shape)


def _reduction(x: Tensor) -> Tensor:
    samples = x.shape[1]
    between, within = x.mean(1).var(0), x.var(1).mean(0)
    found = ((samples - 1) / samples + between / within).sqrt()
    return torch.where((within == 0) & (between == 0), 1.0, found)


def _autocovariance(x: Tensor) -> Tensor:
    """Of every chain at all lags, by Fourier transforms."""
    samples = x.shape[1]
    spectrum = torch.fft.rfft(x - x.mean(1, keepdim=True), 2 * samples, 1)
    power = spectrum.real.square() + spectrum.imag.square()
    return torch.fft.irfft(power, 2 * samples, 1)[:, :samples] / samples
