r"""Calibration of predicted densities: does an interval of 90 % hold 90 % of the targets?

What S networks predict of a number is a mixture of S Gaussians: means and standard deviations
``(samples, batch, targets)``, or ``(samples, batch)``. Targets are ``(batch, targets)`` or
``(batch,)``. Every target is judged alone, and the numbers are means over targets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bnn.arguments import check_count, is_number
from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.density_scores import Networks, Targets
from lightning_bnn.metrics.gaussian_mixture import (
    components,
    mixture_cdf,
    mixture_quantiles,
    values_for,
)
from lightning_bnn.metrics.shapes import Number

__all__ = [
    "PITCalibration", 
    "calibration_of_pit", "inside", "interval_coverage", "interval_width", "pit",
    "quantile_calibration", "quantile_calibration_floor", "width_of_each",
]  # fmt: skip

_LEVELS = torch.arange(1, 20, dtype=torch.float64) / 20


# ------------------------------------------------------------ functions
def pit(means: Networks, stds: Networks, targets: Targets) -> Tensor:
    r"""Probability integral transform :math:`\frac1S \sum_s \Phi((y - \mu_s) / \sigma_s)`.

    It is uniform between 0 and 1 if the predictive distributions are the true ones.

    Args:
        means: of what every network predicts, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        targets: what was observed, ``(batch, targets)``.

    Returns:
        One number per example and target.

    >>> pit(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
    tensor([0.5000], dtype=torch.float64)
    """
    means, stds = components(means, stds)
    return mixture_cdf(means, stds, values_for(targets, means, "targets"))


def interval_coverage(
    means: Networks, stds: Networks, targets: Targets, level: float = 0.9
) -> Number:
    r"""Share of the targets within the central interval, which is the level under calibration.

    .. math:: \frac1n \sum_i \big[q_{(1 - l) / 2}(x_i) \leq y_i \leq q_{(1 + l) / 2}(x_i)\big]

    Args:
        means: of what every network predicts, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        targets: what was observed, ``(batch, targets)``.
        level: probability of the interval; as much of the rest lies below it as above.

    >>> zeros = torch.zeros(1, 2)
    >>> interval_coverage(zeros, zeros + 1, torch.tensor([1.6, 1.7]))
    tensor(0.5000, dtype=torch.float64)
    """
    return inside(pit(means, stds, targets), _checked(level)).mean()


def interval_width(means: Networks, stds: Networks, level: float = 0.9) -> Number:
    r"""Mean width of the central intervals, in the unit of the target.

    .. math:: \frac1n \sum_i q_{(1 + l) / 2}(x_i) - q_{(1 - l) / 2}(x_i)

    Args:
        means: of what every network predicts, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        level: probability of the interval; as much of the rest lies below it as above.

    >>> interval_width(torch.zeros(1, 1), torch.ones(1, 1))
    tensor(3.2897, dtype=torch.float64)
    """
    return width_of_each(means, stds, level).mean()


def quantile_calibration(means: Networks, stds: Networks, targets: Targets) -> Number:
    r"""Mean over :math:`q = 0.05, ..., 0.95` of the error of the share of targets below a quantile.

    .. math:: \frac1{19} \sum_q \left| \frac1n \#\{i: u_i \le q\} - q \right|, \quad u = pit

    It is never zero: `quantile_calibration_floor` is what a perfect forecaster has.

    Args:
        means: of what every network predicts, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        targets: what was observed, ``(batch, targets)``.

    >>> zeros = torch.zeros(1, 2)
    >>> quantile_calibration(zeros, zeros + 1, torch.tensor([-0.5, 0.5]))
    tensor(0.1421, dtype=torch.float64)
    """
    return calibration_of_pit(pit(means, stds, targets))


def quantile_calibration_floor(examples: int) -> float:
    r"""Expected `quantile_calibration` of a perfect forecaster with so many examples.

    Shares are binomial then, whose mean deviation is (De Moivre)
    :math:`\frac2n \nu \binom n\nu q^\nu (1 - q)^{n - \nu + 1}` with
    :math:`\nu = \lfloor nq \rfloor + 1`.

    Args:
        examples: number of independent examples.

    >>> round(quantile_calibration_floor(100), 3), round(quantile_calibration_floor(300), 3)
    (0.032, 0.019)
    """
    check_count("examples", examples)
    n, q = torch.tensor(float(examples), dtype=torch.float64), _LEVELS
    nu = (n * q).floor() + 1
    choose = torch.lgamma(n + 1) - torch.lgamma(nu + 1) - torch.lgamma(n - nu + 1)
    logs = choose + nu.log() + nu * q.log() + (n - nu + 1) * (1 - q).log()
    return float((2 / n * logs.exp()).mean())


def inside(u: Tensor, level: float) -> Tensor:
    """Mark targets in central intervals as 1 and others as 0, by their `pit`.

    Args:
        u: of every target.
        level: probability of the interval.
    """
    tail = (1 - level) / 2
    return torch.where(u.isnan(), u, ((u > tail) & (u < 1 - tail)).double())


def width_of_each(means: Tensor, stds: Tensor, level: float = 0.9) -> Tensor:
    """Width of every central interval, see `interval_width`.

    Args:
        means: ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        level: probability of the interval.
    """
    tail = (1 - _checked(level)) / 2
    levels = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = mixture_quantiles(means, stds, levels)
    return high - low


def calibration_of_pit(u: Tensor) -> Tensor:
    """The error of `quantile_calibration`, of `pit` ``(batch, targets)`` or ``(batch,)``.

    Args:
        u: of every target; NaN without examples or where one is NaN.
    """
    columns = u.flatten(1) if u.ndim > 1 else u[:, None]
    levels = _LEVELS.to(u.device)[:, None]
    shares = torch.stack([(columns <= q).double().mean(0) for q in levels])
    error = (shares - levels).abs().mean()
    return torch.where(columns.isnan().any(), torch.nan, error)


def _checked(level: Any) -> float:
    if not (is_number(level) and 0 < level < 1):
        raise ValueError(f"`level` must be between 0 and 1, got {level!r}.")
    return float(level)


# ------------------------------------------------------------ classes


class PITCalibration(ExactMetric):
    """Error of the shares of targets below quantiles, of their `pit`, which are all kept.

    >>> PITCalibration()(torch.tensor([0.3085, 0.6915]))
    tensor(0.1421, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    pit_values: list[Tensor]
    pit_targets: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_list("pit_values")
        self.add_state("pit_targets", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, u: Tensor) -> None:
        """Add the `pit` of a batch, ``(batch, targets)`` or ``(batch,)``."""
        targets = max(1, u.shape[1:].numel())
        if self.pit_targets > 0 and int(self.pit_targets) != targets:
            raise ValueError(
                f"`targets` must have {int(self.pit_targets)} columns as before, got {targets}."
            )
        self.pit_values.append(u.detach().double().flatten())
        self.pit_targets = self.pit_targets.new_full((), targets)

    def compute(self) -> Tensor:
        """The error, or NaN without examples."""
        values = collected(self.pit_values)
        if not len(values):
            return self._nan("it has seen no example")
        return calibration_of_pit(values.reshape(-1, int(self.pit_targets)))
