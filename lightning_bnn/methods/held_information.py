"""An information and its gradient, held for the steps in which neither is computed anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HeldInformation"]


class HeldInformation(nn.Module):
    """What the last estimate was, and its gradient by means and deviations; a part of checkpoints.

    Args:
        mean: the means, ``(members, weights)``, like which gradients are.
    """

    value: Tensor
    of_mean: Tensor
    of_log_std: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        mean = mean.detach()
        self.register_buffer("value", mean.new_full((len(mean),), torch.nan))
        self.register_buffer("of_mean", torch.zeros_like(mean))
        self.register_buffer("of_log_std", torch.zeros_like(mean))

    @property
    def is_empty(self) -> bool:
        """Whether there was no estimate yet."""
        return bool(self.value.isnan().any())

    def hold(self, information: Tensor, mean: Tensor, log_std: Tensor) -> None:
        """Keep an estimate and its gradient.

        Args:
            information: the estimate, ``(members,)``.
            mean: the means, with respect to which it is differentiated.
            log_std: the logarithms of deviations.
        """
        self.value.copy_(information.detach())
        if not information.requires_grad:  # as where all units can be told apart
            self.of_mean.zero_()
            self.of_log_std.zero_()
            return
        grads = torch.autograd.grad(information.sum(), (mean, log_std), retain_graph=True)
        self.of_mean.copy_(grads[0])
        self.of_log_std.copy_(grads[1])

    def estimate(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """The estimate that is held, with the gradient that is held.

        Args:
            mean: the means, which get it.
            log_std: the logarithms of deviations, which get it.
        """
        return _WithGradient.apply(mean, log_std, self)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, held: HeldInformation) -> Tensor:
        ctx.held = held
        return held.value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight = grad[:, None]
        return weight * ctx.held.of_mean, weight * ctx.held.of_log_std, None
