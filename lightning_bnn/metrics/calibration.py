"""Calibration: does a confidence of 80 % mean 80 % correct?"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.reliability import (
    Reliability,
    adaptive_reliability,
    check_bins,
    diagram,
    reliability,
    sums_per_bin,
)
from lightning_bnn.metrics.shapes import Labels, Number, Probs
from lightning_bnn.metrics.validation import check_labels, probabilities
from lightning_bnn.plots.predictions import reliability_figure

__all__ = ["ACE", "ECE", "ace", "ece"]


# ------------------------------------------------------------ functions
def ece(probs: Probs, labels: Labels, n_bins: int = 15, from_logits: bool = False) -> Number:
    r"""Expected calibration error of the predicted class.

    .. math:: \sum_b \frac{n_b}{n} \left| acc_b - conf_b \right|

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        n_bins: number of equally wide bins.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> probs = torch.tensor([[0.05, 0.95], [1.0, 0.0]])
    >>> ece(probs, torch.tensor([1, 1]), n_bins=10)
    tensor(0.4750, dtype=torch.float64)
    """
    return reliability(*_top_label(probs, labels, from_logits), n_bins).expected_error


def ace(probs: Probs, labels: Labels, n_bins: int = 15, from_logits: bool = False) -> Number:
    r"""Adaptive calibration error: as `ece`, with bins of equally many examples.

    .. math:: \sum_b \frac{n_b}{n} \left| acc_b - conf_b \right|, \quad n_b \approx n / B

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        n_bins: number of bins; examples of equal confidence share one.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> ace(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0]), n_bins=2)
    tensor(0.1250, dtype=torch.float64)
    """
    return adaptive_reliability(*_top_label(probs, labels, from_logits), n_bins).expected_error


def _top_label(probs: Tensor, labels: Tensor, from_logits: bool) -> tuple[Tensor, Tensor]:
    probs = probabilities(probs, from_logits)
    check_labels(labels, probs)
    confidence, predicted = probs.max(-1)
    return confidence, predicted == labels


def signed_confidences(probs: Tensor, labels: Tensor, from_logits: bool) -> Tensor:
    """Confidences in float64, negative where the prediction is wrong. They are never zero."""
    confidence, correct = _top_label(probs, labels, from_logits)
    return torch.where(correct, confidence, -confidence).detach().double()


# ------------------------------------------------------------ classes
class _Calibration(ExactMetric):
    """The error of a reliability diagram, with the diagram as the plot."""

    higher_is_better = False
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_bins(n_bins)
        self.n_bins, self.from_logits = n_bins, from_logits
        self._diagram = Reliability(*(torch.zeros(n_bins),) * 3)

    @abstractmethod
    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""

    def compute(self) -> Tensor:
        """The error, or NaN without examples."""
        self._diagram = self.reliability()
        if not self._diagram.count.any():
            return self._nan("it has seen no example")
        return self._diagram.expected_error

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """The reliability diagram of the data so far, or a curve of given values."""
        if val is not None:
            return self._plot(val, ax)
        self.compute()  # of all processes
        return reliability_figure(*self._diagram, ax=ax)


class ECE(_Calibration):
    """Expected calibration error, see `ece`, in constant memory.

    Args:
        n_bins: number of equally wide bins; the last one is closed.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> metric = ECE(n_bins=10)
    >>> metric.update(torch.tensor([[0.05, 0.95], [1.0, 0.0]]), torch.tensor([1, 1]))
    >>> metric.compute()
    tensor(0.4750, dtype=torch.float64)
    """

    calibration_count: Tensor
    calibration_confidence: Tensor

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(n_bins, from_logits, **kwargs)
        self.add_sum("calibration_count", (n_bins, 2), torch.int64)
        self.add_sum("calibration_confidence", (n_bins,), torch.float64)

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        confidence, correct = _top_label(probs, labels, self.from_logits)
        counts, sums = sums_per_bin(confidence.detach(), correct, self.n_bins)
        self.calibration_count = self.calibration_count + counts
        self.calibration_confidence = self.calibration_confidence + sums

    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""
        return diagram(self.calibration_count, self.calibration_confidence)


class ACE(_Calibration):
    """Adaptive calibration error, see `ace`, which keeps one number per example.

    Args:
        n_bins: number of bins of equally many examples.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> ACE(n_bins=2)(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0]))
    tensor(0.1250, dtype=torch.float64)
    """

    adaptive_confidence: list[Tensor]

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(n_bins, from_logits, **kwargs)
        self.add_list("adaptive_confidence")

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        self.adaptive_confidence.append(signed_confidences(probs, labels, self.from_logits))

    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""
        signed = collected(self.adaptive_confidence)
        return adaptive_reliability(signed.abs(), signed > 0, self.n_bins)
