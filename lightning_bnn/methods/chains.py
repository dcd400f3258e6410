"""Chains that keep the networks that they visit: the state of samplers, and its posterior."""

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
"""Times the wanted variance of energy errors, above which the user is warned."""


class Chains(Networks):
    """Every member is a chain. The posterior is made of the networks that are kept of all chains.

    Before the first one is kept it is made of the members as they are. Chains that have diverged
    are left out; if all have, what they had kept before makes the posterior.

    Args:
        network: gives the computation.
        stack: where the chains start.
        keeping: says where networks are kept.
        max_loss: see `Networks`.

    Attributes:
        sampler: what moves the chains of this fit.
        moves: along the orbits of the chains, if they are asked for.
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

    def any_finite(self) -> bool:
        """Check whether a chain is left."""
        return bool(finite_members(self.parameters()).any())

    def find_moves(self, fit: Fit, run: Run) -> None:
        """Get ready for moves along orbits, by the symmetries of the network."""
        example = fit.example() or next((batch.example() for batch in fit.batches()), ())
        trained = {n for n, p in self.networks.named_parameters() if p.requires_grad}
        with evaluation(run.network):
            self.moves = OrbitMoves(discover(run.network, *example), movable=trained)
        if held := self.moves.held:
            run.inform(f"Moves along orbits leave {len(held)} groups alone: {held[0]}.")

    @torch.no_grad()
    def move_along_orbits(
        self, prior_std: float, group: dict[str, Any], momenta: Params | None = None
    ) -> None:
        """Draw other networks of the same functions.

        Momenta follow permutations and signs, and stay where scales change: as step sizes go to
        zero, their law does not depend on the weights.

        Args:
            prior_std: standard deviation of the prior, times the root of the temperature.
            group: of the sampler, with the key of the random numbers.
            momenta: of parameters, which change in place.
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
        """Numbers of the networks of chains that have not diverged. Of all, if there are none."""
        finite = self.samples.finite()
        lost = not self.any_finite() and bool(finite.any())
        chains = range(self.count) if lost else self.healthy().tolist()
        times = finite.tolist()
        return [k * self.count + m for k, row in enumerate(times) for m in chains if row[m]]

    def kept(self, choose: Choice = list) -> Empirical:
        """Networks that were kept, each as likely as the others.

        Args:
            choose: which of them, by default all.
        """
        rows = choose(self.rows())
        if not rows:
            return self.members()
        return Empirical(self.samples.networks(rows), [row % self.count for row in rows])

    def chains(self, first: int = 0) -> Params:
        """All networks that were kept, as ``(members, times, ...)``, nothing if there are none.

        Args:
            first: leave out so many times.
        """
        times = len(self.samples) - first
        if times < 1:
            return {}
        rows = range(first * self.count, (first + times) * self.count)
        stack = self.samples.networks(rows)
        return {n: t.unflatten(0, (times, self.count)).transpose(0, 1) for n, t in stack.items()}


@dataclass(frozen=True)
class Keeping:
    """The schedule by which the members of chains are kept, and the place for them.

    Args:
        burn_in: nothing is kept of the first so many steps (or epochs).
        every_n_steps: how often the members are kept, in steps.
        every_n_epochs: the same in epochs; by default after each.
        bank: folder to keep them in, instead of in memory and in the checkpoints.

    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net = mlp(2, [4], 2)
    >>> keeping, run = methods.Keeping(burn_in=4, every_n_steps=2), methods.Run(net)
    >>> state = methods.SGMCMC(keeping=keeping).init(net, params.populate(net, 1))
    >>> steps = [methods.Progress(step, 0, False) for step in range(1, 11)]
    >>> [p.step for p in steps if keeping.keep_if_due(state, p, run)]
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
        """At which steps, or at the ends of which epochs."""
        each = 1 if self.every_n_steps is None and self.every_n_epochs is None else None
        period = each if self.every_n_epochs is None else self.every_n_epochs
        return Schedule(self.every_n_steps, period, start=self.burn_in + 1)

    def store(self, members: int) -> KeptNetworks:
        """A new place to keep networks."""
        return NetworksInMemory() if self.bank is None else InBank(self.bank, members)

    def begin(self, state: Chains, fit: Fit, run: Run, name: str) -> None:
        """Get ready for a run. Another run begins other chains."""
        if fit.anew:
            state.samples.forget()
        state.samples.open(fit.rank == 0)
        count = self.schedule.count(fit.steps, fit.epochs)
        if self.bank is None and count < math.inf:
            tensors = [*state.stack().values()]
            size, what = (
                sum(t.nbytes for t in tensors),
                f"Keeping {state.count} chains {count} times",
            )
            check_memory(count * size, tensors[0].device, what, "give a `bank`, or keep fewer")
        if count < 1:
            run.warn(
                f"{name} will keep nothing: `burn_in` is as long as the run, or the networks are "
                "kept too seldom. The chains are then judged as they are at the end."
            )

    @staticmethod
    def check(likelihood: nn.Module) -> None:
        """Refuse a likelihood with parameters, which would belong to none of the chains."""
        if any(p.requires_grad for p in likelihood.parameters()):
            raise ValueError(
                "`likelihood` has parameters of its own, which chains cannot share: take a fixed "
                "or a heteroscedastic noise, or `likelihood.requires_grad_(False)`."
            )

    def keep_if_due(self, state: Chains, progress: Progress, run: Run) -> bool:
        """Keep the members if it is time. Statistics are those of the first process."""
        step = progress.step
        epoch_due = progress.epoch_ends and self.schedule.after_epoch(progress.epoch + 1)
        due = epoch_due or self.schedule.after_step(step - 1, step)
        if due and state.any_finite():
            stack = state.stack()
            trained = {name for name, _ in run.network.named_parameters()}
            statistics = {name: t for name, t in stack.items() if name not in trained}
            stack.update(progress.in_common(statistics))
            state.samples.append(stack, step=step, epoch=progress.epoch)
        return due

    def close(self, state: Chains, run: Run, name: str) -> None:
        """Close what is open, and say how much was kept."""
        state.samples.close()
        finite = state.samples.finite()
        chains = "1 chain" if state.count == 1 else f"{state.count} chains"
        broken = int((~finite).sum())
        ending = f"; {broken} others are not finite, and left out" if broken else ""
        run.inform(f"{name}: {int(finite.sum())} networks of {chains} were kept{ending}.")


def warn_of_steps(sampler: Any, run: Run) -> None:
    """Say which microcanonical chains have energy errors that are too large, or undone steps.

    Args:
        sampler: that has moved the chains.
        run: knows the user.
    """
    if not sampler.step_sizes.numel():
        return
    variances, failures = sampler.energy_variances, sampler.failed_steps
    wanted, count = sampler.param_groups[0]["energy_variance"], len(variances)
    rough = (variances > _MOST * wanted).nonzero().flatten().tolist()
    if rough:
        run.warn(
            f"The energy errors of chains {rough} of {count} vary by up to "
            f"{float(variances[rough].max()):.2g}, more than {_MOST} times what was asked for "
            f"({wanted:.2g}), and so do their laws differ from the posterior: take a smaller "
            "`energy_variance`, or confirm the draws by HMC."
        )
    failed = (failures > 0).nonzero().flatten().tolist()
    if failed:
        run.warn(
            f"Chains {failed} of {count} have left the finite numbers while sampling, "
            f"{int(failures.sum())} times in all; these steps were undone."
        )
