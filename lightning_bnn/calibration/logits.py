"""Predictions of classes as calibration takes them: finite logits of every network, in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bnn.likelihoods import Bernoulli
from lightning_bnn.metrics.validation import check_labels, logits_of

__all__ = ["checked_logits", "checked_pair", "class_logits", "log_mean_probs", "pooled"]


def class_logits(likelihood: nn.Module, outputs: Tensor) -> Tensor:
    """Outputs of networks as logits of classes ``(samples, batch, classes)``.

    Args:
        likelihood: ``Categorical``, or ``Bernoulli``, whose one logit becomes two.
        outputs: of every network.

    >>> from lightning_bnn.likelihoods import Bernoulli
    >>> outputs = torch.tensor([[[2.0]]])
    >>> probs = class_logits(Bernoulli(), outputs).softmax(-1)
    >>> torch.allclose(probs[..., 1:].float(), outputs.sigmoid())
    True
    """
    logits = outputs.double()
    if isinstance(likelihood, Bernoulli):
        logits = torch.cat([torch.zeros_like(logits), logits], -1)
    return logits


def checked_logits(logits: Tensor) -> Tensor:
    """Finite logits ``(samples, batch, classes)`` in float64; of one network also without samples.

    Args:
        logits: of every network.
    """
    logits = logits_of(logits).double()
    logits = logits[None] if logits.ndim == 2 else logits
    if logits.ndim != 3 or not len(logits):
        raise ValueError(
            "`logits` must have shape (samples, batch, classes) or (batch, classes), got "
            f"{tuple(logits.shape)}."
        )
    return logits


def checked_pair(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels of calibration examples, of which there is at least one.

    Args:
        logits: of every network.
        labels: class indices.
    """
    logits = checked_logits(logits)
    check_labels(labels, logits[0])
    if not len(labels):
        raise ValueError("`labels` must be those of at least one calibration example, got none.")
    return logits, labels.long()


def log_mean_probs(logits: Tensor) -> Tensor:
    """Logarithms of the mean probabilities of several networks, ``(batch, classes)``.

    Args:
        logits: ``(samples, batch, classes)``.

    >>> log_mean_probs(torch.zeros(3, 1, 2)).exp()
    tensor([[0.5000, 0.5000]])
    """
    samples = torch.full((), len(logits), dtype=logits.dtype, device=logits.device)
    return logits.log_softmax(-1).logsumexp(0) - samples.log()


def pooled(logits: Tensor) -> Tensor:
    r"""The mean prediction of several networks as one network, ``(1, batch, classes)``.

    .. math:: z_c = \log \tfrac1S \textstyle\sum_s softmax(z_s)_c

    Args:
        logits: ``(samples, batch, classes)``, or those of one network.

    >>> pooled(torch.tensor([[[4.0, 0.0]], [[0.0, 4.0]]])).softmax(-1)
    tensor([[[0.5000, 0.5000]]], dtype=torch.float64)
    """
    return log_mean_probs(checked_logits(logits))[None]
