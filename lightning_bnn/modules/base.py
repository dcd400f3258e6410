"""What all LightningModules of this package share: members, predictions, one way to be judged."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import _compat
from lightning_bnn import params as P
from lightning_bnn.bank import find_prefix, read_state, strip_prefix
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.modules.batches import inputs_and_targets, inputs_only
from lightning_bnn.modules.data_size import data_size
from lightning_bnn.modules.evaluation import Judge, judge_of, named_sets
from lightning_bnn.modules.predictive import Predictive
from lightning_bnn.modules.side_by_side import check_elementwise, clip_members, finite_members
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Posterior
from lightning_bnn.randomness import keyed_generator, keyed_randomness

__all__ = ["BayesianModule", "Prediction"]

_NOT_SAVED = ("network", "likelihood", "prior", "optimizer", "lr_scheduler")
_EXAMPLE_ROWS = 2


class Prediction(NamedTuple):
    """What `predict_step` returns.

    ``mean`` averages over networks: probabilities ``(batch, classes)``, or the moments of a
    Gaussian likelihood. ``samples`` are the outputs of each, ``(samples, batch, ...)``.
    """

    mean: Any
    samples: Tensor


class BayesianModule(L.LightningModule):
    """Trains a posterior over the weights of any network.

    Args:
        network: gives the computation; it is copied, not changed. Its weights are where the first
            member starts, those of further members are drawn anew.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        members: how many posteriors are trained side by side; one of several is a mixture of them.
        optimizer: makes the optimizer, given parameters.
        lr_scheduler: makes the scheduler, given the optimizer.
        lr_interval: when the scheduler steps, every ``"epoch"`` or every ``"step"``.
        start_from: a checkpoint or state dict with the weights where the first member starts.
        num_data: number of training examples; by default read from the train loader.
        eval_samples: how many networks predict in validation, test and prediction.
        chunk_size: networks that run at once, by default chosen by their size.
        seed: of the random numbers of this module; each depends on (seed, step, process) only.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: nn.Module | None = None,
        members: int = 1,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
        start_from: str | None = None,
        num_data: int | None = None,
        eval_samples: int = 20,
        chunk_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("members", members), ("eval_samples", eval_samples)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if num_data is not None and num_data < 1:
            raise ValueError(f"`num_data` must be at least 1, got {num_data}.")
        ignore = () if _compat.made_by_cli() else _NOT_SAVED
        self.save_hyperparameters(ignore=ignore, frame=inspect.currentframe())
        self.__dict__["template"] = _template(network, start_from)
        self.likelihood = Categorical() if likelihood is None else likelihood
        self.members, self.num_data, self.eval_samples = members, num_data, eval_samples
        self.make_optimizer, self.make_scheduler = optimizer, lr_scheduler
        self.lr_interval, self.chunk_size, self.seed = lr_interval, chunk_size, seed
        self.judge: Judge | None = None
        self._example: tuple[Any, ...] = ()
        self._predict: Callable[..., Any] | None = None
        self._warned_members: set[int] = set()

    # -------------------------------------------------------- what a method is
    @abstractmethod
    def member_stack(self) -> Params:
        """One network for each member: the weights that are trained, or the centres of modes."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior as it is now, apart from what trains."""

    @abstractmethod
    def losses(self, inputs: tuple[Any, ...], targets: Tensor) -> dict[str, Tensor]:
        """Terms of the objective per member; ``loss`` is what its sum is minimised of."""

    def judged_posterior(self) -> Posterior:
        """One that predicts as the posterior does."""
        return self.posterior()

    @property
    def judged_samples(self) -> int:
        """How many networks predict."""
        return self.eval_samples

    # -------------------------------------------------------- members
    def weights(self) -> tuple[nn.Module, Params, tuple[Any, ...]]:
        """Template, stack of members, and an example of its inputs: what callbacks look at."""
        return self.template, self.member_stack(), self.example()

    def member(self, index: int) -> nn.Module:
        """A plain module with the weights of one member."""
        if not 0 <= index < self.members:
            raise ValueError(f"`index` must be between 0 and {self.members - 1}, got {index}.")
        result = copy.deepcopy(self.template)
        result.load_state_dict({n: t[index] for n, t in self.member_stack().items()}, strict=False)
        return result.train(self.training)

    def healthy(self) -> Tensor:
        """Indices of the members with finite weights; the others are left out of the posterior."""
        finite = finite_members(self.stacked_parameters()).nonzero()[:, 0]
        if len(finite) == 0:
            raise ValueError(
                "No member has finite weights, training has diverged: take a smaller learning rate."
            )
        return finite

    def first_networks(self) -> Params:
        """The network as it was given, then as many drawn anew as there are further members."""
        own = {name: t.clone()[None] for name, t in P.of(self.template).items()}
        if self.members == 1:
            return own
        generator = keyed_generator(self.seed, "members")
        drawn = P.populate(self.template, self.members - 1, generator)
        return {name: torch.cat([own[name], drawn[name].to(own[name])]) for name in own}

    def example(self) -> tuple[Any, ...]:
        """Two rows of input: from a batch that was seen, or from the train loader's data set."""
        if not self._example:
            given = self.example_input_array
            if given is not None:
                self._example = given if isinstance(given, tuple) else (given,)
            elif self._trainer is not None and self.trainer.train_dataloader is not None:
                self._example = self._peek(self.trainer.train_dataloader)
        return self._example

    def _peek(self, loader: Any) -> tuple[Any, ...]:
        """The first rows of a data set, without touching anybody's random numbers."""
        with keyed_randomness(self.seed, "example", device=self.device):
            if hasattr(loader, "collate_fn"):
                rows = [loader.dataset[k] for k in range(min(_EXAMPLE_ROWS, len(loader.dataset)))]
                batch = loader.collate_fn(rows)
            elif hasattr(loader, "example"):
                batch = loader.example(_EXAMPLE_ROWS)
            else:
                return ()
            batch = self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        return self._cast(self.inputs_and_targets(batch)[0])

    # -------------------------------------------------------- batches
    def inputs_and_targets(self, batch: Any) -> tuple[tuple[Any, ...], Tensor]:
        """Inputs and targets of a batch; override it for batches of another layout."""
        return inputs_and_targets(batch)

    def _cast(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Floating inputs in the precision of the weights."""
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        return tuple(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def _randomness(self, *key: int | str) -> AbstractContextManager[None]:
        return keyed_randomness(self.seed, *key, self.global_rank, device=self.device)

    # -------------------------------------------------------- training
    def on_fit_start(self) -> None:
        """Read N before the first step."""
        self._warned_members = set()

    def on_train_start(self) -> None:
        """Read N where it was not given."""
        if self.num_data is None:
            loader = self.trainer.train_dataloader
            self.num_data = data_size(loader, self.trainer.num_training_batches)
            rank_zero_info(f"{type(self).__name__}: the training set has {self.num_data} examples.")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step for all members."""
        inputs, targets = self.inputs_and_targets(batch)
        inputs = self._cast(inputs)
        if not self._example:
            self._example = tuple(x[:_EXAMPLE_ROWS] if isinstance(x, Tensor) else x for x in inputs)
        self._same_mode()
        with self._randomness("train", self.trainer.fit_loop.total_batch_idx):
            terms = self._checked(lambda: self.losses(inputs, targets), inputs)
        self._log_terms(terms, len(targets))
        return terms["loss"].sum()

    def _log_terms(self, terms: dict[str, Tensor], examples: int) -> None:
        for name, values in terms.items():
            self.log(
                f"train/{name}",
                values.detach().mean(),
                prog_bar=name == "loss",
                batch_size=examples,
                on_step=True,
                on_epoch=False,
            )

    def on_train_epoch_end(self) -> None:
        """Say which members have diverged; the others go on."""
        bad = (~finite_members(self.stacked_parameters())).nonzero().flatten().tolist()
        if set(bad) - self._warned_members:
            self._warned_members |= set(bad)
            rank_zero_warn(f"Members {bad} of {self.members} have weights that are not finite.")

    def stacked_parameters(self) -> list[Tensor]:
        """Parameters whose first dimension counts members: all but those of the likelihood."""
        own = {id(p) for p in self.likelihood.parameters()}
        return [p for p in self.parameters() if id(p) not in own]

    def configure_optimizers(self) -> Any:
        """One optimizer for all members, if it does not mix them."""
        if self.members > 1:
            check_elementwise(self.make_optimizer)
        optimizer = self.make_optimizer([p for p in self.parameters() if p.requires_grad])
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        watched = getattr(scheduler, "monitor", "val/nll")
        config = {"scheduler": scheduler, "interval": self.lr_interval, "monitor": watched}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip every member as if it were alone."""
        if gradient_clip_val is None:
            return
        by_value = gradient_clip_algorithm == "value"
        clip_members(self.stacked_parameters(), float(gradient_clip_val), by_value)

    # -------------------------------------------------------- evaluation
    def _start(self, judge: Judge | None) -> None:
        """Draw the networks that predict, once for all batches."""
        self.judge = None if judge is None else judge.to(self.device)
        generator = keyed_generator(self.seed, "judged", device=self.device)
        with torch.no_grad():
            self._predict = self.judged_posterior().predictor(
                self.judged_samples, generator, self.chunk_size
            )

    def outputs(self, inputs: Sequence[Any]) -> Tensor:
        """Outputs of all networks that predict, ``(samples, batch, ...)``."""
        assert self._predict is not None
        self._same_mode()
        inputs = self._cast(inputs)
        run = self._predict
        with self._randomness("predict"):
            return self._checked(lambda: run(self.template, *inputs), inputs)

    def on_validation_epoch_start(self) -> None:
        """Draw networks."""
        self._start(judge_of(self.likelihood))

    def on_test_epoch_start(self) -> None:
        """Draw networks, and ask what the loaders hold."""
        loaders = self.trainer.test_dataloaders
        count = len(loaders) if isinstance(loaders, (list, tuple, dict)) else 1
        self._start(judge_of(self.likelihood, named_sets(self.trainer.datamodule, count)))

    def on_predict_epoch_start(self) -> None:
        """Draw networks."""
        self._start(None)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Judge one batch; further validation loaders are added to the first."""
        self._judge_batch(batch, 0)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Judge one batch of the set that its loader holds."""
        self._judge_batch(batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Prediction:
        """Mean prediction and the outputs of every network."""
        samples = self.outputs(inputs_only(batch))
        return Prediction(self.likelihood.predictive(samples), samples)

    def _judge_batch(self, batch: Any, index: int) -> None:
        inputs, targets = self.inputs_and_targets(batch)
        assert self.judge is not None
        self.judge.add(self.outputs(inputs), targets, index)

    def on_validation_epoch_end(self) -> None:
        """Log every number under ``val/``."""
        self._log_values("val", ("acc", "nll", "rmse"))

    def on_test_epoch_end(self) -> None:
        """Log every number under ``test/``."""
        self._log_values("test", ())

    def _log_values(self, stage: str, shown: Sequence[str]) -> None:
        assert self.judge is not None
        for name, value in self.judge.values().items():
            # Metrics are the same on all processes already; the sync only keeps Lightning quiet.
            self.log(f"{stage}/{name}", value.float(), prog_bar=name in shown, sync_dist=True)
        self.judge, self._predict = None, None

    # -------------------------------------------------------- plain use
    def forward(self, *inputs: Any) -> Any:
        """Mean prediction of the posterior, outside of a trainer too."""
        self._start(None)
        with torch.no_grad():
            return self.likelihood.predictive(self.outputs(inputs))

    def predictive(self, samples: int | None = None) -> Predictive:
        """The mean prediction as a plain module that `torch.export` and ONNX understand.

        Args:
            samples: how many networks it holds, by default as many as predict otherwise.
        """
        count = self.judged_samples if samples is None else samples
        with torch.no_grad():
            networks = self.judged_posterior().sample(count, keyed_generator(self.seed, "judged"))
        return Predictive(self.template, networks, self.likelihood)

    # -------------------------------------------------------- the template
    def _same_mode(self) -> None:
        if self.template.training != self.training:
            self.template.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The template follows to the device: it may hold tensors that no state dict names."""
        self.template._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _checked(self, run: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        try:
            return run()
        except RuntimeError as error:
            if "shape" not in str(error) and "size" not in str(error):
                raise
            shapes = ", ".join(str(tuple(x.shape)) for x in inputs if isinstance(x, Tensor))
            first = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{type(self.template).__name__} does not take inputs of shape {shapes}: {first}."
            ) from error


def _template(network: nn.Module, start_from: str | None) -> nn.Module:
    if not isinstance(network, nn.Module):
        raise ValueError(f"`network` must be a torch.nn.Module, got {type(network).__name__}.")
    template = copy.deepcopy(network)
    if start_from is not None:
        path, wanted = Path(start_from), P.of(template)
        state, _ = read_state(path)
        prefix = find_prefix(path, state, wanted, None)
        template.load_state_dict(strip_prefix(state, prefix, list(wanted)), strict=False)
    return template
