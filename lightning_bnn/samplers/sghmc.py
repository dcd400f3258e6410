"""Stochastic-gradient Hamiltonian Monte Carlo, in the form of SGD with momentum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers.langevin import Langevin, decay_of, temperature_of

__all__ = ["SGHMC"]


class SGHMC(Langevin):
    r"""SGD with momentum and noise.

    .. math:: v \leftarrow \mu v - \eta\, g
        + \sqrt{2 (1 - \mu)\, \eta\, T / N}\; \xi, \quad \theta \leftarrow \theta + v

    At T = 0 and a constant rate it is SGD with momentum. Positions are exact as the rate goes to
    zero: on a quadratic of curvature k their variance is :math:`T / (N k) / (1 - \eta k / (2 (1 +
    \mu)))`. Initial momenta are drawn from their stationary distribution at the next step, given
    the position,

    .. math:: v \leftarrow -\frac{\eta\, g}{1 + \mu} + \sqrt{\frac{2 \eta T}{(1 + \mu) N}}\; \xi,
        \quad \theta \leftarrow \theta + v

    so that they have no effect on the distribution. With little friction this is the half step at
    the start of a leapfrog. At T = 0 momenta start at zero instead. The state stores :math:`v /
    \sqrt{\eta}`, which schedules of the rate do not change.

    Args:
        params: parameters or parameter groups.
        lr: step size, that of SGD with momentum on the mean loss.
        momentum: :math:`\mu`, one minus the friction.
        num_data: number of training examples.
        temperature: T.
        prior_precision: of a Gaussian prior.
        weight_decay: ``prior_precision / num_data`` instead.
        seed: of the noise; by default torch's own, or 0 with several processes, and in our modules
            theirs.

    References:
        | Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014)
        | https://arxiv.org/abs/1402.4102

    >>> w = torch.nn.Parameter(torch.zeros(20_000))
    >>> sampler = SGHMC([w], lr=0.5, momentum=0.5, num_data=100)
    >>> for _ in range(50):
    ...     w.grad = w.detach().clone()  # of the mean loss w^2 / 2
    ...     sampler.step()
    >>> round(w.var().item(), 3)  # 1 / 100 / (1 - 0.5 / 3)
    0.012
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        momentum: float = 0.9,
        num_data: int | None = None,
        temperature: float = 1.0,
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            params, lr, num_data, temperature, prior_precision, weight_decay, seed,
            momentum=momentum,
        )  # fmt: skip

    def update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
        noise: list[Tensor] | None,
    ) -> None:
        """Update momenta and positions, see the class."""
        new = ["velocity" not in self.state[p] for p in params]
        for p, value in compress(zip(params, values, strict=True), new):
            self.state[p]["velocity"] = torch.zeros_like(value)
        velocities = [self.state[p]["velocity"] for p in params]
        for fresh in set(new):
            where = [n == fresh for n in new]
            tensors = (list(compress(t, where)) for t in (velocities, values, grads, noise or []))
            _accelerate(group, fresh, *tensors)
        torch._foreach_add_(values, velocities, alpha=math.sqrt(group["lr"]))

    def metrics(self) -> dict[str, Tensor]:
        """Metrics to log, once there are momenta."""
        return {"kinetic_temperature": self.kinetic_temperature()} if self.state else {}

    def kinetic_temperature(self) -> Tensor:
        r"""Return the mean energy of the momenta, :math:`N (1 + \mu) v^2 / (2 \eta)`.

        It is T if steps are small and gradients exact; the noise of minibatches raises it.
        """
        energies, count = [], 0
        for group in self.param_groups:
            velocities = [self.state[p]["velocity"] for p in group["params"] if p in self.state]
            if velocities:
                norms = torch.stack([n.cpu().double() for n in torch._foreach_norm(velocities)])
                scale = group["num_data"] * (1 + group["momentum"]) / 2
                energies.append(scale * norms.square().sum())
                count += sum(v.numel() for v in velocities)
        return torch.stack(energies).sum() / count if count else torch.tensor(torch.nan)


def _accelerate(
    group: dict[str, Any],
    fresh: bool,
    velocities: list[Tensor],
    values: list[Tensor],
    grads: list[Tensor],
    noise: list[Tensor],
) -> None:
    """Apply friction, force and noise in place. New velocities are zero."""
    root, mu = math.sqrt(group["lr"]), group["momentum"]
    force, heat = 1.0, 1 - mu
    if fresh and noise:  # a momentum that a chain has had all along depends on where it is
        force = heat = 1 / (1 + mu)
    torch._foreach_mul_(velocities, mu)
    torch._foreach_add_(velocities, grads, alpha=-root * force)
    if decay_of(group):
        torch._foreach_add_(velocities, values, alpha=-root * force * decay_of(group))
    if noise:
        scale = math.sqrt(2 * heat * temperature_of(group))
        torch._foreach_add_(velocities, noise, alpha=scale)
