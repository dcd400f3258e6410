"""Says at the end of a run whether its posterior is any good, and what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_bnn._compat import figure_step
from lightning_bnn.callbacks.figure_logging import log_folder
from lightning_bnn.callbacks.onlooker import Onlooker
from lightning_bnn.callbacks.seen_examples import ExampleListener, ExampleStore
from lightning_bnn.callbacks.watching import check_name, prefix_among_others, shards_weights
from weightsym.params import check_count, elsewhere, random_numbers

__all__ = ["PosteriorDoctor"]

_TRAINING, _HELD_OUT = 512, 1024
"""Numbers of training and of validation examples that are kept."""


class PosteriorDoctor(Onlooker):
    """Finds what is wrong with a posterior, and explains it in plain sentences.

    For modules of this package: deviations, prior and KL term, steps of samplers, burn-in, chains
    that disagree, members that are copies or have diverged, statistics of BatchNorm, and whether
    predictions are as sure as they are right. For any other module: data, labels,
    outputs, losses and calibration of one network.

    Findings have a number, a reason and a remedy, and are faults, warnings or notes. They are
    printed, logged as text and scalars (``doctor/faults``, ``doctor/warnings``), and written to
    ``doctor.json``, or ``doctor-<module>.json`` if there are several doctors. `docs/doctor.md` says
    how often each verdict is right.

    Args:
        every_n_epochs: also examine every so many epochs; by default only at the end, also if the
            run breaks off.
        module: name of the network inside the LightningModule, if it is not to be guessed.

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

    def __init__(self, every_n_epochs: int | None = None, module: str | None = None) -> None:
        check_count("every_n_epochs", every_n_epochs, optional=True)
        self.every_n_epochs, self.module = every_n_epochs, module
        self._report: Any = None
        self.curves: dict[str, list[float]] = {}
        self._training, self._training_is_whole = ExampleStore(_TRAINING), False
        self._held_out = ExampleStore(_HELD_OUT)
        self._loss: Tensor | None = None
        self._steps = 0
        self._listener = ExampleListener(module)

    @property
    def report(self) -> Any:
        """The latest `lightning_bnn.doctor.Report`, which the end of a fit makes."""
        if self._report is None:
            raise ValueError("PosteriorDoctor has no report yet: it is made at the end of a fit.")
        return self._report

    @property
    def state_key(self) -> str:
        return f"PosteriorDoctor(module={self.module!r})"

    def state_dict(self) -> dict[str, Any]:
        return {"curves": self.curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curves = dict(state_dict["curves"])

    # -------------------------------------------------------- what is seen
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget an earlier run, unless this one resumes it."""
        check_name(pl_module, self.module)
        if not trainer.ckpt_path:
            self.curves = {}
        self._report = None
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
        if not self._training_is_whole:
            self._listener.listen(self._training, pl_module, batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Add to the loss of this epoch."""
        self._listener.hear(self._training)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            if pl_module.automatic_optimization:  # Lightning has divided it
                loss = loss * trainer.accumulate_grad_batches
            loss = loss.detach()
            self._loss = loss.clone() if self._loss is None else self._loss + loss
            self._steps += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the loss, and numbers of the sampler."""
        self._training_is_whole = True  # another epoch has the same examples
        if self._loss is not None:
            members = getattr(pl_module, "members", 1)
            size = members if isinstance(members, int) else 1
            self._follow("loss", float(self._loss) / (self._steps * size))
            self._loss, self._steps = None, 0
        for name, value in _of_samplers(trainer.optimizers).items():
            self._follow(name, value)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the examples of the previous validation."""
        if not trainer.sanity_checking:
            self._held_out.clear()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep examples of the first loader."""
        if not trainer.sanity_checking and dataloader_idx == 0:
            self._listener.listen(self._held_out, pl_module, batch)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Keep what the network was called with."""
        self._listener.hear(self._held_out)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Examine the posterior, if that is due."""
        due = self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if due and not last and not trainer.sanity_checking and trainer.fit_loop.epoch_loop.done:
            self.look(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Examine the posterior at the end of the run."""
        if not trainer.fast_dev_run:
            self.look(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report likely reasons if a run breaks off with an error."""
        self._listener.hear(self._held_out if trainer.validating else self._training)
        if isinstance(exception, Exception) and not trainer.fast_dev_run:
            self.look(trainer, pl_module)

    def _close(self) -> None:
        self._listener.hear(self._training)

    def _follow(self, name: str, value: float) -> None:
        self.curves.setdefault(name, []).append(value)

    # -------------------------------------------------------- the examination
    def look(self, trainer: Any, pl_module: Any) -> None:
        """Examine the posterior as it is now. Print, log and write the report."""
        if not hasattr(self, "_folder"):
            return
        from lightning_bnn.callbacks.run_evidence import examine_run

        training, held_out = self._training.examples(), self._held_out.examples()
        curves = {name: list(values) for name, values in self.curves.items()}
        with random_numbers(elsewhere(pl_module.parameters())):
            self._report = examine_run(trainer, pl_module, self.module, training, held_out, curves)
        self._tell(trainer, self.report)

    def _tell(self, trainer: Any, report: Any) -> None:
        prefix = prefix_among_others(self, trainer, self.module)
        file = report.write(self._folder, prefix[:-1])
        step = figure_step(trainer)
        warnings = sum(f.severity == "warning" for f in report.findings)
        numbers = {"doctor/faults": len(report.faults), "doctor/warnings": warnings}
        numbers = {prefix + tag: number for tag, number in numbers.items()}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_text"):
                experiment.add_text(f"{prefix}doctor", report.markdown(), global_step=step)
        for finding in report.faults:
            rank_zero_warn(f"{finding.says} {finding.fix}")
        rank_zero_info(f"PosteriorDoctor: {report.headline()} ({file}).")


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
