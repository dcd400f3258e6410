"""Hamiltonian Monte Carlo with all the data, many chains at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers.energy_sampler import EnergySampler, as_rows
from lightning_bnn.samplers.sampler import cut, seed_of
from weightsym.params import (
    check_between,
    check_count,
    check_fraction,
    check_positive,
    keyed_generator,
    precise,
)

__all__ = ["HMC"]

_GAMMA, _T0, _KAPPA = 0.05, 10, 0.75


class HMC(EnergySampler):
    r"""Leapfrog trajectories with a Metropolis test for every chain.

    .. math:: p \sim N(0, I), \quad H(\theta, p) = U(\theta) / T + \tfrac12 \|p\|^2, \quad
        P(\mathrm{accept}) = \min(1, e^{-\Delta H})

    The closure returns the energies :math:`U` of the chains, see `EnergySampler`. During the first
    ``adapt_steps`` transitions the step size, shared by all chains, is adapted by dual averaging,
    and samples are not draws of the posterior.

    Args:
        params: parameters.
        step_size: of the leapfrog integrator, initially if it is adapted.
        leapfrog_steps: number of gradients per trajectory.
        temperature: T.
        adapt_steps: number of transitions that adapt the step size.
        target_acceptance: mean acceptance probability to adapt to.
        jitter: relative variation of step sizes, so that no direction always turns by the same
            angle.
        seed: of momenta and tests; by default torch's own, and in our modules theirs.

    References:
        | MCMC using Hamiltonian dynamics (Neal, 2011), https://arxiv.org/abs/1206.1901
        | The No-U-Turn Sampler (Hoffman and Gelman, 2014), https://arxiv.org/abs/1111.4246

    >>> chains = torch.nn.Parameter(torch.zeros(5000, 1))  # of a standard normal
    >>> def closure():
    ...     energies = chains.square().sum(1) / 2
    ...     chains.grad = chains.detach().clone()
    ...     return energies
    >>> sampler = HMC([chains], step_size=0.3, leapfrog_steps=5)
    >>> for _ in range(20):
    ...     energies = sampler.step(closure)
    >>> round(chains.var().item(), 1), bool(sampler.acceptance.mean() > 0.9)
    (1.0, True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        step_size: float = 1e-3,
        leapfrog_steps: int = 20,
        temperature: float = 1.0,
        adapt_steps: int = 0,
        target_acceptance: float = 0.8,
        jitter: float = 0.1,
        seed: int | None = None,
    ) -> None:
        check_positive("step_size", step_size)
        check_count("leapfrog_steps", leapfrog_steps)
        check_between("target_acceptance", target_acceptance)
        check_fraction("jitter", jitter)
        super().__init__(
            params, lr=step_size, leapfrog_steps=leapfrog_steps, temperature=temperature,
            adapt_steps=adapt_steps, target_acceptance=target_acceptance, jitter=jitter, seed=seed,
            error=0.0, first_log=math.log(10 * step_size), mean_log=math.log(step_size),
        )  # fmt: skip
        self.acceptance = torch.tensor(math.nan)

    @property
    def step_size(self) -> float:
        """Step size of the next trajectory, before jitter."""
        return self.param_groups[0]["lr"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]  # needs a closure, of tensors
        """Take one transition of every chain.

        Args:
            closure: sets the gradients and returns the energies, ``(chains,)``.

        Returns:
            Energies of the chains as they are now.
        """
        group, params = self.param_groups[0], self.moving()
        generator = keyed_generator(seed_of(group), group["step"], device=params[0].device)
        start = self.rows()
        momenta = as_rows(_noise(params, generator))
        size = group["lr"] * self._jitter(group, generator)
        inverse = 1 / group["temperature"]

        before, gradients = self.look(closure, start)
        kinetic = _kinetic(momenta)
        momenta.add_(gradients, alpha=-size / 2 * inverse)
        x = start.add(momenta, alpha=size)
        steps = group["leapfrog_steps"] - 1
        self.leapfrog(closure, x, momenta, steps, size, -size * inverse)
        after, gradients = self.look(closure, x)
        momenta.add_(gradients, alpha=-size / 2 * inverse)

        change = (after - before) * inverse + _kinetic(momenta) - kinetic
        log_accept = torch.where(change.isfinite(), -change, -math.inf).clamp(max=0)
        draws = torch.rand(len(change), generator=generator, device=change.device)
        accepted = precise(draws).log() < log_accept
        self.put(torch.where(accepted[:, None], x, start))
        self.acceptance = log_accept.exp()
        group["step"] += 1
        self._adapt(group, float(self.acceptance.mean()))
        return torch.where(accepted, after, before)

    def _jitter(self, group: dict[str, Any], generator: torch.Generator) -> float:
        draw = torch.rand((), generator=generator, device=generator.device)
        return 1 + group["jitter"] * (2 * float(draw) - 1)

    def metrics(self) -> dict[str, Tensor | float]:
        """Metrics to log after a transition."""
        return {"acceptance": self.acceptance.mean(), "step_size": self.step_size}

    def _adapt(self, group: dict[str, Any], acceptance: float) -> None:
        """Adapt the logarithm of the step size by dual averaging."""
        step = group["step"]
        if step > group["adapt_steps"]:
            return
        share = 1 / (step + _T0)
        miss = group["target_acceptance"] - acceptance
        group["error"] = (1 - share) * group["error"] + share * miss
        log = group["first_log"] - math.sqrt(step) / _GAMMA * group["error"]
        weight = step**-_KAPPA
        group["mean_log"] = weight * log + (1 - weight) * group["mean_log"]
        group["lr"] = math.exp(group["mean_log"] if step == group["adapt_steps"] else log)


def _noise(params: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Draw standard normal momenta for all tensors at once."""
    flat = params[0].new_empty(sum(p.numel() for p in params)).normal_(generator=generator)
    return [piece.to(p.dtype) for piece, p in zip(cut(flat, params), params, strict=True)]


def _kinetic(momenta: Tensor) -> Tensor:
    """Return the kinetic energy of every chain, in double precision."""
    return precise(momenta).square().sum(1) / 2
