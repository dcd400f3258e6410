"""Temperature scaling: one number that makes predictions as sure as they are right."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor

from lightning_bnn.calibration.logits import checked_logits, checked_pair, log_mean_probs
from lightning_bnn.calibration.search import least_positive

__all__ = ["BOUNDS", "Temperature", "fit_temperature"]

BOUNDS = (0.05, 20.0)
"""Between which temperatures are sought."""


@dataclass(frozen=True)
class Temperature:
    r"""Divides the logits of every network and averages, :math:`\frac1S \sum_s softmax(z_s / T)`.

    Attributes:
        value: the temperature :math:`T`; above one it makes predictions less sure.
        at_bound: whether the search ended at one of `BOUNDS`.

    >>> import math
    >>> import torch
    >>> Temperature(2.0)(torch.tensor([[2 * math.log(3), 0.0]])).round(decimals=4)
    tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """

    value: float
    at_bound: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated probabilities ``(batch, classes)`` of ``(samples, batch, classes)``."""
        return log_mean_probs(checked_logits(logits) / self.value).exp()


def fit_temperature(logits: Tensor, labels: Tensor) -> Temperature:
    r"""The temperature of least negative log-likelihood of the averaged prediction.

    .. math:: T = \arg\min_T -\sum_i \log \frac1S \sum_s softmax(z_{si} / T)_{y_i}

    For the temperature of the mean prediction (calibrated after averaging) pass
    ``pooled(logits)``, here and whenever the result is called.

    References:
        | On Calibration of Modern Neural Networks (Guo et al., 2017)
        | https://arxiv.org/abs/1706.04599
        | Uncertainty Quantification and Deep Ensembles (Rahaman and Thiery, 2021)
        | https://arxiv.org/abs/2007.08792

    Args:
        logits: of held-out examples, ``(samples, batch, classes)``, or those of one network.
        labels: their classes ``(batch,)``.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])).value, 4)  # 2 / log(3)
    1.8205
    """
    logits, labels = checked_pair(logits, labels)

    def loss(temperature: float) -> float:
        return -float(log_mean_probs(logits / temperature).gather(-1, labels[:, None]).mean())

    if bool((logits == logits[..., :1]).all()):
        return Temperature(1.0)  # every temperature does the same
    value, at_bound = least_positive(loss, *BOUNDS)
    if at_bound:
        warn_of_bound("temperature", value, BOUNDS, len(labels))
    return Temperature(value, at_bound)


def warn_of_bound(name: str, value: float, bounds: tuple[float, float], examples: int) -> None:
    """Say that a search has ended where it may not go on.

    Args:
        name: of the number.
        value: the bound.
        bounds: both.
        examples: how many it was fitted to.
    """
    low, high = bounds
    right = "right" if value == low else "wrong"
    warnings.warn(
        f"The {name} is at its bound, {value:g} of [{low:g}, {high:g}]: the {examples} calibration "
        f"examples are predicted so {right} that the best one lies beyond; take more of them.",
        UserWarning,
        stacklevel=3,
    )
