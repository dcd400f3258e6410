"""Predictions of classes compared with the truth, and with a reference such as long HMC chains.

All functions take means over posterior samples, ``(batch, classes)``, for the same examples. NLL
and Brier score are proper scores. Agreement compares predicted classes, total variation and
divergence compare probabilities, and one minus the agreement is none of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bnn.metrics.base import PredictionMean
from lightning_bnn.metrics.validation import (
    Labels,
    Number,
    Probs,
    check_labels,
    check_predictions,
    check_same_shape,
    logits_of,
    probabilities,
)

__all__ = [
    "NLL", "Agreement", "BrierScore", "TotalVariation", "agreement", "brier_score", "nll",
    "predictive_kl", "total_variation",
]  # fmt: skip


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


def brier_score(probs: Probs, labels: Labels, from_logits: bool = False) -> Number:
    r"""Squared distance of the prediction to the truth, summed over classes (Brier, 1950).

    .. math:: \frac1n \sum_i \sum_c (p_{ic} - y_{ic})^2

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        labels: ``(batch,)`` class indices.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> brier_score(torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]), torch.tensor([0, 2]))
    tensor(0.5200, dtype=torch.float64)
    """
    return _brier_total(probs, labels, from_logits) / len(probs)


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


def agreement(probs: Probs, reference: Probs, from_logits: bool = False) -> Number:
    r"""Fraction of the examples for which both predict the same class. Ties go to the first class.

    .. math:: \frac1n \sum_i [\arg\max_c p_{ic} = \arg\max_c p^{ref}_{ic}]

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        reference: predictions of the reference.
        from_logits: whether both are logits; never guessed.

    >>> agreement(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.6, 0.4], [0.6, 0.4]]))
    tensor(0.5000, dtype=torch.float64)
    """
    return _agreement(probs, reference, from_logits).mean(dtype=torch.float64)


def total_variation(probs: Probs, reference: Probs, from_logits: bool = False) -> Number:
    r"""Mean over examples of :math:`\frac12 \sum_c |p_c - p^{ref}_c|`.

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        reference: predictions of the reference.
        from_logits: whether both are logits; never guessed.

    References:
        | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
        | https://arxiv.org/abs/2104.14421

    >>> total_variation(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]]))
    tensor(0.2500, dtype=torch.float64)
    """
    return _total_variation(probs, reference, from_logits).mean(dtype=torch.float64)


def predictive_kl(probs: Probs, reference: Probs, from_logits: bool = False) -> Number:
    r"""Kullback-Leibler divergence of the predictions from the reference's, in nats.

    .. math:: \frac1N \sum_n \sum_c p^{ref}_{nc} \log \frac{p^{ref}_{nc}}{p_{nc}}

    It is the expected loss of log-probability for targets drawn from the reference's predictions,
    and infinite for a class that is excluded but not by the reference. By Pinsker's inequality it
    is at least twice the square of the total variation, example by example.

    Args:
        probs: ``(batch, classes)`` probabilities, or logits with ``from_logits``.
        reference: predictions of the reference.
        from_logits: whether both are logits; never guessed.

    >>> predictive_kl(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]]))
    tensor(0.1438, dtype=torch.float64)
    """
    return kl_of_each(probs, reference, from_logits).mean(dtype=torch.float64)


def kl_of_each(probs: Tensor, reference: Tensor, from_logits: bool = False) -> Tensor:
    """Return the divergence for every example, see `predictive_kl`.

    Args:
        probs: ``(batch, classes)``.
        reference: predictions of the reference.
        from_logits: whether both are logits.
    """
    a, b = (t.double() for t in _pair(probs, reference, from_logits))
    pair = (probs.double(), reference.double())
    log_a, log_b = (t.log_softmax(-1) for t in pair) if from_logits else (a.log(), b.log())
    terms = torch.where(b > 0, b * (log_b - log_a), 0.0)
    return (terms + a - b).sum(-1)  # none is negative, also where rows sum to one but nearly


def _agreement(probs: Tensor, reference: Tensor, from_logits: bool) -> Tensor:
    """Return one for every example with the same likeliest class, else zero."""
    a, b = _pair(probs, reference, from_logits)
    return (a.argmax(-1) == b.argmax(-1)).double()


def _total_variation(probs: Tensor, reference: Tensor, from_logits: bool) -> Tensor:
    """Return the total variation distance for every example."""
    a, b = _pair(probs, reference, from_logits)
    return (a - b).abs().sum(-1) / 2


def _pair(probs: Tensor, reference: Tensor, from_logits: bool) -> tuple[Tensor, Tensor]:
    check_same_shape(probs=probs, reference=reference)
    check_predictions(probs)
    return probabilities(probs, from_logits), probabilities(reference, from_logits, "reference")


# ------------------------------------------------------------ classes
class NLL(PredictionMean):
    """Negative log-likelihood, see `nll`.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

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
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> BrierScore()(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.5000, dtype=torch.float64)
    """

    higher_is_better = False
    plot_lower_bound, plot_upper_bound = 0.0, 2.0

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: probabilities (or logits) ``(batch, classes)`` and labels ``(batch,)``."""
        self.add_total(_brier_total(probs, labels, self.from_logits), len(probs))


class _BesideReference(PredictionMean):
    """The mean over examples of a number between 0 and 1 that compares two predictions."""

    plot_lower_bound, plot_upper_bound = 0.0, 1.0
    of_each: ClassVar[Any]
    """Computes the number of every example from two predictions, and whether they are logits."""

    def update(self, probs: Tensor, reference: Tensor) -> None:
        """Add a batch of mean predictions and the reference's for the same examples."""
        self.add(type(self).of_each(probs, reference, self.from_logits))


class Agreement(_BesideReference):
    """Agreement with a reference, see `agreement`.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> Agreement()(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]]))
    tensor(1., dtype=torch.float64)
    """

    higher_is_better = True
    of_each = staticmethod(_agreement)


class TotalVariation(_BesideReference):
    """Total variation distance to a reference, see `total_variation`.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> TotalVariation()(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]]))
    tensor(0.2500, dtype=torch.float64)
    """

    higher_is_better = False
    of_each = staticmethod(_total_variation)
