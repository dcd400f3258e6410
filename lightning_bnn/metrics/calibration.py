r"""Calibration of confidences, and coverage of prediction sets.

Reliability diagrams have equally wide bins, or bins of equally many examples. Selective prediction
measures how often answers are wrong if the least confident are withheld. Examples of equal
confidence have no order, and every number is the mean over all of their orders.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.validation import (
    SUM_TOLERANCE,
    Labels,
    Number,
    Probs,
    check_binary,
    check_finite,
    check_labels,
    probabilities,
)
from lightning_bnn.plots.predictions import draw_reliability, reliability_figures
from weightsym.params import check_count, check_tensors

__all__ = [
    "ACE", "ECE", "ace", "aurc", "class_coverage", "ece", "reliability", "risk_coverage",
    "set_coverage", "set_size",
]  # fmt: skip

Sets = Bool[Tensor, "batch classes"]


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
    r"""Compute a reliability diagram with equally wide bins, for any confidence and correctness.

    .. math:: conf_b = \tfrac{1}{n_b} \textstyle\sum_{i \in b} p_i, \quad
        acc_b = \tfrac{1}{n_b} \sum_{i \in b} c_i

    Args:
        confidence: numbers between 0 and 1, such as the largest probability.
        correct: whether each prediction came true.
        n_bins: number of bins.

    >>> reliability(torch.tensor([0.95, 1.0]), torch.tensor([True, False]), 10).count
    tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 2])
    """
    check_count("n_bins", n_bins)
    _check_confidence(confidence, correct)
    return diagram(*sums_per_bin(confidence, correct, n_bins))


def adaptive_reliability(
    confidence: Float[Tensor, " batch"], correct: Shaped[Tensor, " batch"], n_bins: int = 15
) -> Reliability:
    """Compute a reliability diagram with bins of equally many examples. Ties stay together.

    >>> confidence = torch.full((10,), 0.8)
    >>> adaptive_reliability(confidence, torch.arange(10) < 5, 2).count
    tensor([10,  0])
    """
    check_count("n_bins", n_bins)
    _check_confidence(confidence, correct)
    confidence, order = confidence.double().sort()
    position = torch.arange(len(order), device=order.device)
    starts = torch.ones_like(position, dtype=torch.bool)
    starts[1:] = confidence[1:] != confidence[:-1]
    rank = torch.where(starts, position, 0).cummax(0).values  # examples of lower confidence
    index = (rank * n_bins).div(max(1, len(order)), rounding_mode="floor")
    correct = correct[order]
    return diagram(_count(index, correct, n_bins), _sum_by(index, confidence, n_bins))


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
    """Return confidences in float64, negative for wrong predictions, and never zero."""
    confidence, correct = _top_label(probs, labels, from_logits)
    return torch.where(correct, confidence, -confidence).detach().double()


def _check_confidence(confidence: Tensor, correct: Tensor) -> None:
    _check_pairs(confidence, correct)
    if not bool(((confidence >= 0) & (confidence <= 1 + SUM_TOLERANCE)).all()):
        raise ValueError("`confidence` must lie between 0 and 1.")


def _check_pairs(confidence: Tensor, correct: Tensor) -> None:
    """Require one confidence and one truth per example."""
    check_tensors(confidence=confidence, correct=correct)
    if confidence.ndim != 1 or confidence.shape != correct.shape:
        raise ValueError(
            "`confidence` and `correct` must have the same shape (examples,), got "
            f"{tuple(confidence.shape)} and {tuple(correct.shape)}."
        )
    check_binary(correct, "`correct` must be boolean, or 0 and 1.")


def sums_per_bin(confidence: Tensor, correct: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Return wrong and correct examples ``(bins, 2)`` and the sum of confidences per bin."""
    confidence = confidence.double()
    index = (confidence * n_bins).long().clamp_max_(n_bins - 1)
    return _count(index, correct, n_bins), _sum_by(index, confidence, n_bins)


def _sum_by(index: Tensor, values: Tensor, n_bins: int) -> Tensor:
    """Return sums per bin, deterministic on a GPU if requested."""
    return values.new_zeros(n_bins).index_add(0, index, values)


