"""The part of a module that fits: counting data, watching members, completing them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bnn import _compat
from lightning_bnn.harvest import ends, epochs_of
from lightning_bnn.methods import Fit, Method, Progress
from lightning_bnn.methods.health import finite_members
from lightning_bnn.modules.batches import only_loader
from lightning_bnn.modules.core import Core, ModulePart
from lightning_bnn.modules.templates import check_fixed, constants_of, sample_of_fixed
from lightning_bnn.modules.training_data import TrainingData, data_size, fault_of
from weightsym.params import Params, key_of


class Fitting(ModulePart):
    """The part of a module that goes with its trainer through a fit.

    Args:
        module: what is fitted.
        num_data: number of training examples, if the user has given it.
    """

    def __init__(self, module: Core, num_data: int | None) -> None:
        super().__init__(module)
        self.given_num_data = num_data
        self.last_source: Any = None
        self.stands_before_epoch_end = False
        self._fits = 0
        self._known_to_be_broken: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "last_source": None}

    @property
    def _weighs_data(self) -> bool:
        """Check whether the objective weighs the data against a prior."""
        method = self.module.method
        return method.prior is not None or method.is_sampler

    # ------------------------------------------------------------ data
    def training_data(self) -> TrainingData | None:
        """The data of the trainer, else those of the last fit or that were named."""
        trainer, source = _compat.trainer_of(self.module), self.last_source
        if trainer is not None:
            sources = (trainer.train_dataloader, trainer.datamodule, source)
            source = next((data for data in sources if data is not None), None)
        return None if source is None else TrainingData(self.module, source)

    def example(self) -> tuple[Any, ...]:
        """Two rows of input, nothing if none are known."""
        return self.module.example()

    def in_common(self, tensors: Params) -> Params:
        """Tensors of the first process, where several train the same members."""
        trainer = self.module.trainer
        return tensors if trainer.world_size == 1 else trainer.strategy.broadcast(tensors)

    # ------------------------------------------------------------ the beginning
    def begin(self) -> None:
        """Read N where it was not given, tell it to samplers, and let the method begin."""
        module, trainer = self.module, self.module.trainer
        self._refuse_averages(cast(Any, trainer).callbacks)
        if trainer.global_step == 0 and not bool(finite_members(module.state.parameters()).any()):
            raise ValueError(
                f"{type(module).__name__} starts from weights that are not finite: look at the "
                "network that it was given."
            )
        self._compare_fixed_weights()
        self._known_to_be_broken = set()
        self.last_source = trainer.train_dataloader
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        self._seed(groups)
        asking = [g for g in groups if g.get("num_data", 0) is None or "reads_num_data" in g]
        if self.given_num_data is None and (self._weighs_data or asking):
            self._read_num_data()
        elif self.given_num_data is None and module.method.completion == "curvature":
            with contextlib.suppress(ValueError):  # then the curvature is that of what is given
                self._read_num_data()
        before = {group["num_data"] for group in asking} - {None, module.num_data}
        if before:
            rank_zero_warn(
                f"The checkpoint is of a run on {before.pop()} training examples, and now there "
                f"are {module.num_data}: the target is another posterior."
            )
        for group in asking:  # also when it is resumed on other data
            group.update(num_data=module.num_data, reads_num_data=True)
        module.method.before_fit(module.state, self._fit(), module.run)
        trainer.strategy.barrier()

    def _seed(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give samplers other noise for other seeds, other members, and in another fit."""
        module, trainer = self.module, self.module.trainer
        module.seed = trainer.strategy.broadcast(module.seed)  # processes may have their own
        key = module.population.key
        for group in groups:
            if group.get("seed", 0) is None:
                group["seed"] = key_of(module.seed, "sampler", self._fits, *key)
            elif "seed" in group and key and "is_seeded" not in group:
                group["seed"] = key_of(group["seed"], "sampler", *key)
            group["is_seeded"] = True  # also for who goes on from its checkpoint
        self._fits += 1

    def _compare_fixed_weights(self) -> None:
        """See that all processes hold the same weights fixed, and say what they take."""
        module = self.module
        sample = sample_of_fixed(module.template)
        if len(sample):
            common = self.in_common({"fixed": sample})["fixed"]
            check_fixed(module.template, common, "The first process")
            rank_zero_info(f"{type(module).__name__}: {self.memory()}.")

    def memory(self) -> str:
        """Memory that weights take, in words."""
        module = self.module
        fixed = {id(t): t.nbytes for t in constants_of(module.template).values()}
        state_bytes = sum(t.nbytes for t in module.state.state_dict().values())
        trained = sum(p.nbytes for p in module.state.parameters() if p.requires_grad)
        parts = {
            "members take": state_bytes,
            "their gradients": trained,
            "an optimizer like Adam": 2 * trained,
            "weights that are held fixed": sum(fixed.values()),
        }
        return ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)

    def _refuse_averages(self, callbacks: list[Callback]) -> None:
        """Refuse callbacks that exchange the weights once the posterior is made of them."""
        kinds = WeightAveraging | StochasticWeightAveraging
        averages = [type(c).__name__ for c in callbacks if isinstance(c, kinds)]
        if averages and self.module.method.keeps_networks:
            raise ValueError(
                f"{averages[0]} exchanges the weights that {type(self.module).__name__} makes its "
                "posterior of: leave the callback out, or train a DeepEnsemble with it, and start "
                "from that checkpoint."
            )

    def _read_num_data(self) -> None:
        module, (loader, _) = self.module, only_loader(self.module.trainer.train_dataloader)
        count = data_size(loader, module.trainer.num_training_batches)
        module.run.num_data = count
        message = f"{type(module).__name__}: the training set has {count} examples"
        dropped = getattr(loader, "drop_last", False) and count % loader.batch_size
        rank_zero_info(f"{message}; every epoch drops {dropped}." if dropped else f"{message}.")

    def _fit(self) -> Fit:
        """Describe the fit that begins."""
        trainer = cast(Any, self.module.trainer)
        steps = trainer.estimated_stepping_batches
        return Fit(
            anew=trainer.ckpt_path is None and trainer.global_step == 0,
            steps=math.inf if steps in (None, -1) else steps,
            epochs=epochs_of(trainer),
            epoch_steps=_steps_of_epoch(trainer),
            optimizer=trainer.optimizers[0],
            schedulers=self._schedulers(),
            clips_gradients=bool(trainer.gradient_clip_val),
            rank=trainer.global_rank,
            processes=trainer.world_size,
            trial=bool(trainer.fast_dev_run),
            batches=lambda: self.training_data() or (),
        )

    def _schedulers(self) -> tuple[Any, ...]:
        return tuple(config.scheduler for config in self.module.trainer.lr_scheduler_configs)

    # ------------------------------------------------------------ steps and epochs
    def means(self, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means over the members. Broken ones break none, unless all are."""
        rows = torch.stack([values.detach() for values in terms.values()])
        finite = rows.isfinite()
        sums = torch.stack([rows.where(finite, 0).sum(1), finite.sum(1).to(rows.dtype)])
        return dict(zip(terms, sums[0] / sums[1], strict=True))

    def after_step(self, step: int) -> None:
        """The weights have moved: tell the method.

        Args:
            step: number of optimizer steps so far, this one included.
        """
        module, trainer = self.module, self.module.trainer
        progress = Progress(
            step, trainer.current_epoch, trainer.is_last_batch, trainer.optimizers[0],
            self._schedulers(),
        )  # fmt: skip
        if module.method.after_step(module.state, progress, module.run):
            self.look_for_divergence()
            trainer.strategy.barrier()  # others read what the first has written

    def judge_losses(self) -> None:
        """Leave out members that have diverged in this epoch."""
        module, divergence = self.module, self.module.divergence
        means = None if divergence is None else divergence.take()
        if divergence is None or means is None:
            return
        if module.trainer.world_size > 1:  # they have seen other examples
            every = module.all_gather(means.to(module.device))
            assert isinstance(every, Tensor)
            means = every.mean(0).cpu()
        finite = finite_members(module.state.parameters())
        divergence.judge(means, finite, ends(module.trainer))
        left_out = int(divergence.left_out.sum())
        if left_out:
            name = type(module).__name__
            rank_zero_info(f"{name}: {left_out} of {module.members} are left out.")

    def look_for_divergence(self) -> None:
        """Say which members have diverged, and end a run in which nobody is left."""
        module, trainer = self.module, self.module.trainer
        finite = finite_members(module.state.parameters()).tolist()
        bad = [m for m, well in enumerate(finite) if not well]
        if set(bad) - self._known_to_be_broken:
            self._known_to_be_broken |= set(bad)
            data = self.training_data() if trainer.world_size == 1 else None
            fault = "" if data is None else fault_of(data)
            reason = "the learning rate is too large, or the data are not finite or not scaled"
            rank_zero_warn(
                f"Members {bad} of {module.members} have weights that are not finite after step "
                f"{trainer.global_step}: {fault or reason}."
            )
        if len(bad) == module.members:
            trainer.should_stop = True

    # ------------------------------------------------------------ the end
    def complete(self) -> None:
        """Compute what the method makes of the trained weights. A failure does not lose them."""
        module, data = self.module, self.training_data()
        if module.state.is_complete or data is None:
            return
        try:
            module.method.at_end(module.state, data, module.run)
        except ValueError as error:
            rank_zero_warn(
                f"{type(module).__name__}: the members are trained, but there is no "
                f"{module.method.completion}: {error}"
            )

    def shows_progress(self) -> bool:
        """Check whether long computations show a bar."""
        trainer = _compat.trainer_of(self.module)
        return bool(trainer and trainer.is_global_zero and trainer.progress_bar_callback)


def _steps_of_epoch(trainer: Any) -> int | float:
    """Optimizer steps of an epoch, infinite for streams."""
    batches = trainer.num_training_batches
    return math.ceil(batches / trainer.accumulate_grad_batches) if batches < math.inf else batches


class EndsFit(Callback):
    """Modules are not told of exceptions, callbacks are."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let others write. The trainer may have gone on to a module of another kind."""
        method = getattr(pl_module, "method", None)
        if isinstance(method, Method) and trainer.state.fn == TrainerFn.FITTING:
            method.after_fit(pl_module.state, pl_module.run)


def _size(count: int) -> str:
    """Bytes in the largest unit of which there is one."""
    unit = min(3, max(0, len(str(count)) - 1) // 3)
    return f"{count / 1000**unit:.3g} {('bytes', 'kB', 'MB', 'GB')[unit]}"
