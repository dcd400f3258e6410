"""Conformal intervals: what is predicted, made as wide as the errors on held-out examples say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.calibration.finite_quantile import check_alpha, conformal_quantiles
from lightning_bnn.metrics.gaussian_mixture import mixture_moments, mixture_quantiles
from lightning_bnn.metrics.validation import check_finite

__all__ = [
    "Band",
    "ConformalIntervals",
    "Intervals",
    "conformal_intervals",
    "mean_band",
    "quantile_band",
]


class Intervals(NamedTuple):
    """Lower and upper ends, in the shape of the targets.

    >>> intervals = Intervals(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 2.0]))
    >>> intervals.contain(torch.tensor([2.0, 2.0])), intervals.width
    (tensor([False,  True]), tensor([1., 2.]))
    """

    low: Tensor
    high: Tensor

    def contain(self, targets: Tensor) -> Tensor:
        """Which targets lie inside, ends included."""
        return (self.low <= targets) & (targets <= self.high)

    @property
    def width(self) -> Tensor:
        """How far the ends are from each other."""
        return self.high - self.low


class Band(NamedTuple):
    """What is predicted before calibration: intervals, and the unit in which they are widened.

    Every tensor has the shape of the targets, ``(batch, ...)``.

    >>> from lightning_bnn.calibration import quantile_band
    >>> band = quantile_band(torch.zeros(1, 3), torch.ones(1, 3), alpha=0.1)
    >>> [round(part[0].item(), 3) for part in band]  # of a standard normal, in units of one
    [-1.645, 1.645, 1.0]
    """

    low: Tensor
    high: Tensor
    scale: Tensor


def mean_band(means: Tensor, stds: Tensor) -> Band:
    r"""The mean of a mixture of Gaussians, to be widened by multiples of its standard deviation.

    .. math:: l = h = \tfrac1S \textstyle\sum_s \mu_s, \quad
        s^2 = \tfrac1S \sum_s (\sigma_s^2 + \mu_s^2) - l^2

    These are split conformal intervals with normalised residuals.

    Args:
        means: of every network, ``(samples, batch, ...)``.
        stds: in the same shape.

    >>> band = mean_band(torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1) + 1e-6)  # two networks
    >>> [round(part.item(), 4) for part in band]
    [1.0, 1.0, 1.0]
    """
    centre, std = mixture_moments(means, stds)
    return Band(centre, centre, std)


def quantile_band(means: Tensor, stds: Tensor, alpha: int | float = 0.1) -> Band:
    r"""The central interval of a mixture of Gaussians, to be widened by the same for all examples.

    These are intervals of conformalised quantile regression (CQR), with the quantiles
    :math:`\alpha / 2` and :math:`1 - \alpha / 2` of the predictive distribution.

    Args:
        means: of every network, ``(samples, batch, ...)``.
        stds: in the same shape.
        alpha: what lies outside of the interval.

    >>> band = quantile_band(torch.zeros(2, 1), torch.ones(2, 1), alpha=0.05)
    >>> round(band.low.item(), 2), round(band.high.item(), 2)
    (-1.96, 1.96)
    """
    check_alpha(alpha)
    levels = torch.tensor([alpha / 2, 1 - alpha / 2], dtype=torch.float64)
    low, high = mixture_quantiles(means, stds, levels)
    return Band(low, high, torch.ones_like(low))


@dataclass(frozen=True)
class ConformalIntervals:
    r"""Intervals, given calibration examples; called, it makes those of new predictions.

    .. math:: [l - q s,\; h + q s], \quad q = \text{quantile of } \max(l_i - y_i,\; y_i - h_i) / s_i

    Attributes:
        scores: how far every calibration target lies outside of its band, in units of its scale.
        groups: to which group each calibration example belongs.
        alpha: the share of targets that may lie outside.
        count: how many groups there are.

    >>> from lightning_bnn.calibration import Band, conformal_intervals
    >>> zeros = torch.zeros(99)
    >>> rule = conformal_intervals(Band(zeros, zeros, zeros + 1), torch.arange(99.0), alpha=0.1)
    >>> rule.thresholds().item(), rule.at(0.5).thresholds().item()  # the 90th and the 50th score
    (89.0, 49.0)
    """

    scores: Tensor
    groups: Tensor
    alpha: float = 0.1
    count: int = 1

    def thresholds(self) -> Tensor:
        """By how many units the bands are widened, ``(groups, ...)``."""
        return conformal_quantiles(self.scores, self.alpha, self.groups, self.count)

    def at(self, alpha: int | float) -> ConformalIntervals:
        """The same with another error rate; a `quantile_band` has that for which it was made.

        Args:
            alpha: the share of targets that may lie outside.
        """
        check_alpha(alpha)
        return replace(self, alpha=float(alpha))

    def __call__(self, band: Band, groups: Tensor | None = None) -> Intervals:
        """The intervals of new examples; those of a group without calibration are infinite.

        Args:
            band: what is predicted.
            groups: to which group each example belongs, if calibration had groups.
        """
        band = _checked(band)
        if (groups is None) != (self.count == 1):
            has = "one group" if self.count == 1 else f"{self.count} groups"
            raise ValueError(f"`groups` must be given as in calibration, which had {has}.")
        if groups is None:
            groups = torch.zeros(len(band.low), dtype=torch.long)
        _check_groups(groups, len(band.low))
        widths = torch.cat([self.thresholds(), self.thresholds_of_none()]).to(band.low)
        by = widths[groups.long().clamp(0, self.count).to(widths.device)] * band.scale
        low, high = band.low - by, band.high + by
        middle = (low + high) / 2
        crossed = low > high  # a band that was too wide by more than its width
        return Intervals(torch.where(crossed, middle, low), torch.where(crossed, middle, high))

    def thresholds_of_none(self) -> Tensor:
        """What belongs to a group that calibration has not seen."""
        return self.scores.new_full((1, *self.scores.shape[1:]), torch.inf)


def conformal_intervals(
    band: Band, targets: Tensor, alpha: int | float = 0.1, groups: Tensor | None = None
) -> ConformalIntervals:
    r"""Intervals that miss at most a share :math:`\alpha` of new targets.

    The score of an example is :math:`\max(l - y, y - h) / s` for its band :math:`[l, h]` and scale
    :math:`s`; intervals are :math:`[l - q s, h + q s]` with the conformal quantile :math:`q` of the
    scores. Of several targets each has intervals of its own. Too few calibration examples give
    infinite intervals, and one warning.

    References:
        | Distribution-Free Predictive Inference for Regression (Lei et al., 2018)
        | https://arxiv.org/abs/1604.04173
        | Conformalized Quantile Regression (Romano, Patterson and Candes, 2019)
        | https://arxiv.org/abs/1905.03222

    Args:
        band: of the calibration examples, `mean_band` or `quantile_band`, or one of your own.
        targets: theirs, ``(batch, ...)``.
        alpha: the share of new targets that may lie outside.
        groups: whole numbers from 0; the share then holds for every group of examples (Mondrian).

    Returns:
        A function from bands to `Intervals`.

    >>> zeros = torch.zeros(9)
    >>> rule = conformal_intervals(Band(zeros, zeros, zeros + 1), torch.arange(9.0))
    >>> rule(Band(zeros[:1], zeros[:1], zeros[:1] + 1)).high
    tensor([8.], dtype=torch.float64)
    """
    check_alpha(alpha)
    band, targets = _checked(band), targets.double()
    check_finite(targets, "targets")
    if targets.shape != band.low.shape:
        raise ValueError(
            f"`targets` must have shape {tuple(band.low.shape)}, got {tuple(targets.shape)}."
        )
    if groups is None:
        groups = torch.zeros(len(targets), dtype=torch.long)
    _check_groups(groups, len(targets))
    scores = torch.maximum(band.low - targets, targets - band.high) / band.scale
    count = int(groups.max()) + 1 if len(groups) else 1
    return ConformalIntervals(scores, groups.long(), float(alpha), count)


def _checked(band: Band) -> Band:
    """Finite numbers in float64, the scale positive."""
    if not band.low.shape == band.high.shape == band.scale.shape or not band.low.ndim:
        shapes = ", ".join(str(tuple(t.shape)) for t in band)
        raise ValueError(f"`band` must be three tensors of one shape (batch, ...), got {shapes}.")
    band = Band(*(t.double() for t in band))
    for name, values in band._asdict().items():
        check_finite(values, f"band.{name}")
    if not bool((band.scale > 0).all()) or bool((band.low > band.high).any()):
        raise ValueError("`band` must have a positive `scale`, and `low` not above `high`.")
    return band


def _check_groups(groups: Tensor, n: int) -> None:
    whole = not (groups.is_floating_point() or groups.is_complex())
    if groups.shape != (n,) or not whole or (n and int(groups.min()) < 0):
        raise ValueError(
            f"`groups` must be {n} whole numbers from 0, got {groups.dtype} {tuple(groups.shape)}."
        )
