"""Stochastic-gradient Langevin dynamics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers.langevin import Langevin, decay_of, temperature_of

__all__ = ["SGLD"]


class SGLD(Langevin):
    r"""Gradient descent with noise.

    .. math:: \theta \leftarrow \theta - \eta\, g + \sqrt{2 \eta T / N}\; \xi

    with the gradient g of the mean loss and of the prior's share. On a quadratic of curvature k the
    stationary variance is :math:`T / (N k) / (1 - \eta k / 2)`: exact as the rate goes to zero.

    Args:
        params: parameters or parameter groups.
        lr: step size, in the scale of an SGD on the mean loss.
        num_data: number of training examples.
        temperature: T; 0 is SGD.
        prior_precision: of a Gaussian prior.
        weight_decay: ``prior_precision / num_data`` instead.
        seed: of the noise; by default torch's own, or 0 with several processes, and in our modules
            theirs.

    References:
        | Bayesian Learning via Stochastic Gradient Langevin Dynamics (Welling and Teh, 2011)

    >>> w = torch.nn.Parameter(torch.zeros(20_000))
    >>> sampler = SGLD([w], lr=0.5, num_data=100)
    >>> for _ in range(20):
    ...     w.grad = w.detach().clone()  # of the mean loss w^2 / 2
    ...     sampler.step()
    >>> round(w.var().item(), 3)  # 1 / 100 / (1 - 0.5 / 2)
    0.013
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        num_data: int | None = None,
        temperature: float = 1.0,
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(params, lr, num_data, temperature, prior_precision, weight_decay, seed)

    def update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
        noise: list[Tensor] | None,
    ) -> None:
        """Take one step of the rule of the class."""
        if decay_of(group):
            torch._foreach_mul_(values, 1 - group["lr"] * decay_of(group))
        torch._foreach_add_(values, grads, alpha=-group["lr"])
        if noise is not None:
            scale = math.sqrt(2 * group["lr"] * temperature_of(group))
            torch._foreach_add_(values, noise, alpha=scale)