def _count(index: Tensor, correct: Tensor, n_bins: int) -> Tensor:
    places = torch.add(correct.bool(), index, alpha=2)
    if places.device.type == "cpu":
        return torch.bincount(places, minlength=2 * n_bins).view(n_bins, 2)
    return _sum_by(places, torch.ones_like(places), 2 * n_bins).view(n_bins, 2)  # does not wait


def diagram(counts: Tensor, confidence_sum: Tensor) -> Reliability:
    """Return the diagram of sums of `sums_per_bin`."""
    total = counts.sum(-1)
    return Reliability(total, confidence_sum / total, counts[:, 1].double() / total)


# ------------------------------------------------------------ classes
class _Calibration(ExactMetric):
    """The error of a reliability diagram, with the diagram as the plot."""

    higher_is_better = False
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(n_bins, from_logits, **kwargs)
        check_count("n_bins", n_bins)
        self.n_bins, self.from_logits = n_bins, from_logits
        self._diagram = Reliability(*(torch.zeros(n_bins),) * 3)

    @abstractmethod
    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""

    def compute(self) -> Tensor:
        """The error, or NaN without examples."""
        self._diagram = self.reliability()
        if not self._diagram.count.any():
            return self._nan("it has seen no examples")
        return self._diagram.expected_error

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the reliability diagram of the data so far, or a curve of given values."""
        if val is not None:
            return self._plot(val, ax)
        self.compute()  # of all processes
        ax = reliability_figures({"": self._diagram}).axes[0] if ax is None else ax
        draw_reliability(ax, *self._diagram)
        return ax.figure, ax


class ECE(_Calibration):
    """Expected calibration error, see `ece`, in constant memory.

    Args:
        n_bins: number of equally wide bins; the last one is closed.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> metric = ECE(n_bins=10)
    >>> metric.update(torch.tensor([[0.05, 0.95], [1.0, 0.0]]), torch.tensor([1, 1]))
    >>> metric.compute()
    tensor(0.4750, dtype=torch.float64)
    """

    count: Tensor
    confidence: Tensor

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(n_bins, from_logits, **kwargs)
        self.add_sum("count", (n_bins, 2), torch.int64)
        self.add_sum("confidence", (n_bins,), torch.float64)

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        top, correct = _top_label(probs, labels, self.from_logits)
        counts, sums = sums_per_bin(top.detach(), correct, self.n_bins)
        self.count = self.count + counts
        self.confidence = self.confidence + sums

    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""
        return diagram(self.count, self.confidence)


class ACE(_Calibration):
    """Adaptive calibration error, see `ace`, which stores one number per example.

    Args:
        n_bins: number of bins of equally many examples.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> ACE(n_bins=2)(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0]))
    tensor(0.1250, dtype=torch.float64)
    """

    confidences: list[Tensor]

    def __init__(self, n_bins: int = 15, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(n_bins, from_logits, **kwargs)
        self.add_list("confidences")

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        self.confidences.append(signed_confidences(probs, labels, self.from_logits))

    def reliability(self) -> Reliability:
        """The reliability diagram of this process's data so far."""
        signed = collected(self.confidences)
        return adaptive_reliability(signed.abs(), signed > 0, self.n_bins)


