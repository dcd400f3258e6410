r"""Reliability diagrams: how often what was predicted with some confidence came true.

Bins are ``[lo, hi)`` and the last one is closed. Adaptive bins hold equally many examples, and
equal confidences are never torn apart, so that the order of the examples cannot matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lightning_bnn.metrics.validation import SUM_TOLERANCE, check_binary

__all__ = ["Reliability", "adaptive_reliability", "reliability"]


class Reliability(NamedTuple):
    """The data of a reliability diagram, one entry per bin. Empty bins hold NaN.

    >>> from lightning_bnn.metrics import reliability
    >>> confidence, correct = torch.tensor([0.6, 0.6, 0.9]), torch.tensor([True, False, True])
    >>> diagram = reliability(confidence, correct, n_bins=2)  # the first of the bins is empty
    >>> diagram.count.tolist(), round(diagram.accuracy[1].item(), 3)
    ([0, 3], 0.667)
    """

    count: Tensor  # type: ignore[assignment]  # hides a method of tuples
    confidence: Tensor
    accuracy: Tensor

    @property
    def expected_error(self) -> Tensor:
        r"""ECE, :math:`\sum_b \frac{n_b}{n} |acc_b - conf_b|`, or NaN without examples."""
        return (self.count * self.gaps).sum() / self.count.sum()

    @property
    def largest_error(self) -> Tensor:
        """MCE, the largest gap of a bin that is not empty, or NaN without examples."""
        return self.gaps.max() if bool(self.count.any()) else self.expected_error

    @property
    def gaps(self) -> Tensor:
        """Distance between confidence and accuracy, zero for empty bins."""
        return (self.accuracy - self.confidence).abs().nan_to_num(0.0)


def reliability(
    confidence: Float[Tensor, " batch"], correct: Shaped[Tensor, " batch"], n_bins: int = 15
) -> Reliability:
    r"""A reliability diagram with equally wide bins, for any meaning of confidence and correct.

    .. math:: conf_b = \tfrac{1}{n_b} \textstyle\sum_{i \in b} p_i, \quad
        acc_b = \tfrac{1}{n_b} \sum_{i \in b} c_i

    Args:
        confidence: numbers between 0 and 1, such as the largest probability.
        correct: whether what was predicted with that confidence came true.
        n_bins: number of bins.

    >>> reliability(torch.tensor([0.95, 1.0]), torch.tensor([True, False]), 10).count
    tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 2])
    """
    check_bins(n_bins)
    _check_confidence(confidence, correct)
    return diagram(*sums_per_bin(confidence, correct, n_bins))


def adaptive_reliability(
    confidence: Float[Tensor, " batch"], correct: Shaped[Tensor, " batch"], n_bins: int = 15
) -> Reliability:
    """A reliability diagram with bins of equally many examples. Ties stay together.

    >>> confidence = torch.full((10,), 0.8)
    >>> adaptive_reliability(confidence, torch.arange(10) < 5, 2).count
    tensor([10,  0])
    """
    check_bins(n_bins)
    _check_confidence(confidence, correct)
    confidence, order = confidence.double().sort()
    position = torch.arange(len(order), device=order.device)
    starts = torch.ones_like(position, dtype=torch.bool)
    starts[1:] = confidence[1:] != confidence[:-1]
    rank = torch.where(starts, position, 0).cummax(0).values  # examples of lower confidence
    index = (rank * n_bins).div(max(1, len(order)), rounding_mode="floor")
    correct = correct[order]
    return diagram(_count(index, correct, n_bins), _sum_by(index, confidence, n_bins))


def check_bins(n_bins: int) -> None:
    """Refuse less than one bin."""
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
    check_binary(correct, "`correct` must be boolean, or 0 and 1.")


def sums_per_bin(confidence: Tensor, correct: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Wrong and correct examples ``(bins, 2)`` and the sum of confidences per bin."""
    confidence = confidence.double()
    index = (confidence * n_bins).long().clamp(0, n_bins - 1)
    return _count(index, correct, n_bins), _sum_by(index, confidence, n_bins)


def _sum_by(index: Tensor, values: Tensor, n_bins: int) -> Tensor:
    """Sums per bin, deterministic on a GPU if asked to be."""
    return values.new_zeros(n_bins).index_add(0, index, values)


def _count(index: Tensor, correct: Tensor, n_bins: int) -> Tensor:
    return torch.bincount(2 * index + correct.bool(), minlength=2 * n_bins).reshape(n_bins, 2)


def diagram(counts: Tensor, confidence_sum: Tensor) -> Reliability:
    """The diagram that some sums of `sums_per_bin` make."""
    total = counts.sum(-1)
    return Reliability(total, confidence_sum / total, counts[:, 1].double() / total)
