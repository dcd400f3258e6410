r"""Calibration: does a confidence of 80 % mean 80 % correct?

Bins are ``[lo, hi)`` and the last one is closed. Adaptive bins hold equally many examples, and
equal confidences are never torn apart, so that the order of the examples cannot matter.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.validation import SUM_TOLERANCE, check_labels, probabilities
from lightning_bnn.plots import reliability_figure

__all__ = [
    "ACE",
    "ECE",
    "MCE",
    "Reliability",
    "ace",
    "adaptive_reliability",
    "ece",
    "mce",
    "reliability",
]


class Reliability(NamedTuple):
    """The data of a reliability diagram, one entry per bin; empty bins hold NaN."""

    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def expected_error(self) -> Tensor:
        r"""ECE, :math:`\sum_b \frac{n_b}{n} |acc_b - conf_b|`; NaN without examples."""
        return (self.count * self.gaps).sum() / self.count.sum()

    @property
    def largest_error(self) -> Tensor:
        """MCE, the largest gap of a bin that is not empty; NaN without examples."""
        return self.gaps.max() if bool(self.count.any()) else self.expected_error

    @property
    def gaps(self) -> Tensor:
        """Distance between confidence and accuracy, zero for empty bins."""
        return (self.accuracy - self.confidence).abs().nan_to_num(0.0)


# ------------------------------------------------------------ functions
def ece(
    probs: Float[Tensor, "batch classes"],
    labels: Integer[Tensor, " batch"],
    n_bins: int = 15,
    from_logits: bool = False,
) -> Float[Tensor, ""]:
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


def mce(
    probs: Float[Tensor, "batch classes"],
    labels: Integer[Tensor, " batch"],
    n_bins: int = 15,
    from_logits: bool = False,
) -> Float[Tensor, ""]:
    """Maximum calibration error: the largest gap of any bin that is not empty.

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        n_bins: number of equally wide bins.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> mce(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0]))
    tensor(0.2500, dtype=torch.float64)
    """
    return reliability(*_top_label(probs, labels, from_logits), n_bins).largest_error


def ace(
    probs: Float[Tensor, "batch classes"],
    labels: Integer[Tensor, " batch"],
    n_bins: int = 15,
    from_logits: bool = False,
) -> Float[Tensor, ""]:
    """Adaptive calibration error: as `ece`, with bins of equally many examples.

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        n_bins: number of bins; examples of equal confidence share one.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> ace(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0]), n_bins=2)
    tensor(0.1250, dtype=torch.float64)
    """
    return adaptive_reliability(*_top_label(probs, labels, from_logits), n_bins).expected_error


def reliability(
    confidence: Float[Tensor, " batch"], correct: Shaped[Tensor, " batch"], n_bins: int = 15
) -> Reliability:
    """A reliability diagram with equally wide bins, for any meaning of confidence and correct.

    Args:
        confidence: numbers between 0 and 1, such as the largest probability.
        correct: whether what was predicted with that confidence came true.
        n_bins: number of bins.

    >>> reliability(torch.tensor([0.95, 1.0]), torch.tensor([True, False]), 10).count
    tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 2])
    """
    _check_bins(n_bins)
    _check_confidence(confidence, correct)
    return _averages(*_binned(confidence, correct, n_bins))


def adaptive_reliability(
    confidence: Float[Tensor, " batch"], correct: Shaped[Tensor, " batch"], n_bins: int = 15
) -> Reliability:
    """A reliability diagram with bins of equally many examples; ties stay together.

    >>> confidence = torch.full((10,), 0.8)
    >>> adaptive_reliability(confidence, torch.arange(10) < 5, 2).count
    tensor([10,  0])
    """
    _check_bins(n_bins)
    _check_confidence(confidence, correct)
    values, which, counts = confidence.double().unique(return_inverse=True, return_counts=True)
    rank = counts.cumsum(0) - counts  # examples of lower confidence
    index = (rank[which] * n_bins).div(max(1, confidence.numel()), rounding_mode="floor")
    return _averages(*_sums(values[which], correct, index, n_bins))


def _top_label(probs: Tensor, labels: Tensor, from_logits: bool) -> tuple[Tensor, Tensor]:
    probs = probabilities(probs, from_logits)
    check_labels(labels, probs)
    confidence, predicted = probs.max(-1)
    return confidence, predicted == labels


def _check_bins(n_bins: int) -> None:
    if n_bins < 1:
        raise ValueError(f"`n_bins` must be at least 1, got {n_bins}.")


def _check_confidence(confidence: Tensor, correct: Tensor) -> None:
    if confidence.ndim != 1 or confidence.shape != correct.shape:
        raise ValueError(
            "`confidence` and `correct` must have the same shape (examples,), got "
            f"{tuple(confidence.shape)} and {tuple(correct.shape)}."
        )
    if not bool(((confidence >= 0) & (confidence <= 1 + SUM_TOLERANCE)).all()):
        raise ValueError("`confidence` must lie between 0 and 1.")


def _binned(confidence: Tensor, correct: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    confidence = confidence.double()
    return _sums(confidence, correct, (confidence * n_bins).long().clamp(0, n_bins - 1), n_bins)


def _sums(
    confidence: Tensor, correct: Tensor, index: Tensor, n_bins: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Examples, summed confidence and correct examples of every bin, deterministic on a GPU."""
    columns = torch.stack([torch.ones_like(confidence), confidence, correct.double()], 1)
    sums = columns.new_zeros(n_bins, 3).index_add_(0, index, columns)
    return sums[:, 0].long(), sums[:, 1], sums[:, 2].long()


