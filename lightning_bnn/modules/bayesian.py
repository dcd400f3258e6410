"""The LightningModule that trains, judges and predicts with whatever a method makes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, cast

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import _compat
from lightning_bnn._compat import sharding
from lightning_bnn.calibration import Calibrated
from lightning_bnn.harvest import ends
from lightning_bnn.likelihoods import Categorical, Likelihood
from lightning_bnn.methods import Batch, Method, Run
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.modules import batches, checkpoints
from lightning_bnn.modules.core import Core
from lightning_bnn.modules.fitting import EndsFit, Fitting
from lightning_bnn.modules.judging import Judging, Prediction, Predictive
from lightning_bnn.modules.members import Members, Numbers
from lightning_bnn.modules.optimization import clip_members, configured_optimizers
from lightning_bnn.modules.templates import (
    TemplateMode,
    constants_of,
    explaining_misfits,
    template_of,
)
from lightning_bnn.modules.training_data import TrainingData, batch_for
from lightning_bnn.posteriors import Posterior
from weightsym.params import check_count, check_integer

__all__ = ["Bayesian"]

_NOT_SAVED = ("network", "likelihood", "prior", "optimizer", "lr_scheduler", "start_from")


class Bayesian(Core):
    """Trains a posterior over the weights of any network, by any method.

    The parts of the method's state are parts of this module, under their own names, so that
    checkpoints, devices and optimizers treat them as usual. The given network is kept
    unregistered: its own weights are neither trained nor saved.

    Args:
        network: gives the computation; it is copied, not changed. Its weights are where the first
            member starts, those of further members are drawn anew. Weights that do not require
            gradients are those of all members, and remain those of this network.
        method: what is trained and how, one of `lightning_bnn.methods`.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        members: how many posteriors are trained side by side; one of several is a mixture of them.
            Where a population is trained in parts, the first member of this one and the one after
            its last: member k starts at the same weights in every part that has it.
        optimizer: makes the optimizer, given parameters.
        lr_scheduler: makes the scheduler, given the optimizer.
        lr_interval: when the scheduler steps, every ``"epoch"`` or every ``"step"``; by default as
            it is meant to, which for ``OneCycleLR``, ``CyclicLR`` and `CyclicalSchedule` is a step.
        start_from: a checkpoint with the weights where the first member starts; or a folder of
            checkpoints or of a bank, with the weights of all (the last ones that are there).
        num_data: number of training examples; by default read from the train loader.
        eval_samples: how many networks predict in validation, test and prediction; of an ensemble
            all do.
        seed: of the random numbers of this module; each depends on (seed, step, process) only. By
            default that of torch, which ``seed_everything`` sets.

    >>> from lightning_bnn import methods
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import Bayesian
    >>> module = Bayesian(mlp(2, [8], 3), methods.MFVI(prior_std=1.0), members=2)
    >>> probabilities = module(torch.randn(5, 2))  # the mean over `eval_samples` networks
    >>> probabilities.shape, torch.allclose(probabilities.sum(-1), torch.ones(5))
    (torch.Size([5, 3]), True)
    >>> len(module.posterior().modes())
    2
    """

    configure_optimizers = configured_optimizers

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
        _check(method, likelihood, optimizer)
        if lr_interval is not None:
            check_choice("lr_interval", lr_interval, ("epoch", "step"))
        check_count("eval_samples", eval_samples)
        check_count("num_data", num_data, optional=True)
        check_integer("seed", seed, optional=True)
        ignored = () if _compat.made_by_cli() else _NOT_SAVED
        self.save_hyperparameters(ignore=("method", *ignored), frame=inspect.currentframe())
        self.__dict__["template"] = template_of(method.prepare(network))
        self.template_mode = TemplateMode(self.template, network)
        self.likelihood = Categorical() if likelihood is None else cast(Likelihood, likelihood)
        self.prior, self.method = method.prior, method
        self.given_seed, self.seed = seed, torch.initial_seed() if seed is None else seed
        self.eval_samples, self.start_from = eval_samples, start_from
        self.make_optimizer, self.make_scheduler = optimizer, lr_scheduler
        self.lr_interval, self.automatic_optimization = lr_interval, not method.takes_all_data
        self.has_weights = start_from is not None or not method.trains
        self.known_example: tuple[Any, ...] = ()
        self.unused_names = set()
        self.population = Members(members, self.seed)
        self.fitting = Fitting(self, num_data)
        self.judging = Judging(self, self.fitting)
        self.run = Run(
            self.template, self.likelihood, num_data, None, rank_zero_info, rank_zero_warn,
            self.fitting.shows_progress, self.fitting.in_common, self.fitting.example,
        )  # fmt: skip
        starts = self.population.starts(self.template, start_from) if method.trains else {}
        checkpoints.check_start(self, start_from)
        with self.randomness("blitz", *self.population.key):
            self.adopt(method.init(self.template, starts))
        self.__dict__["_arguments"] = _names_of_method(self)

    def __repr__(self) -> str:
        weights = sum(p.numel() for p in self.template.parameters())
        fixed = sum(
            t.numel() for t in {id(t): t for t in constants_of(self.template).values()}.values()
        )
        parts = [
            f"{self.members} member{'s' if self.members > 1 else ''}",
            f"{type(self.template).__name__} of {weights} weights",
            *([f"{fixed} more held fixed"] if fixed else []),
            str(self.likelihood),
            "no prior" if self.prior is None else f"prior {self.prior}",
            *([] if self.num_data is None else [f"{self.num_data} training examples"]),
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def use_training_data(self, source: Any) -> None:
        """Name the training data, where no trainer knows them.

        Args:
            source: a datamodule, or a loader of batches as the network takes them.
        """
        self.fitting.last_source = source

    def fit_to(self, source: Any) -> None:
        """Compute what the posterior takes besides trained weights, such as a curvature.

        Args:
            source: the training data: a datamodule, or a loader of batches as the network takes
                them.
        """
        self.method.at_end(self.state, TrainingData(self, source), self.run)

    def memory(self) -> str:
        """Memory that weights take, in words, known before anything is allocated.

        >>> from lightning_bnn.modules import MFVI
        >>> with torch.device("meta"):
        ...     large = nn.Linear(30_000, 10_000)
        >>> MFVI(large).memory()
        'members take 2.4 GB, their gradients 2.4 GB, an optimizer like Adam 4.8 GB'
        """
        return self.fitting.memory()

    # ------------------------------------------------------------ training
    def setup(self, stage: str) -> None:
        if cut := sharding(self.trainer):
            raise ValueError(
                f"{type(self).__name__} is not supported under {cut}: the network's weights are in "
                "pieces; take `strategy='ddp'`."
            )

    def configure_callbacks(self) -> list[Callback]:
        trainer: Any = self.trainer  # is asked again for every run
        present = any(isinstance(callback, EndsFit) for callback in trainer.callbacks)
        needed = type(self.method).after_fit is not Method.after_fit
        return [EndsFit()] if needed and not present else []

    def on_train_start(self) -> None:
        self.has_weights = True
        self.fitting.begin()
        if self.fitting.stands_before_epoch_end:
            self.fitting.stands_before_epoch_end = False
            _compat.end_restored_epoch(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """One step for all members."""
        number = self.trainer.fit_loop.total_batch_idx
        examples = batch_for(self, batch, number)
        self.known_example = self.known_example or examples.example()
        if self.method.takes_all_data:
            self._transition()
            return None
        with self.randomness("train", number, *self.population.key):
            terms = self.losses(examples.inputs, examples.targets, examples.per_member, number)
        for name, mean in self.fitting.means(terms).items():
            _compat.log(self, f"train/{name}", mean, prog_bar=name == "loss")
        if self.divergence is not None:
            self.divergence.add(terms.get("nll", terms["loss"]))
        return terms["loss"].sum()

    def losses(
        self, inputs: tuple[Any, ...], targets: Tensor, per_member: bool = False, number: int = 0
    ) -> dict[str, Tensor]:
        """Terms of the objective per member. The sum of ``loss`` is what is minimised.

        Args:
            inputs: of the network.
            targets: of the examples.
            per_member: whether the leading dimension of both counts members.
            number: how many batches of the run came before.
        """
        self.template_mode.follow(self.training)
        with explaining_misfits(self.template, inputs):
            batch = Batch(inputs, targets, per_member, number)
            return self.method.losses(self.state, batch, self.run)

    def _transition(self) -> None:
        """A step of a method that takes all the data."""
        sampler: Any = self.optimizers()
        before = self.trainer.global_step
        with explaining_misfits(self.template, self.known_example):
            terms = self.method.transition(self.state, self.run, sampler.step)
        for name, value in {**terms, **sampler.optimizer.metrics()}.items():
            mean = value.mean().float() if isinstance(value, Tensor) else value
            _compat.log(self, f"train/{name}", mean, prog_bar=name == "acceptance")
        self.fitting.after_step(before + 1)

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
        """Clip every member as if it were alone, and what they share by itself."""
        clips = gradient_clip_val is not None and gradient_clip_val > 0
        by_value = gradient_clip_algorithm == "value"  # number by number, whosever they are
        if clips:
            self.method.before_clipping(self.state)
        if not clips or by_value or self.members == 1:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        assert gradient_clip_val is not None
        shared = [p for p in self.shared_parameters() if p.grad is not None]
        clip_members(self.state.parameters(), float(gradient_clip_val))
        nn.utils.clip_grad_norm_(shared, float(gradient_clip_val))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        step = self.trainer.global_step + 1
        super().optimizer_step(*args, **kwargs)
        self.fitting.after_step(step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer: Any = self.trainer
        metrics = getattr(trainer.optimizers[0], "metrics", None)
        every = trainer.log_every_n_steps  # none is 0
        due = every and trainer.global_step % every == 0
        if self.automatic_optimization and self.method.is_sampler and metrics and due:
            for name, value in metrics().items():
                self.log(f"train/{name}", value)

    def on_train_epoch_end(self) -> None:
        self.fitting.judge_losses()
        self.fitting.look_for_divergence()
        if ends(self.trainer):  # before the checkpoint is made
            self.fitting.complete()

    def on_train_end(self) -> None:
        if self.divergence is not None:
            self.divergence.finish()
        self.fitting.complete()
        self.method.after_fit(self.state, self.run)

    # ------------------------------------------------------------ the posterior
    def judged_modes(self, samples: int) -> list[Posterior]:
        """For each of ``posterior().modes()``, one that predicts as it does.

        Args:
            samples: how many networks of each will predict.
        """
        return self.judging.modes(samples)

    def outputs(self, inputs: Sequence[Any], *batch: int) -> Tensor:
        """Outputs of all networks that predict, in evaluation mode, ``(samples, batch, ...)``.

        Args:
            inputs: of the network.
            *batch: which batch this is; random numbers of the predictions depend on it.
        """
        return self.judging.outputs(inputs, *batch)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Mean prediction of the posterior, outside of a trainer too. In evaluation mode always.

        There are gradients with respect to inputs that require them, none with respect to weights.

        Args:
            *inputs: of the network.
            **named: inputs by the names of the network's ``forward``.
        """
        by_position = batches.positional(self.template, inputs, named)
        wanted = any(isinstance(x, Tensor) and x.requires_grad for x in by_position)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return self.likelihood.predictive(self.outputs(by_position))

    def predictive(self, samples: int | None = None) -> Predictive:
        """The mean prediction as a plain module that `torch.export` and ONNX understand.

        Args:
            samples: how many networks it holds, by default as many as predict otherwise; an
                ensemble has no more than its members.
        """
        with torch.no_grad():
            return Predictive(self.template, self.judging.export(samples), self.likelihood)

    def calibrate(
        self,
        datamodule: Any,
        method: str | None = None,
        alpha: int | float = 0.1,
        score: str | None = None,
        by_class: bool = False,
        held_out: int | float = 0.5,
    ) -> Calibrated:
        """Calibrated predictions, and sets or intervals that hold the truth as often as they say.

        Args:
            datamodule: whose validation data are predicted.
            method: of classes ``"temperature"`` (the default) or ``"vector"``; of numbers
                ``"spread"`` or ``"moments"``.
            alpha: how often a set or an interval may miss the truth.
            score: of sets ``"thr"``, ``"aps"``, ``"raps"``; of intervals ``"split"``, ``"cqr"``.
            by_class: whether sets are as good for every class.
            held_out: the part of these data that makes sets and numbers, apart from the fit.
        """
        options = {"alpha": alpha, "score": score, "by_class": by_class, "held_out": held_out}
        return self.judging.calibrate(datamodule, method, **options)

    # ------------------------------------------------------------ validation, test, prediction
    def on_validation_epoch_start(self) -> None:
        self.judging.begin_stage()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Judge one batch. In a test every loader has a set of its own."""
        self.judging.add(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        """Mean prediction and the outputs of every network."""
        samples = self.outputs(self.inputs_only(batch), dataloader_idx, batch_idx)
        return Prediction(self.likelihood.predictive(samples), samples)

    def on_validation_epoch_end(self) -> None:
        self.judging.end_stage()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # ------------------------------------------------------------ checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fits_now and not self.state.is_complete and ends(self.trainer):
            self.fitting.complete()  # a callback may have ended the run since
            checkpoint["state_dict"].update(self.state.state_dict())
        checkpoint[checkpoints.NOTES] = checkpoints.notes_of(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoints.check(self, checkpoint)
        self.fitting.stands_before_epoch_end = _compat.cuts_epoch(checkpoint)
        if self.fitting.stands_before_epoch_end:
            _compat.complete_last_batch(checkpoint)
        checkpoints.recall(self, checkpoint.get(checkpoints.NOTES, {}))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        checkpoints.check_weights(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    @_compat.only_of_classes
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoints.check_arguments(cls, kwargs)
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except Exception as error:
            checkpoints.explain(error, cls, checkpoint_path)
            raise


def _names_of_method(module: Bayesian) -> set[str]:
    """Arguments of the method that the module itself has not."""
    parts = [module.method, *filter(is_dataclass, vars(module.method).values())]
    names = {name for part in parts for name in vars(part)}
    taken = {*vars(module), *module._modules}
    return {name for name in names if name not in taken and not hasattr(type(module), name)}


def _check(method: Any, likelihood: Any, optimizer: Any) -> None:
    """Refuse what is not of the kind that an argument asks for."""
    if not isinstance(method, Method):
        raise ValueError(
            f"`method` must be one of lightning_bnn.methods, such as MFVI(), got {method!r}."
        )
    if likelihood is not None and not isinstance(likelihood, nn.Module):
        raise ValueError(
            "`likelihood` must be a module such as Categorical() or Gaussian(), got "
            f"{likelihood!r}."
        )
    if not callable(optimizer):
        raise ValueError(
            "`optimizer` must make an optimizer from parameters, such as "
            f"`lambda p: torch.optim.Adam(p, 1e-3)`, got a {type(optimizer).__name__}."
        )
