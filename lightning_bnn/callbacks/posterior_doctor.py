"""Says at the end of a run whether its posterior is any good, and what is wrong with it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_bnn._compat import figure_step
from lightning_bnn.callbacks.figure_logging import log_folder
from lightning_bnn.callbacks.watching import shards_weights
from lightning_bnn.member_batch import MemberBatch
from weightsym.arguments import check_count

__all__ = ["PosteriorDoctor"]

_Examples = tuple[tuple[Tensor, ...], Tensor]
"""Inputs and targets."""


class PosteriorDoctor(Callback):
    """Looks for what goes wrong with posteriors, and says it in plain sentences.

    For modules of this package: deviations, prior and KL term, steps of samplers, burn-in, chains
    that disagree, members that are copies or have diverged, statistics of BatchNorm, and whether
    predictions are as sure as they are right. For any other module what can be seen of one
    network: data, labels, outputs, losses, calibration.

    Findings have a number, a reason and a remedy, and are faults, warnings or notes. They are
    printed, logged as text and scalars (``doctor/faults``, ``doctor/warnings``), and written to
    ``doctor.json``. `docs/doctor.md` says how often each verdict is right.

    Args:
        every_n_epochs: look after so many epochs, too; by default only at the end, also if the
            run breaks off.
        module: name of the network inside the LightningModule, if it is not to be guessed.
        training_examples: how many are kept, of the first batches.
        held_out_examples: how many of the validation data are predicted.

    Attributes:
        report: the latest `lightning_bnn.doctor.Report`.
        seconds: processor time that the callback has taken.

    >>> import tempfile
    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> quiet |= {"enable_model_summary": False, "default_root_dir": tempfile.mkdtemp()}
    >>> trainer = Trainer(max_epochs=1, callbacks=[doctor := PosteriorDoctor()], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=2), TwoGaussians())
    >>> doctor.report.faults, "probabilities_as_logits" in doctor.report.fine
    ([], True)
    >>> doctor.report.skipped["miscalibrated"]
    'there are no validation data'
    """

    def __init__(
        self,
        every_n_epochs: int | None = None,
        module: str | None = None,
        training_examples: int = 512,
        held_out_examples: int = 1024,
    ) -> None:
        if every_n_epochs is not None:
            check_count("every_n_epochs", every_n_epochs)
        check_count("training_examples", training_examples)
        check_count("held_out_examples", held_out_examples)
        self.every_n_epochs, self.module = every_n_epochs, module
        self.report: Any = None
        self.seconds = 0.0
        self.curves: dict[str, list[float]] = {}
        self._training, self._training_is_whole = _ExampleStore(training_examples), False
        self._held_out = _ExampleStore(held_out_examples)
        self._loss: Tensor | None = None
        self._steps = 0
        self._active = True

    def state_dict(self) -> dict[str, Any]:
        return {"curves": self.curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curves = dict(state_dict["curves"])

    # -------------------------------------------------------- what is seen
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget an earlier run, unless this one goes on with it."""
        if not trainer.ckpt_path:
            self.curves = {}
        self.report, self.seconds = None, 0.0
        self._loss, self._steps = None, 0
        self._training.clear()
        self._training_is_whole = False
        self._held_out.clear()
        self._folder: Path = log_folder(trainer)
        sharded = shards_weights(trainer, pl_module)
        self._active = trainer.is_global_zero and not sharded
        if sharded:
            rank_zero_warn("PosteriorDoctor is switched off: weights are sharded over processes.")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """Keep examples of the first batches."""
        if self._active and not self._training_is_whole:
            begun = time.process_time()
            self._training.add(pl_module, batch)
            self.seconds += time.process_time() - begun

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Add to the loss of this epoch."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._active and isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.detach()
            self._loss = loss.clone() if self._loss is None else self._loss + loss
            self._steps += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Follow the loss and the sampler, and look if it is time."""
        if not self._active:
            return
        self._training_is_whole = True  # another epoch has the same examples
        begun = time.process_time()
        if self._loss is not None:
            members = getattr(pl_module, "members", 1)
            size = members if isinstance(members, int) else 1
            self._follow("loss", float(self._loss) / (self._steps * size))
            self._loss, self._steps = None, 0
        for name, value in _of_samplers(trainer.optimizers).items():
            self._follow(name, value)
        self.seconds += time.process_time() - begun

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the examples of the validation before."""
        if not trainer.sanity_checking:
            self._held_out.clear()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep examples of the first loader."""
        if self._active and not trainer.sanity_checking and dataloader_idx == 0:
            self._held_out.add(pl_module, batch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Look, if it is time."""
        due = self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if due and not last and not trainer.sanity_checking and trainer.fit_loop.epoch_loop.done:
            self.look(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Look at what has come of the run."""
        if not trainer.fast_dev_run:
            self.look(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say what may be the reason, where a run breaks off with an error."""
        if isinstance(exception, Exception) and not trainer.fast_dev_run:
            self.look(trainer, pl_module)

    def _follow(self, name: str, value: float) -> None:
        self.curves.setdefault(name, []).append(value)

    # -------------------------------------------------------- the examination
    def look(self, trainer: Any, pl_module: Any) -> None:
        """Examine the posterior as it is now, and tell everybody."""
        if not self._active or not hasattr(self, "_folder"):
            return
        from lightning_bnn.callbacks.run_evidence import examine_run
        from lightning_bnn.doctor import Examples

        begun = time.process_time()
        examples = (store.examples() for store in (self._training, self._held_out))
        training, held_out = (None if pair is None else Examples(*pair) for pair in examples)
        curves = {name: list(values) for name, values in self.curves.items()}
        self.report = examine_run(trainer, pl_module, self.module, training, held_out, curves)
        self._tell(trainer, self.report)
        self.seconds += time.process_time() - begun

    def _tell(self, trainer: Any, report: Any) -> None:
        file = report.write(self._folder)
        step = figure_step(trainer)
        warnings = sum(f.severity == "warning" for f in report.findings)
        numbers = {"doctor/faults": len(report.faults), "doctor/warnings": warnings}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_text"):
                experiment.add_text("doctor", report.markdown(), global_step=step)
        for finding in report.faults:
            rank_zero_warn(f"{finding.says} {finding.fix}")
        rank_zero_info(f"PosteriorDoctor: {report.headline()} ({file}).")


class _ExampleStore:
    """The first examples of some batches, as inputs and targets, until there are enough."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._parts: list[_Examples] = []
        self._count = 0

    def clear(self) -> None:
        """Forget the examples that were kept."""
        self._parts, self._count = [], 0

    def add(self, pl_module: Any, batch: Any) -> None:
        """Keep the examples of a batch, unless its layout is not known."""
        if self._count >= self.most:
            return
        examples = _examples(pl_module, batch)
        if examples is None:
            return
        left = self.most - self._count
        inputs, targets = tree_map(lambda t: t[:left].detach(), examples)
        self._parts.append((inputs, targets))
        self._count += len(targets)

    def examples(self) -> _Examples | None:
        """Join all that was kept, if anything was."""
        if not self._parts:
            return None
        inputs = zip(*(inputs for inputs, _ in self._parts), strict=True)
        targets = torch.cat([targets for _, targets in self._parts])
        return tuple(torch.cat(list(column)) for column in inputs), targets


def _examples(pl_module: Any, batch: Any) -> _Examples | None:
    """Read inputs and targets from a batch, the first one where every member has its own."""
    if isinstance(batch, MemberBatch):
        batch = tree_map(lambda t: t[0] if isinstance(t, Tensor) else t, tuple(batch))
    reader = getattr(pl_module, "inputs_and_targets", None)
    if callable(reader):
        inputs, targets = reader(batch)
        inputs = pl_module.cast(inputs)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        inputs, targets = tuple(batch[:-1]), batch[-1]
    else:
        return None
    sizes = {len(t) for t in (*inputs, targets) if isinstance(t, Tensor) and t.ndim}
    are_tensors = isinstance(targets, Tensor) and all(isinstance(t, Tensor) for t in inputs)
    return (tuple(inputs), targets) if are_tensors and len(sizes) == 1 else None


def _of_samplers(optimizers: Any) -> dict[str, float]:
    """Temperature, acceptance and energy errors of samplers, where they have any."""
    numbers: dict[str, float] = {}
    for wrapped in optimizers:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        if callable(getattr(optimizer, "kinetic_temperature", None)) and optimizer.state:
            numbers["kinetic_temperature"] = float(optimizer.kinetic_temperature())
        for curve, name in (("acceptance", "acceptance"), ("energy_variance", "energy_variances")):
            values = getattr(optimizer, name, None)
            if isinstance(values, Tensor) and values.numel():
                numbers[curve] = float(values.double().mean())
    return {name: value for name, value in numbers.items() if not math.isnan(value)}
