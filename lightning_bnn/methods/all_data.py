r"""Chains whose every step uses all the data: Hamiltonian and microcanonical.

.. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_bnn import samplers
from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.methods.chains import Chains, Keeping, warn_of_steps
from lightning_bnn.methods.mc_dropout import has_dropout
from lightning_bnn.methods.method import AS_IT_IS, Fit, Method, Progress, Purpose
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.posteriors import Empirical
from weightsym.params import (
    Energies,
    Field,
    Params,
    check_count,
    check_positive,
    engine_for,
    precise,
    widest,
)

__all__ = ["HamiltonianMonteCarlo", "MILE"]

_LEAST_ACCEPTANCE = 0.01
_SMALL = 8
"""Examples below which machine code does not take a batch."""


class AllDataChains(Chains):
    """Chains, and the data over which their energies are summed.

    Attributes:
        data: the batches of all the data that belong to this process.
        processes: how many processes share the data.
        is_new: whether this fit has not made a transition yet.
        stuck: chains with a non-finite energy that the user has been warned of.
        notes: ``"acceptance"``, the summed acceptance probabilities of every chain where proposals
            are tested, and ``"transitions"``, their number.
    """

    def __init__(self, network: nn.Module, stack: Params, keeping: Keeping) -> None:
        super().__init__(network, stack, keeping)
        self.data: list[Batch] = []
        self.processes, self.is_new = 1, False
        self.stuck: set[int] = set()
        self.notes |= {"acceptance": torch.zeros(self.count), "transitions": 0}


@dataclass(eq=False)
class AllDataSampling(Method):
    """Posterior samples from transitions that use the gradients of all the data.

    BatchNorm uses the statistics of the given network; dropout is refused. Several processes share
    the data.

    Args:
        prior_std: standard deviation of a Gaussian prior over all weights.
        transitions: number of transitions per training step. Schedules count transitions. In a
            Trainer, whose step takes longer than one in a small problem, ten are much faster.
        keeping: schedule and storage of the collected networks.
    """

    prior_std: float = 1.0
    transitions: int = 1
    keeping: Keeping = field(default_factory=Keeping)

    sampler: ClassVar[type]
    """Of `lightning_bnn.samplers`, which moves the chains."""
    keeps_networks = True
    unfitted = "its chains are evaluated at their starting points"

    def __post_init__(self) -> None:
        check_positive("prior_std", self.prior_std)
        check_count("transitions", self.transitions)
        self.prior = IsotropicGaussianPrior(self.prior_std)

    def init(self, network: nn.Module, stack: Params) -> AllDataChains:
        if has_dropout(network):
            raise ValueError(
                "`network` has dropout, which would make the energy random: set its rates "
                "to 0, or use SGHMC."
            )
        trained = {name for name, _ in network.named_parameters()}
        common = {n: t if n in trained else t[:1].expand_as(t) for n, t in stack.items()}
        return AllDataChains(network, common, self.keeping)

    def losses(self, state: AllDataChains, batch: Batch, run: Run) -> dict[str, Tensor]:
        return {"loss": run.losses(state.trained_stack(), batch)}

    # ------------------------------------------------------------ the run
    def configure_optimizer(
        self, state: AllDataChains, optimizer: Any, run: Run, scheduler: Any = None, *fit: Any
    ) -> None:
        self.keeping.check(run.likelihood)
        if not isinstance(optimizer, self.sampler):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} is not lightning_bnn.samplers."
                f"{self.sampler.__name__}."
            )
        if scheduler is not None:
            raise ValueError(
                f"`lr_scheduler` has no effect on {self.name}, whose sampler adapts its "
                "step size: omit it."
            )

    def before_fit(self, state: AllDataChains, fit: Fit, run: Run) -> None:
        name = self.name
        self.keeping.begin(state, fit, run, name)
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in state.parameters()):
            raise ValueError(f"{name} needs exact energies: set `precision` to 32-true or 64-true.")
        (group,) = fit.optimizer.param_groups
        tuning = group.get("descent_steps", 0) + group["adapt_steps"]
        schedule = self.keeping.schedule
        each = 1 if schedule.every_n_steps is not None else fit.epoch_steps
        after = replace(schedule, start=max(schedule.start, int(tuning // each) + 1))
        if after.count(fit.steps, fit.epochs) < 1 <= schedule.count(fit.steps, fit.epochs):
            run.warn(
                f"{name} will collect no networks: its sampler descends and adapts for "
                f"{tuning} steps."
            )
        batches = list(fit.batches())
        examples = sum(batch.examples for batch in batches)
        if examples != run.num_data:
            run.warn(
                f"The train loader yields {examples} of {run.num_data} examples "
                "(`drop_last`?): the posterior is that of these examples."
            )
        state.data = _without_small_end([_share(batch, fit) for batch in batches])
        state.processes, state.sampler, state.stuck = fit.processes, fit.optimizer, set()
        state.is_new = True
        run.inform(
            f"{name}: every gradient uses {examples} examples, {batches[0].examples} at a time."
        )

    def transition(
        self, state: AllDataChains, run: Run, move: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        if state.is_new:
            state.is_new = False
            state.sampler.field = self.field(state, run)
        energies = move(closure=lambda: self.energies(state, run))
        self._check(energies, state, run)
        return {"energy": energies}

    def energies(self, state: AllDataChains, run: Run) -> Tensor:
        """Return the negative log posterior of every chain, and set the gradients."""
        run.network.eval()
        energies, *grads = self._sums(state, run)
        for p, grad in zip(_moving(state), grads, strict=True):
            p.grad = grad
        return energies

    def field(self, state: AllDataChains, run: Run) -> Field | None:
        """Return the energies from an engine, if one accepts them."""
        if state.processes > 1:
            return None
        run.network.eval()
        own_inputs = any(batch.per_member for batch in state.data)
        job = Energies(
            network=run.network,
            stack=state.stack(),
            moving={n: p for n, p in state.networks.named_parameters() if p.requires_grad},
            batches=[(batch.inputs, batch.targets) for batch in state.data],
            loss=run.loss(own_inputs),
            own_inputs=own_inputs,
            precision=self.prior.std**-2,
            count=partial(_count, run, state.count * sum(b.examples for b in state.data)),
            by_torch=lambda _: self._uncounted_sums(state, run),
        )
        engine = engine_for(job)
        return None if engine is None else engine.run(job)

    def _uncounted_sums(self, state: AllDataChains, run: Run) -> list[Tensor]:
        evaluated = run.evaluated
        sums = self._sums(state, run)
        run.evaluated = evaluated
        return sums

    def _sums(self, state: AllDataChains, run: Run) -> list[Tensor]:
        """Return the energies and the gradient of every tensor."""
        params = _moving(state)
        device = params[0].device
        total = torch.zeros(state.count, dtype=widest(device), device=device)
        grads = [torch.zeros_like(p) for p in params]
        with torch.autocast(device.type, enabled=False):  # energies of two places are compared
            for batch in state.data:
                if batch.examples:
                    nll = batch.examples * run.losses(state.trained_stack(), batch)
                    torch._foreach_add_(grads, torch.autograd.grad(nll.sum(), params))
                    total += precise(nll.detach())
        if state.processes > 1:
            for tensor in (total, *grads):
                dist.all_reduce(tensor)
        torch._foreach_add_(grads, [p.detach() for p in params], alpha=self.prior.std**-2)
        with torch.no_grad():
            squares = [precise(p).square().flatten(1).sum(1) for p in params]
            return [total + torch.stack(squares).sum(0) / (2 * self.prior.std**2), *grads]

    def _check(self, energies: Tensor, state: AllDataChains, run: Run) -> None:
        """Warn of chains whose energy is not finite, since they reject every proposal."""
        broken = [k for k, well in enumerate(energies.isfinite().tolist()) if not well]
        message = (
            f"The energy of chains {broken} of {state.count} is not finite, so that no step will "
            "ever be accepted: look for NaN and huge values in the data, and in the weights that "
            "the chains start from."
        )
        if len(broken) == state.count:
            raise ValueError(message)
        if set(broken) - state.stuck:
            state.stuck |= set(broken)
            run.warn(message)

    # ------------------------------------------------------------ what is kept
    def after_step(self, state: AllDataChains, progress: Progress, run: Run) -> bool:
        if progress.optimizer.is_tuning:
            return False
        return self.keeping.keep_if_due(state, progress)

    def after_fit(self, state: AllDataChains, run: Run) -> None:
        self.keeping.close(state, run, self.name)
        if state.sampler is not None:
            state.sampler.field = None
        state.data, state.sampler, state.moves = [], None, None

    def posterior(self, state: Chains, run: Run, purpose: Purpose = AS_IT_IS) -> Empirical:
        return state.kept(purpose.choose)


@dataclass(eq=False)
class HamiltonianMonteCarlo(AllDataSampling):
    r"""Posterior samples, exact in the limit of long chains.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every step is one transition of `lightning_bnn.samplers.HMC`, with the gradients of all the
    data. The batch that a loader yields at that step does not matter, but its size is the number of
    examples that are computed at a time. The data are read once, completely and without
    augmentation. BatchNorm uses the statistics of the given network; dropout is refused. Several
    processes share the data.

    Args:
        orbit_moves: number of transitions between moves of the chains to other networks of the same
            function (`lightning_bnn.samplers.OrbitMoves`). Chains then visit all copies of a mode,
            and no further gradients are needed. By default there are no such moves.

    References:
        | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
        | https://arxiv.org/abs/2104.14421

    >>> import torch
    >>> from lightning_bnn import methods, params, samplers
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run = methods.HamiltonianMonteCarlo(), methods.Run(net, num_data=50)
    >>> batch = methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> sampler = samplers.HMC(state.parameters(), step_size=0.02, leapfrog_steps=3)
    >>> method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: [batch]), run)
    >>> for step in range(3):
    ...     energies = method.transition(state, run, sampler.step)["energy"]
    ...     kept = method.after_step(state, methods.Progress(step + 1, step, True, sampler), run)
    >>> energies.shape, method.posterior(state, run).size  # two chains, kept three times
    (torch.Size([2]), 6)
    """

    orbit_moves: int | None = None

    name = "HMC"
    sampler = samplers.HMC

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("orbit_moves", self.orbit_moves, optional=True)

    def before_fit(self, state: AllDataChains, fit: Fit, run: Run) -> None:
        super().before_fit(state, fit, run)
        if self.orbit_moves:
            state.find_moves(fit, run)
        if fit.anew:
            state.notes |= {"acceptance": torch.zeros(state.count), "transitions": 0}
        if fit.trial:
            for group in fit.optimizer.param_groups:
                group["leapfrog_steps"] = 1

    def transition(
        self, state: AllDataChains, run: Run, move: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        (group,) = state.sampler.param_groups
        if state.moves is not None and group["step"] % (self.orbit_moves or 1) == 0:
            state.move_along_orbits(self.prior_std * math.sqrt(group["temperature"]), group)
        return super().transition(state, run, move)

    def after_step(self, state: Any, progress: Progress, run: Run) -> bool:
        last = progress.optimizer.acceptance
        state.notes["acceptance"] = state.notes["acceptance"].to(last.device) + last
        state.notes["transitions"] += 1
        return super().after_step(state, progress, run)

    def after_fit(self, state: Any, run: Run) -> None:
        super().after_fit(state, run)
        few = state.notes["acceptance"] < _LEAST_ACCEPTANCE * state.notes["transitions"]
        stuck = few.nonzero().flatten().tolist()
        if stuck:
            run.warn(
                f"Chains {stuck} of {state.count} have hardly moved, since nearly all "
                "proposals were rejected: set a smaller `step_size`, or let `adapt_steps` "
                "find one."
            )


@dataclass(eq=False)
class MILE(AllDataSampling):
    r"""Posterior samples from chains of constant speed, each started at a trained network.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every step is one transition of `lightning_bnn.samplers.MCLMC`, by default of 21 gradients of
    all the data. The batch that a loader yields at that step does not matter, but its size is the
    number of examples that are computed at a time. The first 100 transitions descend by Adam, and
    the next 200 adapt the steps. For networks that are already trained, set ``descent_steps`` of
    the sampler to 0.

    No test corrects the distribution of the draws. Their energy variance shows how far to trust it,
    and `HMC` confirms it. BatchNorm uses the statistics of the given network; dropout is refused.
    Several processes share the data.

    References:
        | Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks
        | (Sommer et al., 2025), https://arxiv.org/abs/2502.06335

    >>> import torch
    >>> from lightning_bnn import methods, params, samplers
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method = methods.MILE(keeping=methods.Keeping(burn_in=2))
    >>> run, batch = methods.Run(net, num_data=50), methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> sampler = samplers.MCLMC(state.parameters(), steps=2, descent_steps=1, adapt_steps=1)
    >>> method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: [batch]), run)
    >>> for step in range(5):
    ...     energies = method.transition(state, run, sampler.step)["energy"]
    ...     kept = method.after_step(state, methods.Progress(step + 1, step, True, sampler), run)
    >>> method.posterior(state, run).size  # two chains, kept three times after the burn-in
    6
    """

    keeping: Keeping = field(default_factory=partial(Keeping, burn_in=300))

    sampler = samplers.MCLMC

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keeping.every_n_epochs is None:  # a transition is a draw
            self.keeping = replace(self.keeping, every_n_steps=self.keeping.every_n_steps or 1)

    def before_fit(self, state: AllDataChains, fit: Fit, run: Run) -> None:
        super().before_fit(state, fit, run)
        for group in fit.optimizer.param_groups if fit.trial else ():
            group["steps"] = 1

    def after_fit(self, state: AllDataChains, run: Run) -> None:
        sampler = state.sampler
        super().after_fit(state, run)
        if sampler is not None:
            warn_of_steps(sampler, run)


def _count(run: Run, examples: int, gradients: int) -> None:
    run.evaluated += examples * gradients


def _moving(state: AllDataChains) -> list[Tensor]:
    return [p for p in state.parameters() if p.requires_grad]


def _without_small_end(batches: list[Batch]) -> list[Batch]:
    """Join the last two batches if the last one is too small for engines."""
    *whole, last = batches
    tensors = all(isinstance(x, Tensor) for batch in batches for x in batch.inputs)
    if not whole or last.per_member or last.examples >= _SMALL or not tensors:
        return batches
    *whole, before = whole
    inputs = tuple(map(torch.cat, zip(before.inputs, last.inputs, strict=True)))
    targets = torch.cat([before.targets, last.targets])
    return [*whole, Batch(inputs, targets, number=before.number)]


def _share(batch: Batch, fit: Fit) -> Batch:
    """Select the examples of this process."""
    share = slice(fit.rank, None, fit.processes)
    rows = (slice(None), share) if batch.per_member else share
    inputs = tuple(x[rows] if isinstance(x, Tensor) else x for x in batch.inputs)
    return Batch(inputs, batch.targets[rows], batch.per_member)
