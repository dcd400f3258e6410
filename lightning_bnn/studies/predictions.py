"""Probabilities of networks on a data set."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.comparison.problem import Batches
from lightning_bnn.params import Params

__all__ = ["accuracy", "mean_probabilities"]


@torch.no_grad()
def mean_probabilities(model: nn.Module, networks: Params, batches: Batches) -> Tensor:
    """Of a stack, averaged over its members, ``(examples, classes)``; of one network, its own."""
    stacked = P.is_stacked(networks, P.of(model))
    found = []
    for inputs, _ in batches:
        probs = P.apply(model.eval(), networks, inputs).double().softmax(-1)
        found.append(probs.mean(0) if stacked else probs)
    return torch.cat(found)


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Per cent of the examples whose likeliest class is right."""
    return 100 * float((probs.argmax(-1) == labels).double().mean())
