"""Chains that collect the networks they visit: the state of samplers, and its posterior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_bnn.harvest import Schedule
from lightning_bnn.methods.health import finite_members
from lightning_bnn.methods.kept_networks import InBank, KeptNetworks, NetworksInMemory
from lightning_bnn.methods.method import Choice, Fit, Progress
from lightning_bnn.methods.networks import Networks
from lightning_bnn.methods.run import Run, evaluation
from lightning_bnn.posteriors import Empirical
from lightning_bnn.samplers import OrbitMoves
from lightning_bnn.samplers.sampler import seed_of
from weightsym import discover
from weightsym.params import Params, check_count, check_memory, keyed_generator, stack_size

__all__ = ["Keeping"]

_MOST = 10
"""Factor over the requested variance of energy errors, above which the user is warned."""


class Chains(Networks):
    """Chains, one per member, whose collected networks form the posterior.

    Until the first networks are collected, the current members form the posterior. Diverged chains
    are left out. If all have diverged, the networks that they collected before form the posterior.

    Args:
        network: gives the computation.
        stack: where the chains start.
        keeping: schedule and storage of the collected networks.
        max_loss: see `Networks`.

    Attributes:
        sampler: moves the chains of this fit.
        moves: along the orbits of the chains, if requested.
    """

    sampler: Any = None
    moves: OrbitMoves | None = None

    def __init__(
        self,
        network: nn.Module,
        stack: Params,
        keeping: Keeping,
        max_loss: float | None = None,
    ) -> None:
        super().__init__(network, stack, max_loss)
        self.count = stack_size(stack)
        self.samples = keeping.store(self.count)

    def find_moves(self, fit: Fit, run: Run) -> None:
        """Find the symmetries of the network, for moves along orbits."""
        example = fit.example() or next((batch.example() for batch in fit.batches()), ())
        trained = {n for n, p in self.networks.named_parameters() if p.requires_grad}
        with evaluation(run.network):
            self.moves = OrbitMoves(discover(run.network, *example), movable=trained)
        if fixed := self.moves.held:
            run.inform(f"Moves along orbits leave out {len(fixed)} groups: {fixed[0]}.")

    @torch.no_grad()
    def move_along_orbits(
        self, prior_std: float, group: dict[str, Any], momenta: Params | None = None
    ) -> None:
        """Draw other networks of the same functions, for all chains.

        Permutations and signs move momenta, too. Scales leave them unchanged: as step sizes go to
        zero, the distribution of momenta does not depend on the weights.

        Args:
            prior_std: standard deviation of the prior, times the square root of the temperature.
            group: of the sampler, with the key of its random numbers.
            momenta: of parameters, changed in place.
        """
        assert self.moves is not None
        self.moves.prior_std = prior_std
        generator = keyed_generator(seed_of(group), "orbit", group["step"])
        stack = self.stack()
        to_copies = self.moves.draw_copies(self.count, generator)
        moved = self.moves.rescaled(to_copies(stack), generator)
        for name, p in self.networks.named_parameters():
            p.copy_(moved[name])
        if momenta:
            followed = to_copies({**stack, **momenta})
            for name, t in momenta.items():
                t.copy_(followed[name])

    def rows(self) -> list[int]:
        """Return the indices of networks from chains that have not diverged, or of all networks."""
        finite = self.samples.finite()
        lost = not bool(finite_members(self.parameters()).any()) and bool(finite.any())
        chains = range(self.count) if lost else self.healthy().tolist()
        times = finite.tolist()
        return [k * self.count + m for k, row in enumerate(times) for m in chains if row[m]]

    def kept(self, choose: Choice = list) -> Empirical:
        """Return the collected networks, all equally likely.

        Args:
            choose: selects some of them; by default all.
        """
        rows = choose(self.rows())
        if not rows:
            return self.members()
        return Empirical(self.samples.networks(rows), [row % self.count for row in rows])

    def chains(self, first: int = 0) -> Params:
        """Return all collected networks as ``(members, times, ...)``, or nothing if there are none.

        Args:
            first: number of times to omit.
        """
        times = len(self.samples) - first
        if times < 1:
            return {}
        rows = range(first * self.count, (first + times) * self.count)
        stack = self.samples.networks(rows)
        return {n: t.unflatten(0, (times, self.count)).transpose(0, 1) for n, t in stack.items()}


@dataclass(frozen=True)
class Keeping:
    """Schedule and storage of the networks that chains collect.

    Args:
        burn_in: number of steps (or epochs) before the first network is collected.
        every_n_steps: number of steps between two collections.
        every_n_epochs: number of epochs between two collections; by default one.
        bank: folder of a bank for the networks, instead of memory and checkpoints.

    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net = mlp(2, [4], 2)
    >>> keeping = methods.Keeping(burn_in=4, every_n_steps=2)
    >>> state = methods.SGMCMC(keeping=keeping).init(net, params.populate(net, 1))
    >>> steps = [methods.Progress(step, 0, False) for step in range(1, 11)]
    >>> [p.step for p in steps if keeping.keep_if_due(state, p)]
    [6, 8, 10]
    """

    burn_in: int = 0
    every_n_steps: int | None = None
    every_n_epochs: int | None = None
    bank: str | None = None

    def __post_init__(self) -> None:
        check_count("burn_in", self.burn_in, 0)
        assert self.schedule  # refuses other periods

    @property
    def schedule(self) -> Schedule:
        """The steps or epochs at which networks are collected."""
        each = 1 if self.every_n_steps is None and self.every_n_epochs is None else None
        period = each if self.every_n_epochs is None else self.every_n_epochs
        return Schedule(self.every_n_steps, period, start=self.burn_in + 1)

    def store(self, members: int) -> KeptNetworks:
        """Create the storage for networks."""
        return NetworksInMemory() if self.bank is None else InBank(self.bank, members)

    def begin(self, state: Chains, fit: Fit, run: Run, name: str) -> None:
        """Prepare a run. A different run starts new chains."""
        if fit.anew:
            state.samples.forget()
        state.samples.open(fit.rank == 0)
        count = self.schedule.count(fit.steps, fit.epochs)
        if self.bank is None and count < math.inf:
            tensors = [*state.stack().values()]
            size, title = (
                sum(t.nbytes for t in tensors),
                f"Keeping {state.count} chains {count} times",
            )
            check_memory(count * size, tensors[0].device, title, "set a `bank`, or collect fewer")
        if count < 1:
            run.warn(
                f"{name} will collect no networks: `burn_in` is as long as the run, or the "
                "interval is too long. Then the final networks of the chains are evaluated."
            )

    @staticmethod
    def check(likelihood: nn.Module) -> None:
        """Require a likelihood without trained parameters, which chains could not share."""
        if any(p.requires_grad for p in likelihood.parameters()):
            raise ValueError(
                "`likelihood` has parameters of its own, which chains cannot share: use "
                "fixed or heteroscedastic noise, or call "
                "`likelihood.requires_grad_(False)`."
            )

    def keep_if_due(self, state: Chains, progress: Progress) -> bool:
        """Collect the members if due. Statistics are those of the first process."""
        step = progress.step
        epoch_due = progress.epoch_ends and self.schedule.after_epoch(progress.epoch + 1)
        due = epoch_due or self.schedule.after_step(step - 1, step)
        if due:
            stack = state.stack()
            buffers = {n: stack[n] for n, _ in state.networks.named_buffers() if n in stack}
            stack.update(progress.in_common(buffers))
            state.samples.append(stack, step=step, epoch=progress.epoch)
        return due

    def close(self, state: Chains, run: Run, name: str) -> None:
        """Close the storage, and report the number of networks."""
        state.samples.close()
        finite = state.samples.finite()
        chains = "1 chain" if state.count == 1 else f"{state.count} chains"
        broken = int((~finite).sum())
        ending = f"; {broken} others are not finite and were left out" if broken else ""
        run.inform(f"{name}: {int(finite.sum())} networks of {chains} were collected{ending}.")


def warn_of_steps(sampler: Any, run: Run) -> None:
    """Warn of microcanonical chains with large energy errors or undone steps.

    Args:
        sampler: moved the chains.
        run: sends the warning to the user.
    """
    if not sampler.step_sizes.numel():
        return
    variances, failures = sampler.energy_variances, sampler.failed_steps
    wanted, count = sampler.param_groups[0]["energy_variance"], len(variances)
    rough = (variances > _MOST * wanted).nonzero().flatten().tolist()
    if rough:
        run.warn(
            f"The energy errors of chains {rough} of {count} vary by up to "
            f"{float(variances[rough].max()):.2g}, more than {_MOST} times the requested "
            f"{wanted:.2g}, so their distributions differ from the posterior: set a "
            "smaller `energy_variance`, or confirm the draws by HMC."
        )
    failed = (failures > 0).nonzero().flatten().tolist()
    if failed:
        run.warn(
            f"Chains {failed} of {count} became non-finite while sampling, "
            f"{int(failures.sum())} times in total; these steps were undone."
        )
