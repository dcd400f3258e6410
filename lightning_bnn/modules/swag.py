"""SWAG: a Gaussian through the last networks of a training run at a high rate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.arguments import count, not_negative, positive
from lightning_bnn.harvest import Schedule, epochs_of, expected
from lightning_bnn.modules.divergence import Diverged
from lightning_bnn.modules.ensemble import DeepEnsemble
from lightning_bnn.modules.high_rate import HighRate
from lightning_bnn.modules.refreshing import Refreshing
from lightning_bnn.modules.sample_store import MemoryStore
from lightning_bnn.modules.side_by_side import finite_members
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.params import Params
from lightning_bnn.posteriors import LowRankGaussian, Mixture, Posterior

__all__ = ["SWAG"]


class SWAG(Refreshing, DeepEnsemble):
    r"""Mean, variances and last deviations of the weights along a run.

    .. math:: \omega = \bar\omega + \sqrt{s} \Big(\tfrac{1}{\sqrt 2} \sigma \odot z_1
        + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2\Big)

    One :math:`z_2` moves all tensors; K is the number of deviations that are there; they are from
    the final mean. With members, a mixture of as many runs. While it trains, validation judges the
    members as they are; afterwards networks are drawn, and get BatchNorm statistics of their own
    from one pass over the training data.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many runs.
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves
            regularisation to the optimizer's weight decay.
        start: epoch after which weights are collected, and the rate rises; by default half of the
            run.
        every_n_epochs: how often they are collected.
        swa_lr: the high rate; by default the schedule of the rate goes on, which should then end at
            a rate at which the weights still move.
        ramp: epochs until the high rate is reached.
        rank: how many deviations are kept.
        scale: multiplies the covariance; 1 is the paper's, 2 s what its code calls s.
        **kwargs: what every module takes, see `BayesianModule`.

    References:
        | A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
        | https://arxiv.org/abs/1902.02476
    """

    takes_samplers = False

    can_be_shared = False

    collected: Tensor

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        prior_std: float | None = None,
        start: int | None = None,
        every_n_epochs: int = 1,
        swa_lr: float | None = None,
        ramp: int = 5,
        rank: int = 20,
        scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if start is not None:
            count("start", start, 0)
        count("ramp", ramp, 0)
        count("rank", rank, 2)
        not_negative("scale", scale)
        if swa_lr is not None:
            positive("swa_lr", swa_lr)
        super().__init__(network, members=members, prior_std=prior_std, **kwargs)
        self.schedule = Schedule(every_n_epochs=every_n_epochs, start=(start or 0) + 1)
        self.start, self.swa_lr, self.ramp, self.scale = start, swa_lr, ramp, scale
        self._given_start = start
        if swa_lr is not None and self.lr_interval == "step":
            raise ValueError("`swa_lr` needs `lr_interval='epoch'`: its ramp counts epochs.")
        trained = {n for n, p in self.template.named_parameters() if p.requires_grad}
        self._weights = [n for n in P.weight_names(self.template) if n in trained]
        stack = {n: t for n, t in self.member_stack().items() if n in set(self._weights)}
        zeros = {n: torch.zeros_like(t) for n, t in stack.items()}
        self.mean = NamedTensors(zeros)
        self.squares = NamedTensors({n: t.clone() for n, t in zeros.items()})
        self.register_buffer("collected", torch.zeros((), dtype=torch.long))
        self.last = MemoryStore(rank)

    # -------------------------------------------------------- the run
    def configure_optimizers(self) -> Any:
        """The user's schedule, then the high rate."""
        configured = super().configure_optimizers()
        self._set_start()
        if self.swa_lr is None:
            return configured
        assert self.start is not None
        plain = not isinstance(configured, dict)
        optimizer = configured if plain else configured["optimizer"]
        before = None if plain else configured["lr_scheduler"]["scheduler"]
        scheduler = HighRate(optimizer, self.swa_lr, self.start, self.ramp, before)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """With the start, which may have been read off the length of the run."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_bnn"]["start"] = self.start

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The start stays, also of a run that is resumed to be longer."""
        super().on_load_checkpoint(checkpoint)
        if self._given_start is None:
            self.start = checkpoint.get("lightning_bnn", {}).get("start")

    def _set_start(self) -> None:
        resumed = self._trainer is not None and self.trainer.ckpt_path is not None
        if self._given_start is None and not (resumed and self.start is not None):
            epochs = epochs_of(self.trainer) if self._trainer is not None else 0
            if math.isinf(epochs):
                raise ValueError("`start` must be given, as the run has no last epoch.")
            self.start = int(epochs) // 2
        self.schedule = replace(self.schedule, start=(self.start or 0) + 1)

    def on_train_start(self) -> None:
        """Another run has moments of its own."""
        super().on_train_start()
        if expected(self.schedule, self.trainer) < 2:
            rank_zero_warn(
                "SWAG will collect weights fewer than twice: take an earlier `start`, or collect "
                "more often. The members are then judged as they are at the end."
            )
        if self.starts_anew:
            self.collected.zero_()
            for carried in (self.mean, self.squares):
                torch._foreach_zero_(list(carried.tensors().values()))
            self.last.forget()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Collect after the last step of an epoch."""
        super().optimizer_step(*args, **kwargs)
        trainer = self.trainer
        if trainer.is_last_batch and self.schedule.after_epoch(trainer.current_epoch + 1):
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Add the weights as they are to the moments."""
        stack = self.member_stack()
        self.collected += 1
        values = [stack[n] for n in self._weights]
        means, squares = (
            [carried.tensors()[n] for n in self._weights] for carried in (self.mean, self.squares)
        )
        before = torch._foreach_sub(values, means)
        torch._foreach_add_(means, before, alpha=1 / int(self.collected))
        torch._foreach_addcmul_(squares, before, torch._foreach_sub(values, means))
        self.last.append({n: stack[n] for n in self._weights})

    # -------------------------------------------------------- the posterior
    def unfitted(self) -> str:
        """Also of one member."""
        return "its members are judged as they are, without Gaussians"

    def modes(self) -> list[LowRankGaussian]:
        """The Gaussian of each member."""
        means = P.unstack({**self.member_stack(), **self.mean.tensors()})
        count = int(self.collected)
        stds = P.unstack({n: (t / count).sqrt() for n, t in self.squares.tensors().items()})
        last = self.last.tensors()
        return [
            LowRankGaussian(means[m], stds[m], _minus(last, means[m], m), self.scale, self._weights)
            for m in self._with_moments()
        ]

    def _with_moments(self) -> list[int]:
        """Members that are well, and were at every time at which they were collected."""
        finite = finite_members([*self.mean.tensors().values(), *self.squares.tensors().values()])
        well = [m for m in self.healthy().tolist() if finite[m]]
        if not well:
            raise Diverged("No member has finite moments: it diverged while it was collected.")
        return well

    @property
    def judged_samples(self) -> int:
        """Networks that are drawn; the members before there is a Gaussian."""
        return self.eval_samples if self._drawn() else len(self.healthy())

    def posterior(self) -> Posterior:
        """The Gaussian, or the mixture of the members' Gaussians."""
        if int(self.collected) < 2:
            return self._members()
        modes = self.modes()
        return modes[0] if len(modes) == 1 else Mixture(modes)

    def judged_posterior(self) -> Posterior:
        """The members while they train, networks of the Gaussian afterwards."""
        return self.refreshed(self.posterior()) if self._drawn() else self._members()

    def _drawn(self) -> bool:
        return int(self.collected) >= 2 and not self.fits_now


def _minus(stacked: Params, mean: Params, member: int) -> Params:
    return {name: t[:, member] - mean[name] for name, t in stacked.items()}