def _averages(count: Tensor, confidence_sum: Tensor, correct: Tensor) -> Reliability:
    return Reliability(count, confidence_sum / count, correct.double() / count)


# ------------------------------------------------------------ classes
class _Calibration(ExactMetric):
    """What a reliability diagram says, and the diagram itself as the plot."""

    higher_is_better = False
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _check_bins(n_bins)
        self.n_bins, self.from_logits = n_bins, from_logits

    @abstractmethod
    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""

    @staticmethod
    @abstractmethod
    def error(data: Reliability) -> Tensor:
        """One number out of the diagram."""

    def compute(self) -> Tensor:
        """The error; NaN without examples."""
        data = self.reliability()
        return self.error(data) if data.count.any() else self._nan("it has seen no example")

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """The reliability diagram of the data so far, or a curve of given values."""
        return (
            reliability_figure(*self.reliability(), ax=ax) if val is None else self._plot(val, ax)
        )


class _FixedBins(_Calibration):
    """Counts per bin: constant memory, however long the test set."""

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(n_bins, from_logits, **kwargs)
        self.add_sum("calibration_count", (n_bins,), torch.int64)
        self.add_sum("calibration_confidence", (n_bins,), torch.float64)
        self.add_sum("calibration_correct", (n_bins,), torch.int64)

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        confidence, correct = _top_label(probs, labels, self.from_logits)
        count, total, right = _binned(confidence, correct, self.n_bins)
        self.calibration_count = self.calibration_count + count
        self.calibration_confidence = self.calibration_confidence + total
        self.calibration_correct = self.calibration_correct + right

    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""
        return _averages(
            self.calibration_count, self.calibration_confidence, self.calibration_correct
        )


class ECE(_FixedBins):
    """Expected calibration error, see `ece`.

    Args:
        n_bins: number of equally wide bins; the last one is closed.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> metric = ECE(n_bins=10)
    >>> metric.update(torch.tensor([[0.05, 0.95], [1.0, 0.0]]), torch.tensor([1, 1]))
    >>> metric.compute()
    tensor(0.4750, dtype=torch.float64)
    """

    @staticmethod
    def error(data: Reliability) -> Tensor:
        """The mean gap."""
        return data.expected_error


class MCE(_FixedBins):
    """Maximum calibration error, see `mce`.

    Args:
        n_bins: number of equally wide bins; the last one is closed.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> MCE()(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0]))
    tensor(0.2500, dtype=torch.float64)
    """

    @staticmethod
    def error(data: Reliability) -> Tensor:
        """The largest gap."""
        return data.largest_error


class ACE(_Calibration):
    """Adaptive calibration error, see `ace`; keeps two numbers per example.

    Args:
        n_bins: number of bins of equally many examples.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> ACE(n_bins=2)(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0]))
    tensor(0.1250, dtype=torch.float64)
    """

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(n_bins, from_logits, **kwargs)
        self.add_list("adaptive_confidence")
        self.add_list("adaptive_correct")

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        confidence, correct = _top_label(probs, labels, self.from_logits)
        self.adaptive_confidence.append(confidence.double())
        self.adaptive_correct.append(correct.double())

    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""
        return adaptive_reliability(
            collected(self.adaptive_confidence), collected(self.adaptive_correct), self.n_bins
        )

    @staticmethod
    def error(data: Reliability) -> Tensor:
        """The mean gap."""
        return data.expected_error
