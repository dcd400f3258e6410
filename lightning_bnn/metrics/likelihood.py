"""Proper scores of a prediction: negative log-likelihood and Brier score."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.base import PredictionMean
from lightning_bnn.metrics.shapes import Labels, Number, Probs
from lightning_bnn.metrics.validation import check_choice, check_labels, logits_of, probabilities

__all__ = ["NLL", "BrierScore", "brier_score", "nll"]

ClassReduction = Literal["sum", "mean", "half"]


# ------------------------------------------------------------ functions
def nll(probs: Probs, labels: Labels, from_logits: bool = False) -> Number:
    r"""Negative log-likelihood :math:`-\frac1n \sum_i \log p_i(y_i)`, in nats.

    The likelihood of an ensemble is that of its mean prediction: pass ``probs.mean(0)``.

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.6931, dtype=torch.float64)
    """
    return _nll(probs, labels, from_logits).mean(dtype=torch.float64)


def brier_score(
    probs: Probs,
    labels: Labels,
    class_reduction: ClassReduction = "sum",
    from_logits: bool = False,
) -> Number:
    r"""Squared distance of the prediction to the truth.

    .. math:: \frac1n \sum_i \sum_c (p_{ic} - y_{ic})^2

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        class_reduction: ``"sum"`` over classes (Brier, 1950), their ``"mean"`` (Ovadia et al.,
            2019), or ``"half"`` the sum, which is at most 1.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> brier_score(torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]), torch.tensor([0, 2]))
    tensor(0.5200, dtype=torch.float64)
    """
    check_choice("class_reduction", class_reduction, get_args(ClassReduction))
    total = _brier_total(probs, labels, from_logits)
    return total / len(probs) * _weight(class_reduction, probs.shape[-1])


def _nll(probs: Tensor, labels: Tensor, from_logits: bool) -> Tensor:
    probs = logits_of(probs, "probs") if from_logits else probabilities(probs)
    check_labels(labels, probs)
    if from_logits:
        return torch.nn.functional.cross_entropy(probs, labels.long(), reduction="none")
    return -probs.gather(-1, labels.long()[:, None])[:, 0].log()


def _brier_total(probs: Tensor, labels: Tensor, from_logits: bool) -> Tensor:
    r"""Squared distances of all examples, :math:`\sum_i 1 - 2 p_{iy} + |p_i|^2`, in float64."""
    probs = probabilities(probs, from_logits)
    check_labels(labels, probs)
    squares = torch.linalg.vector_norm(probs, dtype=torch.float64).square()
    truth = probs.gather(-1, labels.long()[:, None]).sum(dtype=torch.float64)
    return squares + len(probs) - 2 * truth


def _weight(class_reduction: str, classes: int) -> float:
    return {"sum": 1.0, "mean": 1 / max(1, classes), "half": 0.5}[class_reduction]


# ------------------------------------------------------------ classes
class NLL(PredictionMean):
    """Negative log-likelihood, see `nll`.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> NLL()(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.6931, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        self.add(_nll(probs, labels, self.from_logits))


class BrierScore(PredictionMean):
    """Brier score, see `brier_score`.

    Args:
        class_reduction: ``"sum"``, ``"mean"`` or ``"half"``.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> BrierScore("half")(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.2500, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound, plot_upper_bound = 0.0, 2.0

    def __init__(
        self, class_reduction: ClassReduction = "sum", from_logits: bool = False, **kwargs: Any
    ) -> None:
        check_choice("class_reduction", class_reduction, get_args(ClassReduction))
        super().__init__(from_logits, variant=f"_{class_reduction}", **kwargs)
        self.class_reduction = class_reduction

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        total = _brier_total(probs, labels, self.from_logits)
        self.add_total(total * _weight(self.class_reduction, probs.shape[-1]), len(probs))