# ------------------------------------------------------------ selective prediction
class RiskCoverage(NamedTuple):
    """A risk-coverage curve, one entry for every number of examples that are answered.

    ``coverage`` is k / n for k = 1, ..., n, and ``risk`` the share of errors among the k examples
    of highest confidence.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> Tensor:
        """AURC, the mean of the risks, or NaN without examples."""
        return self.risk.mean()


def risk_coverage(
    confidence: Float[Tensor, " batch"], correct: Shaped[Tensor, " batch"]
) -> RiskCoverage:
    r"""Compute the risk-coverage curve of any confidence.

    .. math:: r_k = \frac1k \sum_{i \leq k} [\hat y_{(i)} \neq y_{(i)}], \quad
        \text{coverage } k / n, \text{ examples by falling confidence}

    Args:
        confidence: any finite numbers, by which examples are answered in falling order.
        correct: whether each answer would be right.

    >>> risk_coverage(torch.tensor([0.9, 0.5]), torch.tensor([True, False])).risk
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    _check_pairs(confidence, correct)
    check_finite(confidence, "confidence")
    values, order = confidence.sort(descending=True)
    wrong = 1 - correct[order].double()
    n = len(wrong)
    _, tie, sizes = torch.unique_consecutive(values, return_inverse=True, return_counts=True)
    errors = wrong.new_zeros(len(sizes)).index_add(0, tie, wrong)
    answered = torch.arange(1, n + 1, dtype=torch.float64, device=wrong.device)
    before, errors_before = sizes.cumsum(0) - sizes, errors.cumsum(0) - errors
    expected = errors_before[tie] + (answered - before[tie]) * (errors / sizes)[tie]
    return RiskCoverage(answered / max(1, n), expected / answered)


def aurc(probs: Probs, labels: Labels, from_logits: bool = False) -> Number:
    r"""Area under the risk-coverage curve of the predicted class and its probability.

    .. math:: \frac1n \sum_{k=1}^n \frac1k \sum_{i \le k} [\hat y_{(i)} \ne y_{(i)}]

    with examples ordered by falling confidence. Zero is perfect. An uninformative confidence gives
    the error rate.

    References:
        | Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers (Geifman et al., 2019)
        | https://arxiv.org/abs/1805.08206

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.2500, dtype=torch.float64)
    """
    signed = signed_confidences(probs, labels, from_logits)
    return risk_coverage(signed.abs(), signed > 0).area


# ------------------------------------------------------------ prediction sets
def set_coverage(sets: Sets, labels: Labels) -> Number:
    r"""Share of the examples whose set contains their class.

    .. math:: \frac1n \sum_i [y_i \in S_i]

    Args:
        sets: mask of the classes in the set of each example, boolean ``(batch, classes)``.
        labels: ``(batch,)`` class indices.

    >>> set_coverage(torch.tensor([[True, True], [True, False]]), torch.tensor([1, 1]))
    tensor(0.5000, dtype=torch.float64)
    """
    return _covered(sets, labels).mean()


def set_size(sets: Sets) -> Number:
    r"""Mean number of classes in a set.

    .. math:: \frac1n \sum_i |S_i|

    Args:
        sets: mask of the classes in the set of each example, boolean ``(batch, classes)``.

    >>> set_size(torch.tensor([[True, True], [True, False]]))
    tensor(1.5000, dtype=torch.float64)
    """
    check_sets(sets)
    return sets.sum(-1).double().mean()


def class_coverage(sets: Sets, labels: Labels) -> Float64[Tensor, " classes"]:
    r"""Share of covered examples of every class, or NaN for classes that do not occur.

    .. math:: \frac{1}{n_c} \sum_{i: y_i = c} [y_i \in S_i]

    Args:
        sets: mask of the classes in the set of each example, boolean ``(batch, classes)``.
        labels: ``(batch,)`` class indices.

    >>> class_coverage(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1]))
    tensor([1., 0.], dtype=torch.float64)
    """
    covered, labels = _covered(sets, labels).bool(), labels.long()
    hits, total = (torch.bincount(t, minlength=sets.shape[-1]) for t in (labels[covered], labels))
    return hits.double() / total


def check_sets(sets: Any) -> None:
    """Require one truth value for every example and class."""
    if not isinstance(sets, Tensor) or sets.dtype != torch.bool or sets.ndim != 2:
        description = (
            f"{sets.dtype} {tuple(sets.shape)}" if isinstance(sets, Tensor) else repr(sets)
        )
        raise ValueError(f"`sets` must be boolean of shape (batch, classes), got {description}.")


def _covered(sets: Tensor, labels: Tensor) -> Tensor:
    check_sets(sets)
    check_labels(labels, sets)
    return sets.gather(-1, labels.long()[:, None])[:, 0].double()
