"""Scores of "this input is unlike the training data": higher means more out of distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.metrics.diversity import mutual_information
from lightning_bnn.metrics.validation import logits_of, probabilities

__all__ = ["energy_score", "entropy_score", "max_probability_score", "mutual_information_score"]


def max_probability_score(probs: Tensor, from_logits: bool = False) -> Tensor:
    r"""Probability of all classes but the likeliest.

    .. math:: 1 - \max_c p_c

    >>> max_probability_score(torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    tensor([0.2500, 0.5000])
    """
    probs = predictive(probs, from_logits)  # one minus the largest would lose the small ones
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0).sum(-1)


def entropy_score(probs: Tensor, from_logits: bool = False) -> Tensor:
    r"""Entropy of the prediction, in nats.

    .. math:: -\textstyle\sum_c p_c \log p_c

    >>> entropy_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(predictive(probs, from_logits)).sum(-1)


def mutual_information_score(probs: Tensor, from_logits: bool = False) -> Tensor:
    r"""Mutual information of networks ``(samples, batch, classes)``, in nats.

    .. math:: H\big(\tfrac1S \textstyle\sum_s p_s\big) - \tfrac1S \textstyle\sum_s H(p_s)

    >>> mutual_information_score(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931])
    """
    return mutual_information(probs, from_logits)


def energy_score(logits: Tensor, from_logits: bool = True) -> Tensor:
    r"""Free energy :math:`-\log \sum_c e^{z_c}` of the logits (Liu et al., 2020).

    >>> energy_score(torch.zeros(1, 2))
    tensor([-0.6931])
    """
    if not from_logits:
        raise ValueError("`score='energy'` needs logits: pass `from_logits=True`.")
    return -logits_of(logits).logsumexp(-1)


def predictive(probs: Tensor, from_logits: bool = False) -> Tensor:
    """Predictions ``(batch, classes)``. Those of several networks are averaged.

    >>> predictive(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([[0.5000, 0.5000]])
    """
    probs = probabilities(probs, from_logits)
    return probs.mean(0) if probs.ndim == 3 else probs
