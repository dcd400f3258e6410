r"""Scores of predicted densities of numbers, and distances of predictions to a reference.

What S networks predict of a number is a mixture of S Gaussians: means and standard deviations
``(samples, batch, targets)``, or ``(samples, batch)``. Targets are ``(batch, targets)`` or
``(batch,)``. Every target is judged alone, and the numbers are means over examples and targets.

The Wasserstein distance compares draws, ``(samples, batch, targets)``: of every target of every
example two sets of points on a line. The cheapest way to move one to the other keeps their order.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_bnn.arguments import check_count
from lightning_bnn.metrics.base import ExampleMean
from lightning_bnn.metrics.gaussian_mixture import (
    components,
    mean_difference,
    mean_distance,
    mixture_moments,
    thinned,
    values_for,
)
from lightning_bnn.metrics.shapes import Number

__all__ = [
    "CRPS",
    "crps",
    "crps_of_each",
    "energy_distance",
    "energy_distance_of_each",
    "sharpness",
    "wasserstein",
    "wasserstein_of_each",
]

Networks = Float[Tensor, "samples batch *targets"]
References = Float[Tensor, "others batch *targets"]
Targets = Float[Tensor, "batch *targets"]
_SAMPLES = 200
"""Networks that are compared pair by pair."""


# ------------------------------------------------------------ functions
def crps(means: Networks, stds: Networks, targets: Targets, samples: int = _SAMPLES) -> Number:
    r"""Continuous ranked probability score of the mixture, in the unit of the target.

    .. math::
        \int (F(x) - 1[x \ge y])^2 dx = E|X - y| - \frac12 E|X - X'|

    Args:
        means: of what every network predicts, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        targets: what was observed, ``(batch, targets)``.
        samples: of more networks so many are taken, evenly spaced; all pairs are compared.

    References:
        | Strictly Proper Scoring Rules, Prediction, and Estimation (Gneiting and Raftery, 2007)
        | https://doi.org/10.1198/016214506000001437

    >>> crps(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
    tensor(0.2337, dtype=torch.float64)
    """
    return crps_of_each(means, stds, targets, samples).mean()


def crps_of_each(means: Tensor, stds: Tensor, targets: Tensor, samples: int = _SAMPLES) -> Tensor:
    """CRPS of every target of every example, see `crps`.

    Args:
        means: ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        targets: ``(batch, targets)``.
        samples: of more networks so many are taken.
    """
    check_count("samples", samples)
    x = thinned(*components(means, stds, least="zero"), samples)
    points = values_for(targets, x[0], "targets")[None]
    distance = mean_distance(*x, points, torch.zeros_like(points))
    return (distance - mean_difference(*x) / 2).clamp_min(0)


def sharpness(means: Networks, stds: Networks) -> Number:
    r"""Mean standard deviation of the predictive distributions, in the unit of the target.

    It is that of the mixture, :math:`\sqrt{E\sigma^2 + Var\,\mu}`: of noise and of the networks'
    disagreement together. It says nothing about whether predictions are right.

    Args:
        means: of what every network predicts, ``(samples, batch, targets)``.
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

    With standard deviations of zero it compares what the networks compute, without noise. These
    are two sets of points then: n draws of one law are about 1/n + 1/m away from m others.

    Args:
        means: of what every network predicts, ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        reference_means: the same of the reference; the number of networks may differ.
        reference_stds: the same of the reference.
        samples: of more networks on a side so many are taken, evenly spaced.

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
    """Energy distance for every target of every example, see `energy_distance`.

    Args:
        means: ``(samples, batch, targets)``.
        stds: standard deviations of the same shape, not negative.
        reference_means: the same of the reference.
        reference_stds: the same of the reference.
        reference_difference: `mean_difference` of the reference (thinned as it is here), if known.
        samples: of more networks on a side so many are taken.
    """
    check_count("samples", samples)
    x = thinned(*components(means, stds, least="zero"), samples)
    y = thinned(*components(reference_means, reference_stds, least="zero"), samples)
    if reference_difference is None:
        reference_difference = mean_difference(*y)
    distance = 2 * mean_distance(*x, *y) - mean_difference(*x) - reference_difference
    return distance.clamp_min(0)


# ------------------------------------------------------------ classes
class CRPS(ExampleMean):
    """Continuous ranked probability score, see `crps`.

    Args:
        samples: of more networks so many are taken, evenly spaced.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> CRPS()(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))
    tensor(0.2337, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def __init__(self, samples: int = _SAMPLES, **kwargs: Any) -> None:
        check_count("samples", samples)
        super().__init__(variant=f"_{samples}", **kwargs)
        self.samples = samples

    def update(self, means: Tensor, stds: Tensor, targets: Tensor) -> None:
        """Add a batch of what every network predicts, and the targets."""
        self.add(over_targets(crps_of_each(means, stds, targets, self.samples)))


def over_targets(values: Tensor) -> Tensor:
    """The mean over the targets of every example."""
    if values.ndim == 0:
        raise ValueError("`means` must be (samples, batch, targets) or (samples, batch).")
    return values.flatten(1).mean(1) if values.ndim > 1 else values


# ------------------------------------------------------------ draws
def wasserstein(values: Networks, reference: References) -> Number:
    r"""Wasserstein distance of order two, a mean over examples and targets, in the target's unit.

    .. math:: W_2 = \left(\int_0^1 (F^{-1}(u) - G^{-1}(u))^2 du\right)^{1/2}

    Two samples of one law are not zero apart: of a normal law with standard deviation one, n draws
    are about 0.31, 0.22 and 0.08 from n others for n = 50, 100 and 1000. What lies below the
    distance of two halves of the reference cannot be told from it.

    Args:
        values: what every network computes, ``(samples, batch, targets)``.
        reference: the same of the reference; the number of networks may differ.

    References:
        | Computational Optimal Transport, remark 2.30 (Peyre and Cuturi, 2019)
        | https://arxiv.org/abs/1803.00567

    >>> wasserstein(torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [2.0]]))
    tensor(2., dtype=torch.float64)
    """
    return wasserstein_of_each(values, reference).mean()


def wasserstein_of_each(values: Tensor, reference: Tensor) -> Tensor:
    """The distance for every target of every example, see `wasserstein`.

    Args:
        values: ``(samples, batch, targets)``.
        reference: ``(others, batch, targets)``.
    """
    x, y = (_sorted(t, name) for t, name in ((values, "values"), (reference, "reference")))
    if x.shape[1:] != y.shape[1:]:
        raise ValueError(
            "`values` and `reference` must be of the same examples, got shapes "
            f"{tuple(x.shape[1:])} and {tuple(y.shape[1:])} without the samples."
        )
    of_x, of_y, weights = _in_order(len(x), len(y))
    squares = (x[of_x] - y[of_y]).square()
    return torch.einsum("s,s...->...", weights.to(x.device), squares).sqrt()


def _sorted(values: Any, name: str) -> Tensor:
    """Every set of points in order, in float64."""
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.ndim < 2:
        what = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else values
        raise ValueError(f"`{name}` must be a float tensor (samples, batch, ...), got {what!s}.")
    if len(values) == 0:
        raise ValueError(f"`{name}` must have at least one sample, got none.")
    if not bool(values.isfinite().all()):
        raise ValueError(f"`{name}` must be finite, it holds NaN or infinite values.")
    return values.detach().double().sort(0).values


def _in_order(one: int, other: int) -> tuple[Tensor, Tensor, Tensor]:
    """Match points of two sets in order, with the mass that moves between them.

    The unit of mass is cut wherever one of both sets has a new point: at multiples of 1/one and of
    1/other, in whole numbers so that equal ones are equal.
    """
    cuts = torch.cat([torch.arange(one + 1) * other, torch.arange(other + 1) * one]).unique()
    return cuts[:-1] // other, cuts[:-1] // one, cuts.diff().double() / (one * other)
