r"""Predicted densities of numbers: scores, calibration, and distances to a reference.

The prediction of S networks for a number is a mixture of S Gaussians, with means and standard
deviations ``(samples, batch, targets)``, or ``(samples, batch)``. Targets are ``(batch, targets)``
or ``(batch,)``. Every target is evaluated separately, and the results are means over examples and
targets.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, ExampleMean, collected
from lightning_bnn.metrics.gaussian_mixture import (
    components,
    mean_difference,
    mean_distance,
    mixture_cdf,
    mixture_moments,
    mixture_quantiles,
    thinned,
    values_for,
)
from lightning_bnn.metrics.validation import Number
from weightsym.params import check_between, check_count

__all__ = [
    "CRPS", "crps", "energy_distance", "interval_coverage", "interval_width", "pit",
    "quantile_calibration", "quantile_calibration_floor", "sharpness",
]  # fmt: skip

Networks = Float[Tensor, "samples *examples"]
References = Float[Tensor, "others *examples"]
Targets = Float[Tensor, "*examples"]
_SAMPLES = 200
"""Largest number of networks compared pair by pair."""
_LEVELS = torch.arange(1, 20, dtype=torch.float64) / 20


# ------------------------------------------------------------ scores
def crps(means: Networks, stds: Networks, targets: Targets, samples: int = _SAMPLES) -> Number:
    r"""Continuous ranked probability score of the mixture, in the unit of the target.

    .. math::
        \int (F(x) - 1[x \ge y])^2 dx = E|X - y| - \frac12 E|X - X'|

    Args:
        means: predicted by every network, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        targets: observations, ``(batch, targets)``.
        samples: largest number of networks, evenly spaced, whose pairs are compared.

    References:
        | Strictly Proper Scoring Rules, Prediction, and Estimation (Gneiting and Raftery, 2007)
        | https://doi.org/10.1198/016214506000001437

    >>> crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
    tensor(0.2337, dtype=torch.float64)
    """
    return crps_of_each(means, stds, targets, samples).mean()


def crps_of_each(means: Tensor, stds: Tensor, targets: Tensor, samples: int = _SAMPLES) -> Tensor:
    """Return the CRPS of every target of every example, see `crps`.

    Args:
        means: ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        targets: ``(batch, targets)``.
        samples: largest number of networks.
    """
    check_count("samples", samples)
    x = thinned(*components(means, stds, least="zero"), samples)
    points = values_for(targets, x[0], "targets")[None]
    distance = mean_distance(*x, points, torch.zeros_like(points))
    return (distance - mean_difference(*x) / 2).clamp_min(0)


def sharpness(means: Networks, stds: Networks) -> Number:
    r"""Mean standard deviation of the predictive distributions, in the unit of the target.

    It is that of the mixture, :math:`\sqrt{E\sigma^2 + Var\,\mu}`, and combines noise with the
    disagreement of networks. It does not measure whether predictions are right.

    Args:
        means: predicted by every network, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape.

    >>> sharpness(torch.tensor([[-1.0], [1.0]]), torch.zeros(2, 1))
    tensor(1., dtype=torch.float64)
    """
    return mixture_moments(means, stds)[1].mean()


def energy_distance(
    means: Networks,
    stds: Networks,
    reference_means: References,
    reference_stds: References,
    samples: int = _SAMPLES,
) -> Number:
    r"""Energy distance of two predictive mixtures, a mean over examples, in the target's unit.

    .. math:: 2 E|X - Y| - E|X - X'| - E|Y - Y'| = 2 \int (F - G)^2

    With standard deviations of zero it compares the outputs of the networks, without noise. These
    are two sets of points: n draws of one law are about 1/n + 1/m away from m others.

    Args:
        means: predicted by every network, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        reference_means: means of the reference; the number of networks may differ.
        reference_stds: standard deviations of the reference.
        samples: largest number of networks on each side, evenly spaced.

    References:
        | Energy statistics (Szekely and Rizzo, 2013) | https://doi.org/10.1016/j.jspi.2013.03.018

    >>> zeros, ones = torch.zeros(1, 1), torch.ones(1, 1)
    >>> energy_distance(zeros, zeros, ones, zeros)
    tensor(2., dtype=torch.float64)
    """
    return energy_distance_of_each(
        means, stds, reference_means, reference_stds, samples=samples
    ).mean()


def energy_distance_of_each(
    means: Tensor,
    stds: Tensor,
    reference_means: Tensor,
    reference_stds: Tensor,
    reference_difference: Tensor | None = None,
    samples: int = _SAMPLES,
) -> Tensor:
    """Return the energy distance for every target of every example, see `energy_distance`.

    Args:
        means: ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        reference_means: means of the reference.
        reference_stds: standard deviations of the reference.
        reference_difference: `mean_difference` of the reference (thinned in the same way), if
            known.
        samples: largest number of networks on each side.
    """
    check_count("samples", samples)
    x = thinned(*components(means, stds, least="zero"), samples)
    y = thinned(*components(reference_means, reference_stds, least="zero"), samples)
    if reference_difference is None:
        reference_difference = mean_difference(*y)
    distance = 2 * mean_distance(*x, *y) - mean_difference(*x) - reference_difference
    return distance.clamp_min(0)


# ------------------------------------------------------------ calibration
def pit(means: Networks, stds: Networks, targets: Targets) -> Tensor:
    r"""Probability integral transform :math:`\frac1S \sum_s \Phi((y - \mu_s) / \sigma_s)`.

    It is uniform between 0 and 1 if the predictive distributions are the true ones.

    Args:
        means: predicted by every network, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        targets: observations, ``(batch, targets)``.

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
    r"""Share of the targets in the central interval, equal to the level if calibrated.

    .. math:: \frac1n \sum_i \big[q_{(1 - l) / 2}(x_i) \leq y_i \leq q_{(1 + l) / 2}(x_i)\big]

    Args:
        means: predicted by every network, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        targets: observations, ``(batch, targets)``.
        level: probability of the interval, with equal probabilities below and above.

    >>> zeros = torch.zeros(1, 2)
    >>> interval_coverage(zeros, zeros + 1, torch.tensor([1.6, 1.7]))
    tensor(0.5000, dtype=torch.float64)
    """
    check_between("level", level)
    return inside(pit(means, stds, targets), level).mean()


