"""Stochastic-gradient Hamiltonian Monte Carlo, in the form of SGD with momentum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.arguments import count, not_negative, share
from lightning_bnn.samplers.langevin import Langevin, decay_of, temperature_of

__all__ = ["SGHMC"]


class SGHMC(Langevin):
    r"""SGD with momentum and noise.

    .. math:: v \leftarrow \mu v - \eta\, g
        + \sqrt{2 (1 - \mu - \hat\beta)\, \eta\, T / N}\; \xi, \quad \theta \leftarrow \theta + v

    At T = 0 and a constant rate it is SGD with momentum. Positions are exact as the rate goes to
    zero: on a quadratic of curvature k their variance is :math:`T / (N k) / (1 - \eta k / (2 (1 +
    \mu)))`. Momenta start from their stationary law for small rates, of variance
    :math:`2 \eta T / ((1 + \mu) N)`; what is stored is :math:`v / \sqrt{\eta}`, so that schedules
    of the rate leave it alone.

    Args:
        params: parameters or parameter groups.
        lr: step size, that of SGD with momentum on the mean loss.
        momentum: :math:`\mu`, one minus the friction.
        num_data: number of training examples.
        temperature: T.
        prior_precision: of a Gaussian prior.
        weight_decay: ``prior_precision / num_data`` instead.
        noise_estimate: :math:`\hat\beta`, the part of the noise that minibatches bring already.
        resample_every: draw momenta anew after so many steps.
        seed: of the noise, 0 by default; our modules fill in theirs.

    References:
        | Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014)
        | https://arxiv.org/abs/1402.4102
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
        noise_estimate: float = 0.0,
        resample_every: int | None = None,
        seed: int | None = None,
    ) -> None:
        share("momentum", momentum)
        not_negative("noise_estimate", noise_estimate)
        if noise_estimate > 1 - momentum:
            raise ValueError(
                "`noise_estimate` must be between 0 and the friction, "
                f"{1 - momentum:.6g}, got {noise_estimate}."
            )
        if resample_every is not None:
            count("resample_every", resample_every)
        super().__init__(
            params, lr, num_data, temperature, prior_precision, weight_decay, seed,
            momentum=momentum, noise_estimate=noise_estimate, resample_every=resample_every,
        )  # fmt: skip

    def update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
        noise: list[Tensor] | None,
        index: str,
    ) -> None:
        """One step."""
        root, mu = math.sqrt(group["lr"]), group["momentum"]
        velocities = self._velocities(group, params, values, index)
        torch._foreach_mul_(velocities, mu)
        torch._foreach_add_(velocities, grads, alpha=-root)
        if decay_of(group):
            torch._foreach_add_(velocities, values, alpha=-root * decay_of(group))
        if noise is not None:
            friction = 1 - mu - group["noise_estimate"]
            scale = math.sqrt(2 * max(friction, 0.0) * temperature_of(group))
            torch._foreach_add_(velocities, noise, alpha=scale)
        torch._foreach_add_(values, velocities, alpha=root)

    def kinetic_temperature(self) -> Tensor:
        r"""Mean energy of the momenta, :math:`N (1 + \mu) v^2 / (2 \eta)`.

        It is T when steps are small and gradients exact; the noise of minibatches heats.
        """
        energies, count = [], 0
        for group in self.param_groups:
            held = [self.state[p]["velocity"] for p in group["params"] if p in self.state]
            if held:
                norms = torch.stack([n.cpu().double() for n in torch._foreach_norm(held)])
                scale = group["num_data"] * (1 + group["momentum"]) / 2
                energies.append(scale * norms.square().sum())
                count += sum(v.numel() for v in held)
        return torch.stack(energies).sum() / count if count else torch.tensor(torch.nan)

    def _velocities(
        self, group: dict[str, Any], params: list[Tensor], values: list[Tensor], index: str
    ) -> list[Tensor]:
        """Those of the last step, or a draw from their stationary law."""
        every = group["resample_every"]
        again = every is not None and group["step"] % every == 0
        new = [p for p in params if again or "velocity" not in self.state[p]]
        if new and group["temperature"] > 0:
            scale = math.sqrt(2 * temperature_of(group) / (1 + group["momentum"]))
            drawn = self._noise(group, new, index, "momentum")
            torch._foreach_mul_(drawn, scale)
        else:
            fresh = {id(p) for p in new}
            pairs = zip(params, values, strict=True)
            drawn = [torch.zeros_like(v) for p, v in pairs if id(p) in fresh]
        for p, velocity in zip(new, drawn, strict=True):
            self.state[p]["velocity"] = velocity.clone()
        return [self.state[p]["velocity"] for p in params]
