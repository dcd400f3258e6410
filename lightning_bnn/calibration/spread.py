"""Scaling of predictive standard deviations, for mixtures of Gaussians of several networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.calibration.search import least_positive
from lightning_bnn.calibration.temperature import warn_of_bound
from lightning_bnn.metrics.gaussian_mixture import components, mixture_moments
from lightning_bnn.metrics.validation import check_choice, check_finite

__all__ = ["Spread", "fit_spread", "joint_log_prob"]

SpreadFit = Literal["mixture", "moments"]
_BOUNDS = (0.01, 100.0)


@dataclass(frozen=True)
class Spread:
    r"""Stretches the predictive mixture around its mean: its standard deviation is multiplied.

    .. math:: \mu'_s = \bar\mu + a (\mu_s - \bar\mu), \quad \sigma'_s = a\, \sigma_s

    Attributes:
        value: the factor; above one it makes predictions less sure.
        at_bound: whether the search ended at its bound, 0.01 or 100.

    >>> means, stds = Spread(2.0)(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1))
    >>> means.flatten().tolist(), stds.flatten().tolist()
    ([-1.0, 3.0], [2.0, 2.0])
    """

    value: float
    at_bound: bool = False

    def __call__(self, means: Tensor, stds: Tensor) -> tuple[Tensor, Tensor]:
        """Calibrated means and standard deviations of all networks, ``(samples, ...)``."""
        means, stds = components(means, stds)
        centre = means.mean(0)
        return torch.lerp(centre, means, self.value), self.value * stds


def fit_spread(means: Tensor, stds: Tensor, targets: Tensor, fit: SpreadFit = "mixture") -> Spread:
    r"""The factor of predictive standard deviations that fits held-out targets best.

    ``"moments"`` has a closed form, :math:`s^2 = \frac1n \sum_i (y_i - \bar\mu_i)^2 / \sigma_i^2`
    with the standard deviation of the whole mixture: the likelihood of one Gaussian of its moments
    is greatest there. ``"mixture"`` seeks the greatest likelihood of the mixture itself.

    References:
        | Evaluating and Calibrating Uncertainty Prediction in Regression Tasks (Levi et al., 2022)
        | https://arxiv.org/abs/1905.11659

    Args:
        means: of every network, ``(samples, batch, targets)`` or ``(samples, batch)``.
        stds: their standard deviations, in the same shape.
        targets: ``(batch, targets)`` or ``(batch,)``.
        fit: which likelihood is greatest.

    >>> ones = torch.ones(1, 4)
    >>> fit_spread(0 * ones, ones, torch.tensor([2.0, -2.0, 2.0, -2.0]), "moments").value
    2.0
    """
    check_choice("fit", fit, get_args(SpreadFit))
    means, stds = components(means, stds)
    targets = targets.double()
    check_finite(targets, "targets")
    if targets.shape != means.shape[1:] or not targets.numel():
        raise ValueError(
            f"`targets` must have shape {tuple(means.shape[1:])} and not be empty, got "
            f"{tuple(targets.shape)}."
        )
    if fit == "moments":
        centre, std = mixture_moments(means, stds)
        z = (targets - centre) / std
        value = float(z.square().mean().sqrt())
        kept = min(max(value, _BOUNDS[0]), _BOUNDS[1])
        spread = Spread(kept, kept != value)
    else:
        spread = Spread(*least_positive(lambda s: _loss(s, means, stds, targets), *_BOUNDS))
    if spread.at_bound:
        warn_of_bound("factor of standard deviations", spread.value, _BOUNDS, len(targets))
    return spread


def joint_log_prob(means: Tensor, stds: Tensor, targets: Tensor) -> Tensor:
    """Log-density of the mixture, one number per example, whose targets are joint.

    Args:
        means: ``(samples, batch, ...)``.
        stds: in the same shape.
        targets: ``(batch, ...)``.
    """
    logs = -((targets - means) / stds).square() / 2 - stds.log() - math.log(2 * math.pi) / 2
    return logs.reshape(*logs.shape[:2], -1).sum(-1).logsumexp(0) - math.log(len(means))


def _loss(value: float, means: Tensor, stds: Tensor, targets: Tensor) -> float:
    return -float(joint_log_prob(*Spread(value)(means, stds), targets).mean())
