"""What is told about networks and their average: how far they are from it, and what it loses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call

from lightning_bnn.commands.judged_examples import Examples, loss
from lightning_bnn.params import Params, unstack, weighted_mean
from lightning_bnn.symmetry.matching.repair import reestimated

__all__ = ["average_numbers"]


def average_numbers(
    network: nn.Module, every: Params, parts: Sequence[float], examples: Examples | None
) -> dict[str, float]:
    """How far networks are from their average, and how much more it loses on examples.

    Args:
        network: gives the computation.
        every: the networks, as a stack.
        parts: how much each counts; together one.
        examples: to judge on, and to estimate the statistics of batch norms of the average.
    """
    mean = weighted_mean(every, parts)
    squares = torch.zeros((), dtype=torch.float64)
    for name in (n for n, t in mean.items() if t.is_floating_point()):
        for part, tensor in zip(parts, every[name], strict=True):
            squares += part * (tensor - mean[name]).square().sum(dtype=torch.float64)
    numbers = {"distance to the average": math.sqrt(float(squares))}
    if examples is not None:
        losses = [_loss(network, member, examples) for member in unstack(every)]
        own = sum(part * one for part, one in zip(parts, losses, strict=True))
        mean = reestimated(network, mean, examples.inputs)
        barrier = _loss(network, mean, examples) - own
        numbers[f"barrier (loss of the average above theirs) on {examples}"] = barrier
    return numbers


@torch.no_grad()
def _loss(network: nn.Module, params: Params, examples: Examples) -> float:
    total, count = 0.0, 0
    for x, y in examples.batches:
        total += float(loss(functional_call(network, params, (x,)), y)) * len(y)
        count += len(y)
    return total / count
