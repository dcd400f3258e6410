r"""Equally weighted mixtures of Gaussians: the joint prediction of several networks.

Means and standard deviations are ``(samples, ...)``; the mixture is over the first dimension, and
every other element is a mixture of its own. All is computed in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from weightsym.params import check_tensors

__all__ = ["mixture_nll"]

_LOG_2PI = math.log(2 * math.pi)
_TINY = torch.finfo(torch.float32).tiny
_AT_ONCE = 2**20
"""Largest number of entries in memory at a time."""
_STEPS, _PRECISION = 200, 4 * torch.finfo(torch.float64).eps
"""More steps than bisecting any bracket of float64 numbers of one magnitude takes."""

Components = Float[Tensor, "samples *shape"]
Values = Float[Tensor, "*shape"]
Float64Values = Float64[Tensor, "*shape"]
Quantiles = Float64[Tensor, "levels *shape"]


# ------------------------------------------------------------ one mixture
def mixture_cdf(means: Components, stds: Components, values: Values) -> Float64Values:
    r"""Distribution function of the mixture, :math:`\frac1S \sum_s \Phi((y - \mu_s) / \sigma_s)`.

    Args:
        means: ``(samples, ...)``.
        stds: standard deviations of the same shape, positive.
        values: ``(...)``, arguments of the function; infinite ones give 0 and 1.

    >>> mixture_cdf(torch.tensor([-1.0, 1.0]), torch.ones(2), torch.tensor(0.0))
    tensor(0.5000, dtype=torch.float64)
    """
    means, stds = components(means, stds)
    return _cdf(means, stds, values_for(values, means))


def mixture_quantiles(
    means: Components, stds: Components, levels: Float[Tensor, " levels"]
) -> Quantiles:
    r"""Quantiles of the mixture, to the precision of float64.

    .. math:: F(x) = \tfrac1S \textstyle\sum_s \Phi\big((x - \mu_s) / \sigma_s\big) = q

    A quantile of a mixture lies between the least and the largest of those of its components. From
    that bracket it is found by Newton steps, or by bisection where these fail.

    Args:
        means: ``(samples, ...)``.
        stds: standard deviations of the same shape, positive.
        levels: ``(levels,)``, between 0 and 1.

    >>> levels = torch.tensor([0.5, 0.975], dtype=torch.float64)
    >>> mixture_quantiles(torch.zeros(3), torch.ones(3), levels)
    tensor([0.0000, 1.9600], dtype=torch.float64)
    """
    means, stds = components(means, stds)
    levels = levels_between_0_and_1(levels).to(means.device)
    flat = [t.reshape(len(t), math.prod(t.shape[1:])) for t in (means, stds)]
    width = max(1, _AT_ONCE // (max(1, len(levels)) * len(means)))
    parts = (_roots(m, s, levels) for m, s in zip(*(t.split(width, 1) for t in flat), strict=True))
    return torch.cat(list(parts), 1).reshape(len(levels), *means.shape[1:])


def mixture_nll(means: Components, stds: Components, values: Values) -> Float64Values:
    r"""Negative log-density, :math:`\log S - \log \sum_s N(y \mid \mu_s, \sigma_s^2)`, in nats.

    Args:
        means: ``(samples, ...)``.
        stds: standard deviations of the same shape, positive.
        values: ``(...)``, the observations.

    >>> mixture_nll(torch.tensor([-1.0, 1.0]), torch.ones(2), torch.tensor(0.0))
    tensor(1.4189, dtype=torch.float64)
    """
    means, stds = components(means, stds)
    return -log_mean_exp(log_density(means, stds, values_for(values, means)))


def mixture_moments(means: Components, stds: Components) -> tuple[Float64Values, Float64Values]:
    r"""Mean and standard deviation of the mixture, with the variance :math:`E\sigma^2 + Var\,\mu`.

    Args:
        means: ``(samples, ...)``.
        stds: standard deviations of the same shape, not negative.

    >>> mixture_moments(torch.tensor([-1.0, 1.0]), torch.zeros(2))
    (tensor(0., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    means, stds = components(means, stds, least="zero")
    mean = means.mean(0)
    variance = (stds.square() + (means - mean).square()).mean(0)
    return mean, variance.sqrt()


def log_mean_exp(logs: Tensor) -> Tensor:
    r"""Logarithm of the mean over the first dimension of densities, given their logarithms.

    .. math:: \log \tfrac1S \textstyle\sum_s e^{l_s}

    Args:
        logs: ``(samples, ...)``.

    >>> log_mean_exp(torch.tensor([[0.2], [0.4]]).log()).exp()
    tensor([0.3000])
    """
    if len(logs) == 1:
        return logs[0]
    mean = logs.exp().mean(0)
    if bool(((mean > _TINY) & (mean < math.inf)).all()):  # several times as fast
        return mean.log()
    return logs.logsumexp(0) - math.log(len(logs))


def log_density(means: Tensor, stds: Tensor, values: Tensor) -> Tensor:
    r"""Log-density of every Gaussian alone, :math:`\log N(y \mid \mu, \sigma^2)`, unchecked.

    Args:
        means: of the Gaussians.
        stds: standard deviations.
        values: arguments of the density.

    >>> log_density(torch.zeros(1), torch.ones(1), torch.zeros(1))
    tensor([-0.9189])
    """
    return -(((values - means) / stds).square() / 2 + stds.log() + _LOG_2PI / 2)


# ------------------------------------------------------------ two mixtures
def mean_distance(
    means: Components, stds: Components, others: Tensor, other_stds: Tensor
) -> Float64Values:
    r"""Mean distance :math:`E|X - Y|` of independent draws from two mixtures.

    It is the mean over pairs of components of :math:`A(\mu_s - \nu_t, \sigma_s^2 + \tau_t^2)` with

    .. math:: A(m, v) = 2 \sqrt v\, \varphi(m / \sqrt v) + m\, (2 \Phi(m / \sqrt v) - 1).

    Args:
        means: ``(samples, ...)``.
        stds: standard deviations of the same shape, not negative.
        others: ``(more samples, ...)``, the means of the other mixture.
        other_stds: its standard deviations.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> mean_distance(zero, zero, 3 * one, zero), mean_distance(zero, one, zero, zero)
    (tensor(3., dtype=torch.float64), tensor(0.7979, dtype=torch.float64))
    """
    x = components(means, stds, least="zero")
    y = components(others, other_stds, least="zero")
    if x[0].shape[1:] != y[0].shape[1:]:
        raise ValueError(
            f"Both mixtures must be over the same values, got shapes {tuple(x[0].shape[1:])} and "
            f"{tuple(y[0].shape[1:])} without the samples."
        )
    rows = max(1, _AT_ONCE // max(1, y[0].numel()))
    sums = [_distances(m, s, *y) for m, s in zip(*(t.split(rows) for t in x), strict=True)]
    return torch.stack(sums).sum(0) / (len(x[0]) * len(y[0]))


def mean_difference(means: Components, stds: Components) -> Float64Values:
    r"""Gini's mean difference :math:`E|X - X'|` of two independent draws from one mixture.

    The components are the whole mixture, not a sample of it, so that pairs of a component with
    itself count.

    Args:
        means: ``(samples, ...)``.
        stds: standard deviations of the same shape, not negative.

    >>> mean_difference(torch.tensor([0.0, 1.0]), torch.zeros(2))
    tensor(0.5000, dtype=torch.float64)
    """
    means, stds = components(means, stds, least="zero")
    rows = max(1, _AT_ONCE // max(1, means.numel()))
    total = means.new_zeros(means.shape[1:])
    for first in range(0, len(means), rows):
        block, after = slice(first, first + rows), slice(first + rows, None)
        total += _distances(means[block], stds[block], means[block], stds[block])
        total += 2 * _distances(means[block], stds[block], means[after], stds[after])
    return total / len(means) ** 2


def thinned(means: Tensor, stds: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Select at most ``most`` components, evenly spaced from the first to the last.

    Args:
        means: ``(samples, ...)``.
        stds: standard deviations of the same shape.
        most: largest number of components.

    >>> thinned(torch.arange(9.0), torch.ones(9), 3)[0]
    tensor([0., 4., 8.])
    """
    if len(means) <= most:
        return means, stds
    chosen = torch.linspace(0, len(means) - 1, most, dtype=torch.float64).round().long()
    return means[chosen.to(means.device)], stds[chosen.to(stds.device)]


# ------------------------------------------------------------ what is refused
def components(means: Tensor, stds: Tensor, least: str = "positive") -> tuple[Tensor, Tensor]:
    """Return means and standard deviations in float64, and require those of Gaussians.

    Args:
        means: of the components, counted by the first dimension.
        stds: of the same shape.
        least: ``"positive"``, or ``"zero"`` if a component may be a point.
    """
    check_tensors(means=means, stds=stds)
    for name, tensor in (("means", means), ("stds", stds)):
        if not tensor.is_floating_point() or tensor.ndim == 0:
            raise ValueError(
                f"`{name}` must be a float tensor (samples, ...), got {tensor.dtype} "
                f"{tuple(tensor.shape)}."
            )
    if means.shape != stds.shape or len(means) == 0:
        raise ValueError(
            "`means` and `stds` must have the same shape (samples, ...) of at least one sample, "
            f"got {tuple(means.shape)} and {tuple(stds.shape)}."
        )
    means, stds = means.detach().double(), stds.detach().double()
    if not stds.numel():
        return means, stds
    are_finite = (means + stds).isfinite().all()
    smallest = float(torch.where(are_finite, stds.min(), torch.nan))
    if math.isnan(smallest):
        raise ValueError("`means` and `stds` must be finite, but hold NaN or infinite values.")
    if smallest < 0 or (least == "positive" and smallest == 0):
        allowed = "positive" if least == "positive" else "not negative"
        raise ValueError(f"`stds` must be {allowed}, the least is {smallest}.")
    return means, stds


def values_for(values: Tensor, means: Tensor, name: str = "values") -> Tensor:
    """Return numbers in float64, and require one for every mixture."""
    check_tensors(**{name: values})
    if values.shape != means.shape[1:]:
        raise ValueError(
            f"`{name}` must have shape {tuple(means.shape[1:])}, as the means have without the "
            f"samples, got {tuple(values.shape)}."
        )
    if not bool(values.isfinite().all()):
        wrong = int((~values.isfinite()).sum())
        raise ValueError(f"`{name}` must be finite, but {wrong} of them are NaN or infinite.")
    return values.detach().double()


def levels_between_0_and_1(levels: Any) -> Tensor:
    """Return levels in float64, and require them strictly between 0 and 1."""
    inside = isinstance(levels, Tensor) and levels.ndim == 1 and levels.is_floating_point()
    if not inside or not bool(((levels > 0) & (levels < 1)).all()):
        raise ValueError(f"`levels` must be numbers between 0 and 1, (levels,), got {levels!r}.")
    return levels.detach().double()


# ------------------------------------------------------------ arithmetic
def _cdf(means: Tensor, stds: Tensor, values: Tensor) -> Tensor:
    """Evaluate by the complementary error function, which is precise in the lower tail, too."""
    return torch.special.erfc((means - values) / (math.sqrt(2) * stds)).mean(0) / 2


def _roots(means: Tensor, stds: Tensor, levels: Tensor) -> Tensor:
    """Return quantiles ``(levels, numbers)`` of mixtures ``(samples, numbers)``.

    A Newton step is taken if it stays in the bracket and is less than half as long as the last one,
    else the bracket is bisected.
    """
    means, stds, levels = means[:, None], stds[:, None], levels[:, None]
    largest = torch.finfo(torch.float64).max
    ends = means + stds * torch.special.ndtri(levels)
    low, high = (t.clamp(-largest, largest) for t in (ends.amin(0), ends.amax(0)))
    x, moved = low / 2 + high / 2, high - low
    for _ in range(_STEPS):
        excess, density = _cdf(means, stds, x) - levels, _density(means, stds, x)
        done = (excess.abs() <= _PRECISION * levels) | (moved <= _PRECISION * x.abs())
        if bool(done.all()):
            break
        low, high = torch.where(excess < 0, x, low), torch.where(excess < 0, high, x)
        newton, middle = x - excess / density, low / 2 + high / 2
        good = (newton >= low) & (newton <= high) & (2 * excess.abs() <= density * moved)
        following = torch.where(done, x, torch.where(good, newton, middle))
        x, moved = following, torch.where(done, moved, (following - x).abs())
    return x


def _density(means: Tensor, stds: Tensor, values: Tensor) -> Tensor:
    return log_density(means, stds, values).exp().mean(0)


def _distances(means: Tensor, stds: Tensor, others: Tensor, other_stds: Tensor) -> Tensor:
    """Return the summed mean distances of pairs of components."""
    m = (means[:, None] - others).abs()
    std = torch.hypot(stds[:, None], other_stds.expand_as(m))
    z = m / std.clamp_min(torch.finfo(torch.float64).tiny)
    density = (-z.square() / 2 - _LOG_2PI / 2).exp()
    return (2 * std * density + m * torch.special.erf(z / math.sqrt(2))).sum((0, 1))
