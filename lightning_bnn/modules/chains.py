"""What modules share whose members are chains: they keep the networks that they have visited."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_bnn.arguments import count
from lightning_bnn.harvest import Schedule, expected
from lightning_bnn.modules.ensemble import DeepEnsemble
from lightning_bnn.modules.sample_store import BankStore, MemoryStore, SampleStore
from lightning_bnn.modules.side_by_side import finite_members
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical, Posterior
from lightning_bnn.randomness import keyed_generator

__all__ = ["Chains"]


class _ClosesBank(Callback):
    """Modules are not told of exceptions, callbacks are."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let others write; the trainer may have gone on to a module without a bank."""
        if isinstance(pl_module, Chains):
            pl_module.samples.close()


class Chains(DeepEnsemble):
    """Every member is a chain; the posterior is made of the networks that are kept of all chains.

    Before the first one is kept it is made of the members as they are. Chains that have diverged
    are left out; if all have, the run ends, and what they had kept before makes the posterior.

    Args:
        network: where the first chain starts; those of further chains are drawn anew.
        members: how many chains.
        prior_std: standard deviation of a Gaussian prior over all weights.
        burn_in: nothing is kept of the first so many steps (or epochs).
        every_n_steps: how often the members are kept, in steps.
        every_n_epochs: the same in epochs; by default after each.
        bank: folder to keep them in, instead of in memory and in the checkpoints.
        **kwargs: what every module takes, see `BayesianModule`.
    """

    can_be_shared = False

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        prior_std: float | None = 1.0,
        burn_in: int = 0,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        bank: str | None = None,
        **kwargs: Any,
    ) -> None:
        count("burn_in", burn_in, 0)
        if every_n_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        super().__init__(network, members=members, prior_std=prior_std, **kwargs)
        if any(p.requires_grad for p in self.likelihood.parameters()):
            raise ValueError(
                "`likelihood` has parameters of its own, which chains cannot share: take a fixed "
                "or a heteroscedastic noise."
            )
        self.schedule = Schedule(every_n_steps, every_n_epochs, start=burn_in + 1)
        self.samples: SampleStore = MemoryStore() if bank is None else BankStore(bank, members)

    # -------------------------------------------------------- what is kept
    def on_train_start(self) -> None:
        """Open the bank too; another run begins other chains."""
        super().on_train_start()
        if self.starts_anew:
            self.samples.forget()
        self.samples.open(self.trainer.is_global_zero)
        self.trainer.strategy.barrier()
        if expected(self.schedule, self.trainer) < 1:
            rank_zero_warn(
                f"{type(self).__name__} will keep nothing: `burn_in` is as long as the run, or the "
                "networks are kept too seldom. The chains are then judged as they are at the end."
            )

    def configure_callbacks(self) -> list[Callback]:
        """Close the bank whatever goes wrong; a trainer is asked again for every run."""
        trainer: Any = self.trainer
        there = any(isinstance(callback, _ClosesBank) for callback in trainer.callbacks)
        return [] if there else [_ClosesBank()]

    def keep_if_due(self, before: int) -> None:
        """Keep the members, if it is time, after the step that followed so many."""
        trainer = self.trainer
        ended = trainer.is_last_batch and self.schedule.after_epoch(trainer.current_epoch + 1)
        if ended or self.schedule.after_step(before, before + 1):
            self.look_for_divergence()
            if not self._any_finite():
                return
            record = {"step": before + 1, "epoch": trainer.current_epoch}
            self.samples.append(self._common_stack(), **record)
            trainer.strategy.barrier()  # others read what the first has written

    def _common_stack(self) -> Params:
        """Processes share weights, but not BatchNorm statistics; those of the first count."""
        stack = self.member_stack()
        if self.trainer.world_size > 1:
            trained = {name for name, _ in self.template.named_parameters()}
            own = {name: t for name, t in stack.items() if name not in trained}
            stack = {**stack, **self.trainer.strategy.broadcast(own)}
        return stack

    def on_fit_end(self) -> None:
        """Close the bank."""
        self.samples.close()
        finite = self.samples.finite()
        chains = "1 chain" if self.members == 1 else f"{self.members} chains"
        broken = int((~finite).sum())
        left = f"; {broken} others are not finite, and left out" if broken else ""
        told = f"{int(finite.sum())} networks of {chains} were kept{left}"
        rank_zero_info(f"{type(self).__name__}: {told}.")

    # -------------------------------------------------------- the posterior
    def unfitted(self) -> str:
        """Also of one chain."""
        return "its chains are judged where they start"

    def _rows(self) -> list[int]:
        """Numbers of the networks of chains that have not diverged; of all, if there are none."""
        finite = self.samples.finite()
        lost = not self._any_finite() and bool(finite.any())
        chains = range(self.members) if lost else self.healthy().tolist()
        times = finite.tolist()
        return [k * self.members + m for k, row in enumerate(times) for m in chains if row[m]]

    def _any_finite(self) -> bool:
        return bool(finite_members(self.stacked_parameters()).any())

    @property
    def judged_samples(self) -> int:
        """As many as there are, up to ``eval_samples``."""
        return min(self.eval_samples, len(self._rows())) or len(self.healthy())

    def posterior(self) -> Empirical:
        """All networks that were kept, each as likely as the others."""
        rows = self._rows()
        if not rows:
            return self._members()
        return Empirical(self.samples.networks(rows), [row % self.members for row in rows])

    def judged_modes(self, samples: int) -> list[Posterior]:
        """The chains, with all that was kept."""
        return self.posterior().modes()

    def judged_posterior(self) -> Empirical:
        """Some of them."""
        rows = self._rows()
        if not rows:
            return self._members()
        order = torch.randperm(len(rows), generator=keyed_generator(self.seed, "kept"))
        chosen = [rows[k] for k in order[: self.judged_samples].sort().values.tolist()]
        return Empirical(self.samples.networks(chosen))

    def chains(self, first: int = 0) -> Params:
        """All networks that were kept, as ``(members, times, ...)``; nothing if there are none.

        Args:
            first: leave out so many times.
        """
        times = len(self.samples) - first
        if times < 1:
            return {}
        rows = range(first * self.members, (first + times) * self.members)
        stack = self.samples.networks(rows)
        return {n: t.unflatten(0, (times, self.members)).transpose(0, 1) for n, t in stack.items()}
