"""The LightningModule that trains, evaluates and predicts with any method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import _compat
from lightning_bnn._compat import sharding
from lightning_bnn.calibration import Calibrated
from lightning_bnn.harvest import ends
from lightning_bnn.likelihoods import Categorical, Likelihood
from lightning_bnn.methods import Batch, Method, Run, Transitions
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.modules import batches, checkpoints, fitting, prediction
from lightning_bnn.modules.members import (
    Members,
    Numbers,
    constants_of,
    explaining_misfits,
    network_of,
)
from lightning_bnn.modules.prediction import Prediction, PredictionStage, Predictive
from lightning_bnn.modules.training_data import Data, TrainingData, batch_for, example_of
from lightning_bnn.posteriors import Posterior
from weightsym.params import Params, check_count, check_integer, keyed_randomness

__all__ = ["Bayesian"]

_NOT_SAVED = (
    "network", "likelihood", "prior", "optimizer", "lr_scheduler", "start_from", "teacher",
)  # fmt: skip


class Bayesian(L.LightningModule):
    """A module that trains a posterior over the weights of any network, by any method.

    The trained part is ``module.state``, which the method creates. It is a submodule, so that
    checkpoints, devices and optimizers treat it as usual. The given network is not registered: its
    own weights are neither trained nor saved.

    Args:
        network: gives the computation; it is copied, not changed. The first member starts at its
            weights, and those of further members are drawn. Weights that do not require gradients
            are shared by all members, and remain those of this network.
        method: the trained quantity and its training, one of `lightning_bnn.methods`.
        likelihood: of targets, given outputs; by default ``Categorical``.
        members: number of posteriors trained side by side, whose mixture is the posterior. For a
            population trained in parts: the first member of this part and the one after its last.
            Member k starts at the same weights in every part.
        optimizer: function that makes the optimizer, given parameters.
        lr_scheduler: function that makes the scheduler, given the optimizer.
        lr_interval: interval of the scheduler, ``"epoch"`` or ``"step"``; by default the one it is
            meant for, which for ``OneCycleLR``, ``CyclicLR`` and `CyclicalSchedule` is a step.
        start_from: a checkpoint with the initial weights of the first member; or a folder of
            checkpoints or of a bank, with those of all members (the last ones).
        num_data: number of training examples; by default read from the train loader.
        eval_samples: number of networks that predict in validation, test and prediction; an
            ensemble always uses all.
        seed: seed of the random numbers of this module, each of which depends on (seed, step,
            process) only. The default is that of torch, set by ``seed_everything``.

    >>> from lightning_bnn import methods
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import Bayesian
    >>> module = Bayesian(mlp(2, [8], 3), methods.MFVI(prior_std=1.0), members=2)
    >>> probabilities = module(torch.randn(5, 2))  # the mean over `eval_samples` networks
    >>> probabilities.shape, torch.allclose(probabilities.sum(-1), torch.ones(5))
    (torch.Size([5, 3]), True)
    """

    configure_optimizers = fitting.configured_optimizers
    template: nn.Module
    method: Any

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        likelihood: nn.Module | None = None,
        members: Numbers = 1,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] | None = None,
        start_from: str | None = None,
        num_data: int | None = None,
        eval_samples: int = 20,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        fitting.check_parts(method, likelihood, optimizer)
        if lr_interval is not None:
            check_choice("lr_interval", lr_interval, ("epoch", "step"))
        check_count("eval_samples", eval_samples)
        check_count("num_data", num_data, optional=True)
        check_integer("seed", seed, optional=True)
        ignored = () if _compat.made_by_cli() else _NOT_SAVED
        self.save_hyperparameters(ignore=("method", *ignored), frame=inspect.currentframe())
        self.given_seed, self.seed = seed, torch.initial_seed() if seed is None else seed
        self.population = Members(method.prepare(network), members, self.seed)
        self.__dict__["template"] = self.population.template
        self.likelihood = Categorical() if likelihood is None else cast(Likelihood, likelihood)
        self.prior, self.method = method.prior, method
        self.eval_samples, self.start_from = eval_samples, start_from
        self.make_optimizer, self.make_scheduler = optimizer, lr_scheduler
        self.lr_interval = lr_interval
        self.automatic_optimization = not isinstance(method, Transitions)
        self.has_weights = start_from is not None or not method.trains
        self.data, self.stage = Data(num_data), PredictionStage()
        self.fits, self.broken = 0, set[int]()
        self.stands_before_epoch_end = False
        self.run = Run(
            self.template, self.likelihood, num_data, None, rank_zero_info, rank_zero_warn
        )
        starts = self.population.starts(start_from) if method.trains else {}
        if start_from is not None:
            checkpoints.check_start(self, start_from)
        with self.randomness("blitz", *self.population.key):
            self.state: Any = method.init(self.template, starts)
        self.__dict__["_arguments"] = _names_of_method(self)

    def __repr__(self) -> str:
        fixed = {id(t): t.numel() for t in constants_of(self.template).values()}
        weights = f"{sum(p.numel() for p in self.template.parameters())} weights"
        parts = [
            f"{self.members} member{'s' if self.members > 1 else ''}",
            f"{type(self.template).__name__} of {weights}",
            *([f"{sum(fixed.values())} more held fixed"] if fixed else []),
            str(self.likelihood),
            "no prior" if self.prior is None else f"prior {self.prior}",
            *([] if self.num_data is None else [f"{self.num_data} training examples"]),
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def use_training_data(self, source: Any) -> None:
        """Set the training data, for use without a trainer.

        Args:
            source: a datamodule, or a loader of batches as the network takes them.
        """
        self.data.source = source

    def fit_to(self, source: Any) -> None:
        """Compute the parts of the posterior besides trained weights, such as a curvature.

        Args:
            source: the training data: a datamodule, or a loader of batches as the network takes
                them.
        """
        self.method.at_end(self.state, TrainingData(self, source), self.run)

    def memory(self) -> str:
        """Describe the memory for weights in words, before any is allocated.

        >>> from lightning_bnn.modules import MFVI
        >>> with torch.device("meta"):
        ...     large = nn.Linear(30_000, 10_000)
        >>> MFVI(large).memory()
        'members take 2.4 GB, their gradients 2.4 GB, an optimizer like Adam 4.8 GB'
        """
        return fitting.memory_of(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the template, too, which may hold tensors that are in no state dict."""
        self.template._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set an argument of the method, which would have no effect."""
        if name in self.__dict__.get("_arguments", ()):
            raise AttributeError(
                f"`{name}` is an argument of the method: set `module.method.{name}`."
            )
        if name == "_current_fx_name":  # which Lightning sets forty times in a step
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def randomness(self, *key: int | str) -> AbstractContextManager[None]:
        """Use random numbers of this module and process in a context, by a key."""
        return keyed_randomness(self.seed, *key, self.global_rank, device=self.device)

    # ------------------------------------------------------------ batches
    def inputs_and_targets(self, batch: Any) -> tuple[tuple[Any, ...], Tensor]:
        """Return inputs and targets of a batch. Override it for another layout of batches."""
        self.data.warn_of_unused(batch, self.template)
        return batches.inputs_and_targets(batch, self.template)

    def inputs_only(self, batch: Any) -> tuple[Any, ...]:
        """Return the inputs of a batch that may have no targets: all but the last of a tuple."""
        overridden = type(self).inputs_and_targets is not Bayesian.inputs_and_targets
        if overridden and not isinstance(batch, Tensor):
            return self.inputs_and_targets(batch)[0]
        self.data.warn_of_unused(batch, self.template)
        return batches.inputs_only(batch, self.template)

    def cast(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Convert floating inputs to the precision of the weights."""
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        return tuple(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    @property
    def example_input_array(self) -> Any:
        """An example of the inputs, set by the user."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None:
        self._example_input_array = example
        self.run.rows = example if isinstance(example, tuple) else (example,)

    def example(self) -> tuple[Any, ...]:
        """Return two rows of input, from an earlier batch or from the train loader's data set."""
        self.run.rows = self.run.rows or example_of(self)
        return self.run.example()

    # ------------------------------------------------------------ members
    @property
    def num_data(self) -> int | None:
        """Number of training examples, once it is known."""
        return self.run.num_data

    @num_data.setter
    def num_data(self, value: int | None) -> None:
        self.run.num_data = value

    @property
    def members(self) -> int:
        """Number of members trained by this module."""
        return self.population.count

    def member_stack(self) -> Params:
        """Return one network per member: its trained weights, or the centre of its mode."""
        return self.state.stack()

    def weights(self) -> tuple[nn.Module, Params, tuple[Any, ...]]:
        """Return template, stack of members and example of the inputs, for callbacks."""
        return self.template, self.member_stack(), self.example()

    def member(self, index: int) -> nn.Module:
        """Return a plain module with the weights of one member."""
        if not 0 <= index < self.members:
            raise ValueError(f"`index` must be between 0 and {self.members - 1}, got {index}.")
        result = network_of(self.template)
        result.load_state_dict({n: t[index] for n, t in self.member_stack().items()}, strict=False)
        return result.train(self.training)

    def shared_parameters(self) -> list[Tensor]:
        """Parameters that belong to all members, such as those of the likelihood."""
        return [p for name, p in self.named_parameters() if not name.startswith("state.")]

    # ------------------------------------------------------------ training
    def setup(self, stage: str) -> None:
        if cut := sharding(self.trainer):
            raise ValueError(
                f"{type(self).__name__} is not supported under {cut}, which splits the network's "
                "weights: use `strategy='ddp'`."
            )

    def configure_callbacks(self) -> list[Callback]:
        trainer: Any = self.trainer  # is asked again for every run
        present = any(isinstance(callback, fitting.EndsFit) for callback in trainer.callbacks)
        needed = type(self.method).after_fit is not Method.after_fit
        return [fitting.EndsFit()] if needed and not present else []

    def on_train_start(self) -> None:
        self.has_weights = True
        fitting.begin(self)
        if self.stands_before_epoch_end:
            self.stands_before_epoch_end = False
            _compat.end_restored_epoch(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Take one step for all members."""
        number = self.trainer.fit_loop.total_batch_idx
        examples = batch_for(self, batch, number)
        self.run.rows = self.run.rows or examples.example()
        if number == 0:
            fitting.warn_of_copies(self.likelihood, examples.inputs, examples.targets)
        if not self.automatic_optimization:
            fitting.transition(self)
            return None
        with self.randomness("train", number, *self.population.key):
            terms = self.losses(examples.inputs, examples.targets, examples.per_member, number)
        for name, mean in fitting.means_of(terms).items():
            _compat.log(self, f"train/{name}", mean, prog_bar=name == "loss")
        if self.state.divergence is not None:
            self.state.divergence.add(terms.get("nll", terms["loss"]))
        return terms["loss"].sum()

    def losses(
        self, inputs: tuple[Any, ...], targets: Tensor, per_member: bool = False, number: int = 0
    ) -> dict[str, Tensor]:
        """Return terms of the objective per member; the sum of ``loss`` is minimised.

        Args:
            inputs: of the network.
            targets: of the examples.
            per_member: whether the leading dimension of both counts members.
            number: index of the batch in the run.
        """
        self.population.follow(self.training)
        with explaining_misfits(self.template, inputs):
            batch = Batch(inputs, targets, per_member, number)
            return self.method.losses(self.state, batch, self.run)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for p in self.shared_parameters():  # they learn from the mean of the members, not the sum
            if p.grad is not None and self.members > 1:
                p.grad /= self.members

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of every member, and those of shared parameters, separately."""
        fitting.clip(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        step = self.trainer.global_step + 1
        super().optimizer_step(*args, **kwargs)
        if fitting.after_step(self, step, self.trainer.is_last_batch):
            fitting.look_for_divergence(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        fitting.log_sampler(self)

    def on_train_epoch_end(self) -> None:
        fitting.judge_losses(self)
        fitting.look_for_divergence(self)
        if ends(self.trainer):  # before the checkpoint is made
            fitting.complete(self)

    def on_train_end(self) -> None:
        if self.state.divergence is not None:
            self.state.divergence.finish()
        fitting.complete(self)
        self.method.after_fit(self.state, self.run)

    # ------------------------------------------------------------ the posterior
    def posterior(self) -> Posterior:
        """Return the current posterior, which does not change with further training."""
        return prediction.current_posterior(self)

    @property
    def has_own_posterior(self) -> bool:
        """True if a subclass overrides the posterior of the method."""
        return type(self).posterior is not Bayesian.posterior

    @property
    def fits_now(self) -> bool:
        """True if a trainer is about to change the weights."""
        trainer = _compat.trainer_of(self)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return False
        return trainer.state.status == TrainerStatus.RUNNING

    def judged_modes(self, samples: int) -> list[Posterior]:
        """Return one predictor for each of ``posterior().modes()``.

        Args:
            samples: number of networks of each that will predict.
        """
        return prediction.modes_of(self, samples)

    def outputs(self, inputs: Tensor | Sequence[Any], *batch: int) -> Tensor:
        """Return the outputs of networks in evaluation mode, ``(samples, batch, ...)``.

        Args:
            inputs: of the network, or its only input.
            *batch: index of the batch, which seeds the predictions.
        """
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        predict, inputs = prediction.predictor_of(self), self.cast(inputs)
        with (
            self.population.evaluation(self.training),
            self.randomness("predict", *batch),
            explaining_misfits(self.template, inputs),
        ):
            return self.run.one_tensor(predict(self.template, *inputs))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the mean prediction of the posterior, always in evaluation mode.

        Works without a trainer, too. There are gradients with respect to inputs that require them,
        but not with respect to weights.

        Args:
            *inputs: of the network.
            **named: inputs by the names of the network's ``forward``.
        """
        by_position = batches.positional(self.template, inputs, named)
        wanted = any(isinstance(x, Tensor) and x.requires_grad for x in by_position)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return self.likelihood.predictive(self.outputs(by_position))

    def begin_predicting(self) -> None:
        """Draw the networks that predict, for all calls until `end_predicting`."""
        prediction.begin(self)

    def end_predicting(self) -> None:
        """Release the networks that predict."""
        self.stage = PredictionStage()

    def predictive(self, samples: int | None = None) -> Predictive:
        """Return the mean prediction as a plain module for `torch.export` and ONNX.

        Args:
            samples: number of networks in it, by default as many as predict otherwise; an ensemble
                has at most its members.
        """
        with torch.no_grad():
            return Predictive(self.template, prediction.exported(self, samples), self.likelihood)

    def calibrate(
        self,
        data: Any,
        method: str | None = None,
        alpha: int | float = 0.1,
        score: str | None = None,
        by_class: bool = False,
        held_out: int | float = 0.5,
    ) -> Calibrated:
        """Calibrate the predictions, and make sets or intervals with a guaranteed coverage.

        Args:
            data: a datamodule, whose validation data are predicted; a loader, or a tuple of
                tensors ``(inputs, targets)``, of examples that were not trained on.
            method: for classes ``"temperature"`` (the default) or ``"vector"``; for numbers
                ``"spread"`` or ``"moments"``.
            alpha: rate at which a set or an interval may miss the truth.
            score: for sets ``"thr"``, ``"aps"`` or ``"raps"``; for intervals ``"split"`` or
                ``"cqr"``.
            by_class: whether the coverage holds for every class.
            held_out: fraction of these data for sets and numbers, not used in the fit.
        """
        options = {"alpha": alpha, "score": score, "by_class": by_class, "held_out": held_out}
        return prediction.calibrate(self, data, method, **options)

    # ------------------------------------------------------------ validation, test, prediction
    def on_validation_epoch_start(self) -> None:
        prediction.begin_stage(self)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate one batch. In a test every loader is a separate set."""
        prediction.add(self, batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        """Return the mean prediction and the outputs of every network."""
        samples = self.outputs(self.inputs_only(batch), dataloader_idx, batch_idx)
        return Prediction(self.likelihood.predictive(samples), samples)

    def on_validation_epoch_end(self) -> None:
        prediction.end_stage(self)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # ------------------------------------------------------------ checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fits_now and self.state.lacks and ends(self.trainer):
            fitting.complete(self)  # a callback may have ended the run since
            checkpoint["state_dict"].update(self.state.state_dict(prefix="state."))
        checkpoint[checkpoints.NOTES] = checkpoints.notes_of(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoints.check(self, checkpoint)
        self.stands_before_epoch_end = _compat.cuts_epoch(checkpoint)
        if self.stands_before_epoch_end:
            _compat.complete_last_batch(checkpoint)
        checkpoints.recall(self, checkpoint.get(checkpoints.NOTES, {}))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        checkpoints.check_weights(self, state_dict, strict)
        missing = super().load_state_dict(state_dict, strict, assign)
        self.has_weights = True
        return missing

    @_compat.only_of_classes
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoints.check_arguments(cls, kwargs)
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except Exception as error:
            checkpoints.explain(error, cls, checkpoint_path)
            raise


def _names_of_method(module: Bayesian) -> set[str]:
    """List the arguments of the method that the module itself does not have."""
    parts = [module.method, *filter(is_dataclass, vars(module.method).values())]
    names = {name for owner in parts for name in vars(owner)}
    taken = {*vars(module), *module._modules}
    return {name for name in names if name not in taken and not hasattr(type(module), name)}


class OfMethod(Bayesian):
    """A module that builds its method from its own arguments, see `lightning_class`."""

    if TYPE_CHECKING:

        def __init__(self, network: nn.Module, *args: Any, **kwargs: Any) -> None: ...
