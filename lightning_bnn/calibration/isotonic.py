"""Isotonic calibration: any rising function of every class's probability, one class at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_bnn.calibration.logits import checked_pair, pooled
from lightning_bnn.extras import needed

__all__ = ["Isotonic", "fit_isotonic"]


@dataclass(frozen=True)
class Isotonic:
    r"""Rising functions of mean probabilities, one for each class, whose values are renormalised.

    .. math:: f_c(\bar p_c) \,/\, \textstyle\sum_k f_k(\bar p_k)

    Attributes:
        knots: probabilities between which the functions are linear, ``(classes, knots)``; rows are
            filled up with their last entry.
        values: of the functions there.

    >>> knots = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> calibrator = Isotonic(knots, torch.tensor([[0.2, 0.8], [0.2, 0.8]]))
    >>> calibrator(torch.tensor([[50.0, 0.0]])).round(decimals=4)
    tensor([[0.8000, 0.2000]], dtype=torch.float64)
    """

    knots: Tensor
    values: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated probabilities ``(batch, classes)`` of ``(samples, batch, classes)``."""
        probs = pooled(logits)[0].exp()
        if probs.shape[-1] != len(self.knots):
            raise ValueError(
                f"`logits` must be of {len(self.knots)} classes, got {probs.shape[-1]}."
            )
        risen = interpolated(probs.T.contiguous(), self.knots.to(probs), self.values.to(probs)).T
        return risen / risen.sum(-1, keepdim=True)


def fit_isotonic(logits: Tensor, labels: Tensor) -> Isotonic:
    r"""Rising functions that fit best how often each class is the right one.

    .. math:: \min_{f_c \text{ rising}} \textstyle\sum_i (f_c(p_{ic}) - t_{ic})^2, \quad
        t_{ic} = \frac{n [y_i = c] + p_{ic}}{n + 1}

    One example's worth of the prediction itself is mixed in: the targets are
    :math:`(n [y_i = c] + p_{ic}) / (n + 1)`. So no class gets a probability of zero, however few
    examples there are; plain isotonic regression gives many, and an infinite NLL with the first
    surprise.

    References:
        | Transforming Classifier Scores into Accurate Multiclass Probability Estimates
        | (Zadrozny and Elkan, 2002) https://doi.org/10.1145/775047.775151

    Args:
        logits: of held-out examples, ``(samples, batch, classes)``, or those of one network.
        labels: their classes ``(batch,)``.

    >>> logits = torch.tensor([[4.0, 0.0]]).repeat(300, 1)  # 98 % sure, and 2 of 3 are right
    >>> calibrator = fit_isotonic(logits, (torch.arange(300) % 3) // 2)
    >>> calibrator(logits)[0].round(decimals=2)
    tensor([0.6700, 0.3300], dtype=torch.float64)
    """
    logits, labels = checked_pair(logits, labels)
    probs = pooled(logits)[0].exp().clamp_min(torch.finfo(torch.float64).tiny)
    n, classes = probs.shape
    targets = (n * one_hot(labels, classes) + probs) / (n + 1)
    lines = [_rising(x, y) for x, y in zip(probs.T, targets.T, strict=True)]
    most = max(len(x) for x, _ in lines)
    knots, values = (torch.stack([_filled(t[k], most) for t in lines]) for k in (0, 1))
    return Isotonic(knots, values)


def interpolated(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Piecewise linear functions, constant beyond their first and last knots, row by row.

    Args:
        x: where they are evaluated, ``(rows, points)``.
        knots: rising, ``(rows, knots)``.
        values: of the functions there.

    >>> two = torch.tensor([[0.0, 1.0]])
    >>> interpolated(torch.tensor([[-1.0, 0.25, 2.0]]), two, 4 * two)
    tensor([[0., 1., 4.]])
    """
    last = knots.shape[-1] - 1
    right = torch.searchsorted(knots, x).clamp(max=last)
    left = (right - 1).clamp_min(0)
    low, high = knots.gather(-1, left), knots.gather(-1, right)
    share = ((x - low) / (high - low).where(high > low, 1)).clamp(0, 1)
    return torch.lerp(values.gather(-1, left), values.gather(-1, right), share)


def _rising(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Knots and values of the isotonic regression of one class."""
    with needed("Isotonic regression"):
        from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(out_of_bounds="clip").fit(x.cpu().numpy(), y.cpu().numpy())
    knots, values = fitted.X_thresholds_, fitted.y_thresholds_
    return torch.as_tensor(knots.copy()), torch.as_tensor(values.copy())


def _filled(values: Tensor, count: int) -> Tensor:
    return torch.cat([values, values[-1:].expand(count - len(values))])
