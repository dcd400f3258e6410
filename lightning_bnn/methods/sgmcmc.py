"""Parallel chains of a stochastic-gradient sampler, and the networks that they visit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_bnn import samplers
from lightning_bnn.methods.chains import Chains, Keeping, warn_of_steps
from lightning_bnn.methods.mc_dropout import has_dropout
from lightning_bnn.methods.method import AS_IT_IS, Fit, Method, Progress, Purpose
from lightning_bnn.methods.networks import gaussian_prior, tell_members, tell_prior
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.posteriors import Empirical
from lightning_bnn.samplers import CyclicalSchedule, Langevin
from lightning_bnn.samplers.cyclical import parts_of
from lightning_bnn.samplers.langevin import decay_of, temperature_of
from weightsym.params import Params, check_count

__all__ = ["SGMCMC", "StochasticMILE"]


@dataclass(eq=False)
class SGMCMC(Method):
    r"""Posterior samples from a minibatch sampler of `lightning_bnn.samplers`.

    .. math:: \exp\big(-(N \cdot \mathrm{NLL}(\omega) - \log p(\omega)) / T\big)

    The optimizer is the sampler, `SGHMC` or `SGLD`, and receives N and the prior. With
    `CyclicalSchedule`, networks are collected only in the sampling phases of its cycles. Members
    are chains that start from networks of their own.

    Args:
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves it to the
            sampler.
        keeping: schedule and storage of the collected networks.
        max_loss: limit on the loss of the last epoch, above which members are left out.
        orbit_moves: number of steps between moves of the chains to other networks of the same
            function, by `samplers.OrbitMoves`; for SGLD and SGHMC. Nothing corrects the steps,
            which must be small enough for less balanced copies.

    References:
        | Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014)
        | https://arxiv.org/abs/1402.4102

    >>> import torch
    >>> from lightning_bnn import methods, params, samplers
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run, batch = methods.SGMCMC(), methods.Run(net, num_data=50), methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> sampler = samplers.SGHMC(state.parameters(), lr=0.01, num_data=50)
    >>> _ = method.configure_optimizer(state, sampler, run)  # tells it the prior
    >>> for step in range(3):
    ...     sampler.zero_grad()
    ...     method.losses(state, batch, run)["loss"].sum().backward()
    ...     sampler.step()
    ...     kept = method.after_step(state, methods.Progress(step + 1, step, True, sampler), run)
    >>> method.posterior(state, run).size  # two chains, kept three times
    6
    """

    prior_std: float | None = 1.0
    keeping: Keeping = field(default_factory=Keeping)
    max_loss: float | None = None
    orbit_moves: int | None = None

    name = "SGHMC"
    keeps_networks = True
    unfitted = "its chains are evaluated at their starting points"

    def __post_init__(self) -> None:
        self.prior = gaussian_prior(self.prior_std)
        check_count("orbit_moves", self.orbit_moves, optional=True)

    def init(self, network: nn.Module, stack: Params) -> Chains:
        return Chains(network, stack, self.keeping, self.max_loss)

    def losses(self, state: Chains, batch: Batch, run: Run) -> dict[str, Tensor]:
        """Return the mean negative log-likelihood. The sampler adds the prior."""
        return {"loss": run.losses(state.trained_stack(), batch)}

    # ------------------------------------------------------------ the sampler
    def configure_optimizer(
        self, state: Chains, optimizer: Any, run: Run, scheduler: Any = None, *fit: Any
    ) -> Any:
        self.keeping.check(run.likelihood)
        if not isinstance(optimizer, Langevin):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} is not a sampler: use one of "
                "lightning_bnn.samplers, such as SGHMC or SGLD."
            )
        tell_members(optimizer)
        tell_prior(optimizer, self.prior)
        if self.orbit_moves:
            _check_moves(optimizer)
        return scheduler

    def before_fit(self, state: Chains, fit: Fit, run: Run) -> None:
        self.keeping.begin(state, fit, run, self.name)
        if self.orbit_moves:
            state.find_moves(fit, run)
        groups = fit.optimizer.param_groups
        if self.prior is None and not any(
            g["prior_precision"] or g["weight_decay"] for g in groups
        ):
            run.warn(
                "There is no prior: without `prior_std`, `prior_precision` or "
                "`weight_decay` the posterior may not be normalisable."
            )
        smoothing = any(getattr(m, "label_smoothing", 0) for m in run.likelihood.modules())
        for name, active in (
            ("Gradient clipping", fit.clips_gradients),
            ("Label smoothing", smoothing),
            ("Dropout", has_dropout(run.network, fit.example())),
        ):
            if active:
                run.warn(f"{name} changes the target of a sampler.")

    # ------------------------------------------------------------ what is kept
    def after_step(self, state: Chains, progress: Progress, run: Run) -> bool:
        if state.moves is not None:
            self._move(state, progress.optimizer)
        exploring = any(not schedule.sampling for schedule in _cycles(progress.schedulers))
        if exploring or (progress.optimizer and progress.optimizer.is_tuning):
            return False
        return self.keeping.keep_if_due(state, progress)

    def _move(self, state: Chains, sampler: Any) -> None:
        """Move along orbits if due, at any temperature above zero."""
        (group,) = sampler.param_groups
        if group["step"] % (self.orbit_moves or 1) or not group["temperature"]:
            return
        prior_std = math.sqrt(temperature_of(group) / decay_of(group))
        with_momenta = (
            (name, sampler.state[p]["velocity"])
            for name, p in state.networks.named_parameters()
            if "velocity" in sampler.state.get(p, ())
        )
        state.move_along_orbits(prior_std, group, dict(with_momenta))

    def after_fit(self, state: Chains, run: Run) -> None:
        self.keeping.close(state, run, self.name)
        state.moves = None

    def posterior(self, state: Chains, run: Run, purpose: Purpose = AS_IT_IS) -> Empirical:
        return state.kept(purpose.choose)


@dataclass(eq=False)
class StochasticMILE(SGMCMC):
    r"""Posterior samples from chains of constant speed, with minibatch gradients.

    .. math:: \exp\big(-(N \cdot \mathrm{NLL}(\omega) - \log p(\omega)) / T\big)

    The optimizer is `lightning_bnn.samplers.SMILE`. Its first 1000 steps descend by Adam, and the
    next 1000 tune the steps by the noise of gradients and by energy errors. Networks are collected
    after that. `MILE` does the same with all the data in every gradient. For networks that are
    already trained, set ``descent_steps`` of the sampler to 0.

    References:
        | Can Microcanonical Langevin Dynamics Leverage Mini-Batch Gradient Noise?
        | (Sommer et al., 2026), https://arxiv.org/abs/2602.06500

    >>> import torch
    >>> from lightning_bnn import methods, params, samplers
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run = methods.StochasticMILE(), methods.Run(net, num_data=50)
    >>> batch = methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> sampler = samplers.SMILE(state.parameters(), 0.01, 50, descent_steps=1, adapt_steps=2)
    >>> _ = method.configure_optimizer(state, sampler, run)  # tells it the prior
    >>> for step in range(5):
    ...     sampler.zero_grad()
    ...     method.losses(state, batch, run)["loss"].sum().backward()
    ...     sampler.step()
    ...     kept = method.after_step(state, methods.Progress(step + 1, step, True, sampler), run)
    >>> method.posterior(state, run).size  # two chains, kept twice after three steps
    4
    """

    name = "SMILE"

    def configure_optimizer(self, state: Chains, optimizer: Any, *fit: Any, **more: Any) -> Any:
        if not isinstance(optimizer, samplers.SMILE):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} is not "
                "lightning_bnn.samplers.SMILE: use it, or the module SGHMC."
            )
        return super().configure_optimizer(state, optimizer, *fit, **more)

    def before_fit(self, state: Chains, fit: Fit, run: Run) -> None:
        super().before_fit(state, fit, run)
        state.sampler = fit.optimizer
        tuning = max(g["descent_steps"] + g["adapt_steps"] for g in fit.optimizer.param_groups)
        if tuning >= fit.steps and not fit.trial:
            run.warn(
                f"SMILE collects no networks in its first {tuning} steps, which descend "
                f"and adapt, and this fit has {fit.steps:.0f}: set fewer `descent_steps` "
                "and `adapt_steps`."
            )

    def after_fit(self, state: Chains, run: Run) -> None:
        super().after_fit(state, run)
        if state.sampler is not None:
            warn_of_steps(state.sampler, run)
        state.sampler = None


def _check_moves(sampler: Langevin) -> None:
    """Refuse samplers that remember earlier weights, and unknown priors."""
    if not isinstance(sampler, samplers.SGLD | samplers.SGHMC):
        name = type(sampler).__name__
        raise ValueError(f"`orbit_moves` requires SGLD or SGHMC, not {name}: omit it.")
    if len(sampler.param_groups) > 1:
        raise ValueError("`orbit_moves` requires a sampler with a single parameter group.")
    if not (sampler.param_groups[0]["prior_precision"] or sampler.param_groups[0]["weight_decay"]):
        raise ValueError("`orbit_moves` draws from a prior: set `prior_std`.")


def _cycles(schedulers: tuple[Any, ...]) -> list[CyclicalSchedule]:
    parts = (inner for scheduler in schedulers for inner in parts_of(scheduler))
    return [s for s in parts if isinstance(s, CyclicalSchedule)]
