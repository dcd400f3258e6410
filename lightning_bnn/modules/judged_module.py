"""Validation, test and prediction of any posterior, by the networks that it draws."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn

from lightning_bnn import _compat
from lightning_bnn.arguments import count, integer
from lightning_bnn.judging import Judge, judge_of, named_sets
from lightning_bnn.likelihoods import Categorical, Likelihood
from lightning_bnn.modules.batches import positional
from lightning_bnn.modules.predictive import Predictive
from lightning_bnn.modules.template_module import TemplateModule
from lightning_bnn.modules.templates import template_of
from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from lightning_bnn.randomness import keyed_generator

__all__ = ["JudgedModule", "Prediction"]


class Prediction(NamedTuple):
    """What `predict_step` returns.

    ``mean`` averages over networks: probabilities ``(batch, classes)``, or the moments of a
    Gaussian likelihood. ``samples`` are the outputs of each, ``(samples, batch, ...)``.
    """

    mean: Any
    samples: Tensor


class JudgedModule(TemplateModule):
    """Predicts with networks of a posterior; every stage draws them once.

    Args:
        network: gives the computation; it is copied, not changed.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        eval_samples: how many networks predict in validation, test and prediction.
        chunk_size: networks that run at once, by default chosen by their size.
        seed: of the random numbers of this module; each depends on (seed, step, process) only.
    """

    judge: Judge | None

    def __init__(
        self,
        network: nn.Module,
        likelihood: nn.Module | None = None,
        eval_samples: int = 20,
        chunk_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        count("eval_samples", eval_samples)
        if chunk_size is not None:
            count("chunk_size", chunk_size)
        integer("seed", seed)
        if likelihood is not None and not isinstance(likelihood, nn.Module):
            raise ValueError(
                "`likelihood` must be a module such as Categorical() or Gaussian(), got "
                f"{likelihood!r}."
            )
        self.__dict__["template"] = template_of(network)
        frozen = [m for m in self.template.modules() if network.training and not m.training]
        self.__dict__["_frozen_modules"] = frozen
        self.likelihood = Categorical() if likelihood is None else cast(Likelihood, likelihood)
        self.eval_samples, self.chunk_size, self.seed = eval_samples, chunk_size, seed
        self.judge = None
        self._example = ()
        self._left_over, self._outputs_seen = set(), False
        self._predict: Predictor | None = None
        self._train_data: Any = None

    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior as it is now, apart from what trains."""

    def judged_posterior(self) -> Posterior:
        """One that predicts as the posterior does."""
        return self.posterior()

    def judged_modes(self, samples: int) -> list[Posterior]:
        """For each of ``posterior().modes()``, one that predicts as it does.

        Args:
            samples: how many networks of each will predict.
        """
        return self.judged_posterior().modes()

    @property
    def judged_samples(self) -> int:
        """How many networks predict."""
        return self.eval_samples

    # -------------------------------------------------------- data
    def use_training_data(self, source: Any) -> None:
        """Name the training data, where no trainer knows them.

        Args:
            source: a datamodule, or a loader of batches as the network takes them.
        """
        self._train_data = source

    @property
    def fits_now(self) -> bool:
        """Whether a trainer is about to change the weights."""
        state = None if self._trainer is None else self.trainer.state
        if state is None or state.fn != TrainerFn.FITTING:
            return False
        return state.status == TrainerStatus.RUNNING

    # -------------------------------------------------------- evaluation
    def _start(self, judge: Judge | None) -> None:
        """Draw the networks that predict, once for all batches."""
        self.judge = None
        self._predict = self._predictor()
        self.judge = None if judge is None else judge.to(self.device)

    def _predictor(self) -> Predictor:
        generator = keyed_generator(self.seed, "judged", device=self.device)
        with torch.no_grad():
            return self.judged_posterior().predictor(
                self.judged_samples, generator, self.chunk_size
            )

    def outputs(self, inputs: Sequence[Any], *batch: int) -> Tensor:
        """Outputs of all networks that predict, in evaluation mode, ``(samples, batch, ...)``.

        Args:
            inputs: of the network.
            *batch: which batch this is; random numbers of the predictions depend on it.
        """
        run = self._predict or self._predictor()
        inputs = self._cast(inputs)
        with self._predicting(), self._randomness("predict", *batch):
            found = self._checked(lambda: run(self.template, *inputs), inputs)
        return self._of_everyone(self._one_tensor(found))

    def _of_everyone(self, outputs: Tensor) -> Tensor:
        """With those of other processes, if they have other networks."""
        return outputs

    def on_validation_epoch_start(self) -> None:
        """Draw networks."""
        self._start(judge_of(self.likelihood))

    def on_test_epoch_start(self) -> None:
        """Draw networks, and ask what the loaders hold."""
        trainer: Any = self.trainer
        source = trainer.datamodule if _compat.tests_datamodule(trainer) else None
        sets = named_sets(source, trainer.test_dataloaders)
        self._start(judge_of(self.likelihood, sets))

    def on_predict_epoch_start(self) -> None:
        """Draw networks."""
        self._start(None)

    def on_predict_epoch_end(self) -> None:
        """Let go of them."""
        self._predict = None

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Judge one batch; further validation loaders are added to the first."""
        self._judge_batch(batch, 0, dataloader_idx, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Judge one batch of the set that its loader holds."""
        self._judge_batch(batch, dataloader_idx, dataloader_idx, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        """Mean prediction and the outputs of every network."""
        samples = self.outputs(self.inputs_only(batch), dataloader_idx, batch_idx)
        return Prediction(self.likelihood.predictive(samples), samples)

    def _judge_batch(self, batch: Any, index: int, *which: int) -> None:
        if self.judge is None:  # there is no network to judge
            return
        if self.judge.needs_targets(index):
            inputs, targets = self.inputs_and_targets(batch)
            self.judge.add(self.outputs(inputs, *which), targets, index)
        else:
            self.judge.add(self.outputs(self.inputs_only(batch), *which), None, index)

    def on_validation_epoch_end(self) -> None:
        """Log every number under ``val/``."""
        self._log_values("val", ("acc", "nll", "rmse"))

    def on_test_epoch_end(self) -> None:
        """Log every number under ``test/``."""
        self._log_values("test", ())

    def _log_values(self, stage: str, shown: Sequence[str]) -> None:
        if self.judge is None:
            self.log(f"{stage}/nll", math.nan, prog_bar="nll" in shown, sync_dist=True)
            return
        for name, value in self.judge.values().items():
            # Metrics are the same on all processes already; the sync only keeps Lightning quiet.
            self.log(f"{stage}/{name}", value.float(), prog_bar=name in shown, sync_dist=True)
        self.judge, self._predict = None, None

    # -------------------------------------------------------- plain use
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Mean prediction of the posterior, outside of a trainer too; in evaluation mode always.

        There are gradients with respect to inputs that require them, none with respect to weights.

        Args:
            *inputs: of the network.
            **named: inputs by the names of the network's ``forward``.
        """
        inputs = positional(self.template, inputs, named)
        wanted = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return self.likelihood.predictive(self.outputs(inputs))

    def predictive(self, samples: int | None = None) -> Predictive:
        """The mean prediction as a plain module that `torch.export` and ONNX understand.

        Args:
            samples: how many networks it holds, by default as many as predict otherwise; an
                ensemble has no more than its members.
        """
        count = self.judged_samples if samples is None else samples
        with torch.no_grad():
            posterior = self.judged_posterior()
            count = min(count, posterior.size) if isinstance(posterior, Empirical) else count
            networks = posterior.sample(count, keyed_generator(self.seed, "judged"))
        return Predictive(self.template, networks, self.likelihood)

    def __getstate__(self) -> dict[str, Any]:
        """Without networks that were drawn for predictions, and without data."""
        return {**self.__dict__, "_predict": None, "_train_data": None}
