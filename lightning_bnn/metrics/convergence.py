r"""Agreement of parallel chains, their effective number of draws, and Monte Carlo errors.

Chains are split in halves. Values agree with arviz, except R-hat of constant draws (NaN there).
After

| Rank-normalization, folding, and localization: An improved R-hat (Vehtari et al., 2021)
| https://arxiv.org/abs/1903.08008
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_bnn.metrics.validation import Draws
from weightsym.params import check_between, check_tensors

__all__ = [
    "effective_sample_size", "mcse_mean", "rhat", "tail_effective_sample_size",
]  # fmt: skip

LEAST = 8
"""Smallest number of networks of a chain for any diagnostics."""
_RESOLUTION = 1e-15
"""Smallest difference between numbers that are not constant, as in arviz."""


def rhat(draws: Draws) -> Tensor:
    r"""Potential scale reduction of every number, which is 1 if the chains agree.

    .. math:: \hat R = \sqrt{\frac{(n - 1) W / n + B / n}{W}}

    with the variances between (B) and within (W) the halves of chains, computed from normal scores
    of ranks. The result is the larger value of the numbers and of their distances from the median.
    Constant draws have 1, where arviz has NaN.

    Args:
        draws: of every chain, in order.

    >>> rhat(torch.arange(16.0).reshape(2, 8)) > 2
    tensor(True)
    """
    halves = _halves(draws)
    centred = (halves - _median(halves)).abs()
    reductions = _reduction(_scores(halves)), _reduction(_scores(centred))
    return torch.maximum(*reductions).reshape(draws.shape[2:])


def effective_sample_size(draws: Draws) -> Tensor:
    r"""Number of independent draws that estimate a mean as well as all draws of all chains.

    .. math:: m n / \Big(1 + 2 \sum_t \rho_t\Big)

    with autocorrelations of normal scores of ranks, summed over Geyer's initial monotone sequence.
    Arviz calls it the bulk size.

    Args:
        draws: of every chain, in order.

    >>> effective_sample_size(torch.linspace(0, 1, 40).reshape(2, 20)) < 4
    tensor(True)
    """
    return _effective(_scores(_halves(draws))).reshape(draws.shape[2:])


def tail_effective_sample_size(draws: Draws, probability: float = 0.05) -> Tensor:
    r"""Number of independent draws that estimate the quantiles of the worse tail as well.

    .. math:: \min_{q \in \{p, 1 - p\}} n_\mathrm{eff}\big([x \leq x_q]\big)

    Args:
        draws: of every chain, in order.
        probability: of each tail.

    >>> tail_effective_sample_size(torch.linspace(0, 1, 40).reshape(2, 20)) < 18
    tensor(True)
    """
    check_between("probability", probability)
    sizes = [_quantile_size(draws, p) for p in (probability, 1 - probability)]
    return torch.minimum(*sizes).reshape(draws.shape[2:])


def mcse_mean(draws: Draws) -> Tensor:
    r"""Monte Carlo standard error of the mean of all draws, :math:`s / \sqrt{n_\mathrm{eff}}`.

    Args:
        draws: of every chain, in order.

    >>> mcse_mean(torch.ones(2, 8))
    tensor(0., dtype=torch.float64)
    """
    size = _effective(_halves(draws))
    return (_pooled(draws).std(0) / size.sqrt()).reshape(draws.shape[2:])


def chain_numbers(draws: Draws) -> dict[str, float]:
    """Summarise R-hat and effective sample sizes over all quantities of the chains.

    >>> sorted(chain_numbers(torch.randn(2, 50, 3)))
    ['ess_min', 'ess_tail_min', 'rhat_max', 'rhat_median']
    """
    reduction = rhat(draws)
    return {
        "rhat_max": float(reduction.max()),
        "rhat_median": float(reduction.median()),
        "ess_min": float(effective_sample_size(draws).min()),
        "ess_tail_min": float(tail_effective_sample_size(draws).min()),
    }


def some_of(rows: Tensor, count: int) -> Tensor:
    """Select at most ``count`` entries of the last dimension, evenly spaced.

    >>> some_of(torch.arange(10), 3)
    tensor([1, 5, 8])
    """
    total = rows.shape[-1]
    columns = (torch.arange(min(count, total)) + 0.5) * total / min(count, total)
    return rows[..., columns.long().to(rows.device)]


def check_draws(draws: Tensor) -> None:
    """Require enough finite draws."""
    check_tensors(draws=draws)
    if draws.ndim < 2 or draws.shape[1] < LEAST or not draws.numel():
        raise ValueError(
            f"`draws` must have the shape (chains, samples, ...) with at least {LEAST} samples of "
            f"at least one number, got {tuple(draws.shape)}."
        )
    if not bool(torch.isfinite(draws).all()):
        raise ValueError("`draws` must be finite.")


def _pooled(draws: Tensor) -> Tensor:
    """Return all draws of all chains, ``(draws, numbers)``."""
    return draws.double().reshape(draws.shape[0] * draws.shape[1], -1)


def _halves(draws: Tensor) -> Tensor:
    """Split every chain into halves, ``(2 chains, n, numbers)``."""
    check_draws(draws)
    chains, samples = draws.shape[:2]
    half = samples // 2
    rows = draws.double().reshape(chains, samples, -1)
    return torch.cat([rows[:, :half], rows[:, samples - half :]])


def _quantile_size(draws: Tensor, probability: float) -> Tensor:
    """Return the effective number of draws for the indicator of a quantile."""
    halves = _halves(draws)
    return _effective((halves <= _quantile(_pooled(draws), probability)).double())


def _quantile(x: Tensor, probability: float) -> Tensor:
    """Interpolate between two draws linearly, from the nearer one, which is exact at draws."""
    ordered = x.sort(0).values
    position = (len(x) - 1) * probability
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return torch.lerp(low, high, position - math.floor(position))


def _effective(x: Tensor) -> Tensor:
    """Return the effective size of unsplit chains, ``(chains, samples, numbers)``.

    Autocorrelations are added in pairs while pairs are positive, each at most as large as the one
    before. Of the pair that ends the sum, the first counts once.
    """
    chains, samples = x.shape[:2]
    count = chains * samples
    covariance = _autocovariance(x)
    within = covariance[:, 0].mean(0) * samples / (samples - 1)
    total = within * (samples - 1) / samples + x.mean(1).var(0)
    correlation = 1 - (within - covariance.mean(0)) / total
    correlation[0] = 1
    last = (samples - 3) // 2
    pairs = correlation[: 2 * last + 2].unflatten(0, (-1, 2))
    sums = pairs.sum(1)
    end = (sums > 0).cumprod(0).sum(0, keepdim=True).clamp(max=last)
    inside = torch.arange(last + 1, device=x.device)[:, None] < end
    first, ending = pairs[:, 0].gather(0, end), sums.gather(0, end)
    remainder = torch.where((first > 0) | (ending >= 0), first, 0)[0]
    length = 2 * torch.where(inside, sums.cummin(0).values, 0).sum(0) + remainder - 1
    constant = x.amax((0, 1)) - x.amin((0, 1)) < _RESOLUTION
    return torch.where(constant, count, count / length.clamp(min=1 / math.log10(count)))


def _median(x: Tensor) -> Tensor:
    """Return the mean of the middle two. Halves always have an even number of draws."""
    ordered = x.flatten(0, 1).sort(0).values
    middle = len(ordered) // 2
    return ordered[middle - 1 : middle + 1].mean(0)


def _scores(x: Tensor) -> Tensor:
    """Return normal quantiles of the ranks among all draws. Ties share their mean rank."""
    flat = x.flatten(0, 1)
    ordered = flat.sort(0).values.T.contiguous()
    values = flat.T.contiguous()
    low = torch.searchsorted(ordered, values)
    high = torch.searchsorted(ordered, values, right=True)
    rank = (low + high + 1).double() / 2
    scores = torch.special.ndtri((rank - 0.375) / (len(flat) + 0.25))
    return scores.T.reshape(x.shape)


def _reduction(x: Tensor) -> Tensor:
    """Return the potential scale reduction of unsplit chains, or 1 for constants."""
    samples = x.shape[1]
    between, within = x.mean(1).var(0), x.var(1).mean(0)
    reduction = ((samples - 1) / samples + between / within).sqrt()
    return torch.where((within == 0) & (between == 0), 1.0, reduction)


def _autocovariance(x: Tensor) -> Tensor:
    """Return autocovariances of every chain at all lags, by Fourier transforms."""
    samples = x.shape[1]
    spectrum = torch.fft.rfft(x - x.mean(1, keepdim=True), 2 * samples, 1)
    power = spectrum.real.square() + spectrum.imag.square()
    return torch.fft.irfft(power, 2 * samples, 1)[:, :samples] / samples
