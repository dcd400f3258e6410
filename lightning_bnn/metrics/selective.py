"""Selective prediction: how often what is kept is wrong, if the least confident is not answered.

Examples of equal confidence have no order: every number is the mean over all of their orders.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lightning_bnn.metrics.calibration import signed_confidences
from lightning_bnn.metrics.shapes import Labels, Number, Probs
from lightning_bnn.metrics.validation import check_binary, check_finite

__all__ = [
    "RiskCoverage",
    "aurc",
    "risk_coverage",
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
        """AURC, the mean of the risks, or NaN without examples."""
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
        """Accuracy of the most confident examples, at least that share (NaN without any)."""
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


def _curve(signed: Tensor) -> RiskCoverage:
    return risk_coverage(signed.abs(), signed > 0)
