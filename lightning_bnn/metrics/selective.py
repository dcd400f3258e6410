"""Selective prediction: how often what is kept is wrong, if the least confident is not answered.

Examples of equal confidence have no order: every number is the mean over all of their orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from lightning_bnn.arguments import is_number
from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.calibration import signed_confidences
from lightning_bnn.metrics.shapes import Labels, Number, Probs
from lightning_bnn.metrics.validation import check_binary, check_finite

__all__ = [
    "AURC",
    "EAURC",
    "RiskCoverage",
    "SelectiveAccuracy",
    "aurc",
    "eaurc",
    "risk_coverage",
    "selective_accuracy",
]

COVERAGES = (0.5, 0.8, 0.9, 0.95, 1.0)


class RiskCoverage(NamedTuple):
    """A risk-coverage curve, one entry for every number of examples that are answered.

    ``coverage`` is k / n for k = 1, ..., n, and ``risk`` the share of errors among the k examples
    of highest confidence.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> Tensor:
        """AURC, the mean of the risks; NaN without examples."""
        return self.risk.mean()

    @property
    def excess(self) -> Tensor:
        """The area without that of a perfect order, in which all errors come last."""
        if not len(self.risk):
            return self.area
        n = len(self.risk)
        answered = torch.arange(1, n + 1, dtype=torch.float64, device=self.risk.device)
        wrong = (self.risk[-1] * n).round()
        return self.area - ((answered - (n - wrong)).clamp_min(0) / answered).mean()

    def accuracy_at(self, coverage: float) -> Tensor:
        """Accuracy of the most confident examples, at least that share of all; NaN without any."""
        if not len(self.risk):
            return self.area
        answered = math.ceil(coverage * len(self.risk) - 1e-9)
        return 1 - self.risk[max(1, answered) - 1]


# ------------------------------------------------------------ functions
def risk_coverage(
    confidence: Float[Tensor, " batch"], correct: Shaped[Tensor, " batch"]
) -> RiskCoverage:
    r"""The risk-coverage curve of any confidence, and whether each answer is right.

    .. math:: r_k = \frac1k \sum_{i \leq k} [\hat y_{(i)} \neq y_{(i)}], \quad
        \text{coverage } k / n, \text{ examples by falling confidence}

    Args:
        confidence: what decides which examples are answered, any finite numbers.
        correct: whether the answer would be right.

    >>> risk_coverage(torch.tensor([0.9, 0.5]), torch.tensor([True, False])).risk
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    if confidence.ndim != 1 or confidence.shape != correct.shape:
        raise ValueError(
            "`confidence` and `correct` must have the same shape (examples,), got "
            f"{tuple(confidence.shape)} and {tuple(correct.shape)}."
        )
    check_finite(confidence, "confidence")
    check_binary(correct, "`correct` must be boolean, or 0 and 1.")
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

    with examples ordered by falling confidence. Zero is perfect; of a confidence that says nothing
    it is the error rate.

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
    return _curve(signed_confidences(probs, labels, from_logits)).area


def eaurc(probs: Probs, labels: Labels, from_logits: bool = False) -> Number:
    r"""Excess of `aurc` over that of a perfect confidence, which answers all errors last.

    .. math:: aurc - \frac1n \sum_{k = n - e + 1}^n \frac{k - (n - e)}{k}, \quad e \text{ errors}

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> eaurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0., dtype=torch.float64)
    """
    return _curve(signed_confidences(probs, labels, from_logits)).excess


def selective_accuracy(
    probs: Probs,
    labels: Labels,
    coverages: Sequence[float] = COVERAGES,
    from_logits: bool = False,
) -> Float64[Tensor, " coverages"]:
    r"""Accuracy of the most confident examples, for several shares that are answered.

    .. math:: 1 - r_k, \quad k = \lceil c\, n \rceil

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        coverages: shares of the examples; the number that is answered is rounded up.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    >>> selective_accuracy(probs, torch.tensor([0, 1]), [0.5, 1.0])
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    check_coverages(coverages)
    curve = _curve(signed_confidences(probs, labels, from_logits))
    return torch.stack([curve.accuracy_at(coverage) for coverage in coverages])


def check_coverages(coverages: Sequence[float]) -> None:
    """Refuse shares that are not above zero and at most one."""
    fit = [is_number(coverage) and 0 < coverage <= 1 for coverage in coverages]
    if not fit or not all(fit):
        raise ValueError(f"`coverages` must be numbers in (0, 1], got {coverages}.")


def _curve(signed: Tensor) -> RiskCoverage:
    return risk_coverage(signed.abs(), signed > 0)


# ------------------------------------------------------------ classes
class _Selective(ExactMetric):
    """Keeps the confidence of every example, negative where the prediction is wrong."""

    selective_signed: list[Tensor]
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(self, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.from_logits = from_logits
        self.add_list("selective_signed")

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        self.selective_signed.append(signed_confidences(probs, labels, self.from_logits))

    def curve(self) -> RiskCoverage:
        """The risk-coverage curve of this process's data so far."""
        return _curve(collected(self.selective_signed))

    def compute(self) -> Tensor:
        """The number; NaN without examples."""
        curve = self.curve()
        if not len(curve.risk):
            return self.value(curve) + self._nan("it has seen no example")
        return self.value(curve)

    def value(self, curve: RiskCoverage) -> Tensor:
        """The number that a curve gives."""
        raise NotImplementedError


class AURC(_Selective):
    """Area under the risk-coverage curve, see `aurc`.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> AURC()(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.2500, dtype=torch.float64)
    """

    higher_is_better = False

    def value(self, curve: RiskCoverage) -> Tensor:
        """The mean of the risks."""
        return curve.area


class EAURC(_Selective):
    """Excess area under the risk-coverage curve, see `eaurc`.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> EAURC()(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0., dtype=torch.float64)
    """

    higher_is_better = False

    def value(self, curve: RiskCoverage) -> Tensor:
        """The area without that of a perfect order."""
        return curve.excess


class SelectiveAccuracy(_Selective):
    """Accuracy of the most confident examples, see `selective_accuracy`.

    Args:
        coverages: shares of the examples that are answered.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> metric = SelectiveAccuracy([0.5, 1.0])
    >>> metric(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(
        self, coverages: Sequence[float] = COVERAGES, from_logits: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(from_logits, **kwargs)
        check_coverages(coverages)
        self.coverages = tuple(coverages)

    def value(self, curve: RiskCoverage) -> Tensor:
        """One accuracy for each coverage."""
        return torch.stack([curve.accuracy_at(coverage) for coverage in self.coverages])
