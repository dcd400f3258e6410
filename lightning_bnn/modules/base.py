"""What all LightningModules of this package share: members side by side, and how they train."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import _compat
from lightning_bnn.arguments import count
from lightning_bnn.member_batch import MemberBatch
from lightning_bnn.metrics.validation import option
from lightning_bnn.modules.data_size import data_size
from lightning_bnn.modules.member_losses import Examples
from lightning_bnn.modules.member_module import MemberModule
from lightning_bnn.modules.side_by_side import (
    check_elementwise,
    clip_members,
    finite_members,
    rescale_steps,
)
from lightning_bnn.modules.template_module import EXAMPLE_ROWS
from lightning_bnn.randomness import key_of
from lightning_bnn.samplers import HMC, Langevin

__all__ = ["BayesianModule"]

Interval = Literal["epoch", "step"]
_NOT_SAVED = ("network", "likelihood", "prior", "optimizer", "lr_scheduler", "start_from")


class BayesianModule(MemberModule):
    """Trains a posterior over the weights of any network.

    Args:
        network: gives the computation; it is copied, not changed. Its weights are where the first
            member starts, those of further members are drawn anew. Weights that do not require
            gradients are those of all members.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        members: how many posteriors are trained side by side; one of several is a mixture of them.
        optimizer: makes the optimizer, given parameters.
        lr_scheduler: makes the scheduler, given the optimizer.
        lr_interval: when the scheduler steps, every ``"epoch"`` or every ``"step"``.
        start_from: a checkpoint with the weights where the first member starts; or a folder of
            checkpoints or of a bank, with the weights of all (the last ones that are there).
        num_data: number of training examples; by default read from the train loader.
        eval_samples: how many networks predict in validation, test and prediction.
        chunk_size: networks that run at once, by default chosen by their size.
        seed: of the random numbers of this module; each depends on (seed, step, process) only.
        first_member: number of the first member, where a population is trained in parts: member
            k starts at the same weights in every part that has it.
        member_rates: learning rates of the members, as multiples of the optimizer's.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: nn.Module | None = None,
        members: int = 1,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Interval = "epoch",
        start_from: str | None = None,
        num_data: int | None = None,
        eval_samples: int = 20,
        chunk_size: int | None = None,
        seed: int = 0,
        first_member: int = 0,
        member_rates: Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            network, likelihood, members, start_from, eval_samples, chunk_size, seed, first_member,
            member_rates,
        )  # fmt: skip
        option("lr_interval", lr_interval, get_args(Interval))
        if num_data is not None:
            count("num_data", num_data)
        if not callable(optimizer):
            raise ValueError(
                "`optimizer` must make an optimizer from parameters, such as "
                f"`lambda p: torch.optim.Adam(p, 1e-3)`, got a {type(optimizer).__name__}."
            )
        ignore = () if _compat.made_by_cli() else _NOT_SAVED
        self.save_hyperparameters(ignore=ignore, frame=inspect.currentframe())
        self.num_data = self._given_num_data = num_data
        self.make_optimizer, self.make_scheduler = optimizer, lr_scheduler
        self.lr_interval = lr_interval
        self.own_examples = False
        self._warned_members: set[int] = set()
        self._fits = 0

    takes_samplers = False
    """Whether the optimizer may be a sampler."""

    # -------------------------------------------------------- what a method is
    @abstractmethod
    def losses(self, inputs: tuple[Any, ...], targets: Tensor) -> dict[str, Tensor]:
        """Terms of the objective per member; ``loss`` is what its sum is minimised of."""

    # -------------------------------------------------------- training
    def on_train_start(self) -> None:
        """Read N where it was not given, and tell it to samplers that need it."""
        super().on_train_start()
        self._warned_members = set()
        self._train_data = self.trainer.train_dataloader
        groups = [group for o in self.trainer.optimizers for group in o.param_groups]
        for group in groups:
            if group.get("seed", 0) is None:  # other noise for other seeds, and in another fit
                group["seed"] = key_of(self.seed, "sampler", self._fits, *self._part())
        self._fits += 1
        asking = [group for group in groups if group.get("num_data", 0) is None]
        if self._given_num_data is None and (self.needs_num_data or asking):
            loader: Any = self.trainer.train_dataloader
            self.num_data = data_size(loader, self.trainer.num_training_batches)
            told = f"{type(self).__name__}: the training set has {self.num_data} examples"
            dropped = getattr(loader, "drop_last", False) and self.num_data % loader.batch_size
            rank_zero_info(f"{told}; every epoch drops {dropped}." if dropped else f"{told}.")
        for group in asking:
            group["num_data"] = self.num_data

    @property
    def starts_anew(self) -> bool:
        """Whether this fit neither resumes a checkpoint nor goes on with a trainer's last fit."""
        return self.trainer.ckpt_path is None and self.trainer.global_step == 0

    @property
    def needs_num_data(self) -> bool:
        """Whether the objective weighs data against a prior."""
        return True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """One step for all members."""
        inputs, targets = self.inputs_and_targets(batch)
        inputs = self._cast(inputs)
        self.own_examples = isinstance(batch, MemberBatch)
        if self.own_examples:
            inputs, targets = self._own(inputs, targets)
        if not self._example:
            seen = Examples(inputs, targets, self.own_examples).of(0).inputs
            self._example = tuple(x[:EXAMPLE_ROWS] if isinstance(x, Tensor) else x for x in seen)
        self._same_mode()
        with self._randomness("train", self.trainer.fit_loop.total_batch_idx, *self._part()):
            terms = self._checked(lambda: self.losses(inputs, targets), inputs)
        self._log_terms(terms, targets.shape[1] if self.own_examples else len(targets))
        self.watch(terms)
        return terms["loss"].sum()

    def _own(self, inputs: tuple[Any, ...], targets: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        """Examples of the members that are here, out of those of all members."""
        if self.whole is not None and len(targets) == self._everyone:
            rows = slice(*self.whole)
            return tuple(x[rows] for x in inputs), targets[rows]
        if len(targets) != self.members:
            raise ValueError(
                f"A batch has examples for {len(targets)} members, the module has {self.members}: "
                "give the data as many `orders`."
            )
        return inputs, targets

    def watch(self, terms: dict[str, Tensor]) -> None:
        """Look at the losses of a step; here nobody does."""

    def _log_terms(self, terms: dict[str, Tensor], examples: int) -> None:
        for name, values in terms.items():
            self.log(
                f"train/{name}",
                self._mean_of_members(values.detach()),
                prog_bar=name == "loss",
                batch_size=examples,
                on_step=True,
                on_epoch=False,
            )

    def _mean_of_members(self, values: Tensor) -> Tensor:
        """Of all processes; broken members do not break it, unless all are."""
        finite = values.isfinite()
        sums = torch.stack([values.where(finite, 0).sum(), finite.sum().to(values.dtype)])
        if self.whole is not None:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        return sums[0] / sums[1]

    def on_train_epoch_end(self) -> None:
        """Say which members have diverged; the others go on."""
        self.look_for_divergence()

    def look_for_divergence(self) -> None:
        """Say which members have diverged, and end a run in which nobody is left."""
        bad = (~finite_members(self.stacked_parameters())).nonzero().flatten().tolist()
        if set(bad) - self._warned_members:
            self._warned_members |= set(bad)
            rank_zero_warn(
                f"Members {bad} of {self.members} have weights that are not finite after step "
                f"{self.trainer.global_step}: the learning rate is too large, or the data are not "
                "finite or not scaled."
            )
        if len(bad) == self.members and self.whole is None and not self.may_recover:
            self.trainer.should_stop = True

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What members share learns from their mean, not from their sum."""
        for p in self._shared_parameters():
            if p.grad is not None and self.members > 1:
                p.grad /= self.members

    def _shared_parameters(self) -> list[Tensor]:
        stacked = {id(p) for p in self.stacked_parameters()}
        return [p for p in self.parameters() if id(p) not in stacked]

    def trained_parameters(self) -> list[Any]:
        """What the optimizer is made for: parameters, or groups of them."""
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        """One optimizer for all members, if it does not mix them."""
        if self.members > 1:
            check_elementwise(self.make_optimizer)
        optimizer = self.make_optimizer(self.trained_parameters())
        if isinstance(optimizer, Langevin | HMC) and not self.takes_samplers:
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} samples, and {type(self).__name__} "
                "optimises: take SGD or Adam, or the module SGHMC or HMC."
            )
        if isinstance(optimizer, Langevin | HMC) and self.member_rates is not None:
            raise ValueError("`member_rates` are for optimizers, not for samplers.")
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        watched = getattr(scheduler, "monitor", "val/nll")
        config = {"scheduler": scheduler, "interval": self.lr_interval, "monitor": watched}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Members with rates of their own go a part of the way."""
        if self.member_rates is None:
            super().optimizer_step(*args, **kwargs)
            return
        stacks = self.stacked_parameters()
        before = [t.detach().clone() for t in stacks]
        super().optimizer_step(*args, **kwargs)
        rescale_steps(stacks, before, self.member_rates)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip every member as if it were alone, and what they share by itself."""
        clips = gradient_clip_val is not None and gradient_clip_val > 0
        by_value = gradient_clip_algorithm == "value"  # number by number, whosever they are
        if not clips or by_value or self.members == 1:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        assert gradient_clip_val is not None
        shared = [p for p in self._shared_parameters() if p.grad is not None]
        clip_members(self.stacked_parameters(), float(gradient_clip_val))
        nn.utils.clip_grad_norm_(shared, float(gradient_clip_val))
