"""Soft permutations that learn from the loss between two networks, and are rounded at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_bnn.symmetry.matching.learning import Best
from lightning_bnn.symmetry.matching.relaxation import Relaxation

__all__ = ["doubly_stochastic", "learn_softly"]

RATE = 0.1


def doubly_stochastic(
    logits: Float[Tensor, "*lead units units"], iterations: int = 20
) -> Float[Tensor, "*lead units units"]:
    """Normalise rows and columns of ``exp(logits)`` in turns (Sinkhorn), by their logarithms.

    >>> doubly_stochastic(torch.tensor([[3.0, 0.0], [0.0, 3.0]])).sum(0)
    tensor([1., 1.])
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


def learn_softly(relaxation: Relaxation, best: Best) -> None:
    r"""Sinkhorn re-basin: gradients by the logits of doubly stochastic matrices.

    .. math:: \min_Z L(\tfrac12 a + \tfrac12 S(Z)\, b), \quad P = \mathrm{LAP}(S(Z))

    where :math:`S` normalises rows and columns. Permutations are read off every few steps, by one
    assignment per group, and the best are kept.

    References:
        Re-basin via implicit Sinkhorn differentiation (Guerrero Pena et al., 2023)

    Args:
        relaxation: of the symmetries.
        best: where to start, and what keeps the best.
    """
    lines = best.lines
    settings = lines.learning
    orders = relaxation.orders(best.permutations)
    device = next(iter(best.params.values())).device
    logits = [_start(o, settings.sharpness).to(device).requires_grad_() for o in orders]
    optimizer = settings.optimizer_of(logits, RATE)
    for step, batch, weight in lines.steps():
        with torch.enable_grad():
            matrices = [doubly_stochastic(z, settings.iterations) for z in logits]
            soft = relaxation.mixed(best.params, matrices)
            loss = lines.losses(soft, batch, weight).sum()
            gradients = torch.autograd.grad(loss, logits, allow_unused=True)
        for z, gradient in zip(logits, gradients, strict=True):
            z.grad = gradient
        optimizer.step()
        if step % settings.every == 0 or step == settings.steps:
            best.consider(
                relaxation.elements(relaxation.best(_rounded(logits, settings.iterations)))
            )


def _start(order: Tensor, share: float) -> Tensor:
    """Logits that give every unit this share of its partner, and the rest to all others."""
    units = order.shape[1]
    lift = math.log(max(units - 1, 1)) + math.log(share / (1 - share))
    return lift * torch.nn.functional.one_hot(order, units).float()


def _rounded(logits: Sequence[Tensor], iterations: int) -> list[Tensor]:
    return [doubly_stochastic(z.detach(), iterations) for z in logits]