def interval_width(means: Networks, stds: Networks, level: float = 0.9) -> Number:
    r"""Mean width of the central intervals, in the unit of the target.

    .. math:: \frac1n \sum_i q_{(1 + l) / 2}(x_i) - q_{(1 - l) / 2}(x_i)

    Args:
        means: predicted by every network, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        level: probability of the interval, with equal probabilities below and above.

    >>> interval_width(torch.zeros(1, 1), torch.ones(1, 1))
    tensor(3.2897, dtype=torch.float64)
    """
    return width_of_each(means, stds, level).mean()


def quantile_calibration(means: Networks, stds: Networks, targets: Targets) -> Number:
    r"""Mean over :math:`q = 0.05, ..., 0.95` of the error of the share of targets below a quantile.

    .. math:: \frac1{19} \sum_q \left| \frac1n \#\{i: u_i \le q\} - q \right|, \quad u = pit

    It is never zero: `quantile_calibration_floor` returns the value of a perfect forecaster.

    Args:
        means: predicted by every network, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        targets: observations, ``(batch, targets)``.

    >>> zeros = torch.zeros(1, 2)
    >>> quantile_calibration(zeros, zeros + 1, torch.tensor([-0.5, 0.5]))
    tensor(0.1421, dtype=torch.float64)
    """
    return calibration_of_pit(pit(means, stds, targets))


def quantile_calibration_floor(examples: int) -> float:
    r"""Expected `quantile_calibration` of a perfect forecaster with this many examples.

    Shares are then binomial, with mean deviation (De Moivre) :math:`\frac2n \nu \binom n\nu q^\nu
    (1 - q)^{n - \nu + 1}` with :math:`\nu = \lfloor nq \rfloor + 1`.

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
    """Return the width of every central interval, see `interval_width`.

    Args:
        means: ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, positive.
        level: probability of the interval.
    """
    check_between("level", level)
    tail = (1 - level) / 2
    levels = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = mixture_quantiles(means, stds, levels)
    return high - low


def calibration_of_pit(u: Tensor) -> Tensor:
    """Return the error of `quantile_calibration` from `pit` ``(batch, targets)`` or ``(batch,)``.

    Args:
        u: `pit` of every target; the result is NaN without examples or if one is NaN.
    """
    error = (levels_reached(u) - _LEVELS.to(u.device)[:, None]).abs().mean()
    return torch.where(u.isnan().any(), torch.nan, error)


def levels_reached(u: Tensor) -> Tensor:
    """Return shares of the examples below their quantiles 0.05, ..., 0.95, ``(levels, targets)``.

    Args:
        u: `pit` of every target, ``(batch, targets)`` or ``(batch,)``.
    """
    columns = u.flatten(1) if u.ndim > 1 else u.reshape(-1, 1)
    return torch.stack([(columns <= q).double().mean(0) for q in _LEVELS.tolist()])


# ------------------------------------------------------------ classes
class CRPS(ExampleMean):
    """Continuous ranked probability score, see `crps`.

    Args:
        samples: largest number of networks, evenly spaced.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> CRPS()(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
    tensor(0.2337, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, samples: int = _SAMPLES, **kwargs: Any) -> None:
        check_count("samples", samples)
        super().__init__(samples, **kwargs)
        self.samples = samples

    def update(self, means: Tensor, stds: Tensor, targets: Tensor) -> None:
        """Add a batch of predictions of every network, and the targets."""
        values = crps_of_each(means, stds, targets, self.samples)
        if values.ndim == 0:
            raise ValueError("`means` must be (samples, batch, targets) or (samples, batch).")
        self.add(values.flatten(1).mean(1) if values.ndim > 1 else values)


class PITCalibration(ExactMetric):
    """Error of the shares of targets below quantiles, from their stored `pit`.

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
                f"`targets` must have {int(self.pit_targets)} columns as in earlier "
                f"batches, got {targets}."
            )
        self.pit_values.append(u.detach().double().flatten())
        self.pit_targets = self.pit_targets.new_full((), targets)

    def compute(self) -> Tensor:
        """Return the error, or NaN without examples."""
        values = collected(self.pit_values)
        if not len(values):
            return self._nan("it has seen no examples")
        return calibration_of_pit(values.reshape(-1, int(self.pit_targets)))
