"""Presets that a command trains once, with continuation after an interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from tqdm.auto import tqdm

import lightning_bnn
from lightning_bnn.commands.presets import preset_text, program_of
from lightning_bnn.commands.training import training, whole_checkpoint
from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, read_module
from lightning_bnn.harvest import ends
from lightning_bnn.quiet_runs import one_thread, quiet
from weightsym.files import write_whole

_APART = 1000
"""Difference between the seeds of two repetitions, larger than that between presets."""
_BETWEEN_CHECKPOINTS = 5.0
"""Seconds of training that an interruption may lose."""


@dataclass(frozen=True)
class Job:
    """A preset to train.

    Attributes:
        name: of the job and its folder.
        preset: name of a configuration of the package, or of the given one.
        overrides: changed settings, by the names of the command line without dashes.
        callbacks: for the training.
        text: a configuration as YAML, instead of a preset.
        package: package with the preset.
    """

    name: str
    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[L.Callback] = ()
    text: str = ""
    package: str = "lightning_bnn"

    @property
    def configuration(self) -> str:
        """The YAML before changes."""
        return self.text or preset_text(self.preset, self.package)

    @property
    def command(self) -> str:
        """The shell commands for the same training."""
        changes = "".join(f" --{name} {value}" for name, value in self.overrides.items())
        preset = f"{program_of(self.package)} presets {self.preset} > {self.preset}.yaml"
        return f"{preset}; lightning-bnn fit -c {self.preset}.yaml{changes}"

    @property
    def epochs(self) -> int:
        """Number of training epochs."""
        stated = yaml.safe_load(self.configuration)["trainer"]["max_epochs"]
        return int(self.overrides.get("trainer.max_epochs", stated))

    @property
    def key(self) -> str:
        """Digest of everything that determines the result."""
        changes = json.dumps(dict(self.overrides), default=str)
        text = self.configuration + changes + lightning_bnn.__version__
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def reseeded(job: Job, seed: int) -> Job:
    """Return the same job with other initial weights, or itself for seed 0.

    Args:
        job: its preset may have a seed.
        seed: index of the repetition.
    """
    if seed == 0:
        return job
    stated = yaml.safe_load(job.configuration)["model"]["init_args"].get("seed") or 0
    overrides = {**job.overrides, "model.init_args.seed": stated + _APART * seed}
    return dataclasses.replace(job, overrides=overrides)


@dataclass(frozen=True)
class StoredRun:
    """A finished job and its folder.

    Attributes:
        job: the job.
        folder: its folder.
    """

    job: Job
    folder: Path

    @property
    def place(self) -> Location:
        """The location of its posterior."""
        return Location(self.folder)

    @property
    def seconds(self) -> float:
        """CPU time of its training, without interrupted parts."""
        file = self.folder / "cpu_seconds"
        return float(file.read_text()) if file.is_file() else 0.0

    @property
    def is_finished(self) -> bool:
        """True if the run has finished with the settings of the job."""
        file = self.folder / "finished"
        return file.is_file() and file.read_text() == self.job.key

    def problem(self) -> Problem:
        """Return the network and the data of its configuration."""
        return read_problem(_newest(self.folder.rglob("config.yaml")))

    def module(self) -> Any:
        """Return the trained module, with its data."""
        module = read_module(self.place.file(), self.problem())
        assert module is not None
        return module


@contextmanager
def beside(work: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Run a function in another process, which is terminated with the block.

    The caller afterwards does whatever remains, or reports why it cannot.

    Args:
        work: a function of a module.
        *args: arguments of the function.
    """
    alone = threading.active_count() == 1 and not torch.cuda.is_available()
    fork = alone and sys.platform == "linux"  # which has imported everything already
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    process = context.Process(target=_work_beside, args=(work, *args), daemon=True)
    process.start()
    try:
        yield
        process.join()
    finally:
        process.terminate()


def _work_beside(work: Callable[..., Any], *args: Any) -> None:
    with suppress(KeyboardInterrupt), one_thread():
        work(*args)


def run_jobs(jobs: Sequence[Job], folder: Path, line: int = 0) -> dict[str, StoredRun]:
    """Train all jobs, one after the other, with one progress bar.

    Finished jobs are not repeated, interrupted ones continue from their last checkpoint, and jobs
    with changed settings start again.

    Args:
        jobs: jobs to train.
        folder: for all runs, each in a folder of its name.
        line: position of the bar below others.
    """
    runs = {job.name: StoredRun(job, folder / job.name) for job in jobs}
    waiting = [run for run in runs.values() if not _prepared(run)]
    total = sum(run.job.epochs for run in waiting)
    with tqdm(
        total=total, desc="training", unit="epoch", disable=not waiting, position=line
    ) as bar:
        for run in waiting:
            bar.set_postfix_str(run.job.name)
            seconds, begun = run.seconds, time.process_time()
            _train(run, _Epochs(bar))
            seconds += time.process_time() - begun
            write_whole(run.folder / "cpu_seconds", f"{seconds:.1f}")
            write_whole(run.folder / "finished", run.job.key)
    return runs


def _prepared(run: StoredRun) -> bool:
    """Return whether a run has finished, and remove one that cannot be continued.

    A run with other settings is removed, and so is one killed before its first checkpoint, whose
    draws in a bank are useless.
    """
    begun = run.folder / "settings"
    if run.is_finished:
        return True
    if begun.is_file():
        if begun.read_text() == run.job.key and whole_checkpoint(_checkpoints(run)) is not None:
            return False
        _discard(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    write_whole(begun, run.job.key)
    return False


def _discard(folder: Path) -> None:
    """Remove a run atomically, since the settings of an incomplete one would be unknown."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
    shutil.rmtree(old)


def _checkpoints(run: StoredRun) -> list[Path]:
    return list(run.folder.rglob("*.ckpt"))


def _train(run: StoredRun, epochs: L.Callback) -> None:
    config = run.folder / f"{run.job.preset}.yaml"
    config.write_text(run.job.configuration, encoding="utf-8")
    options: dict[str, Any] = {
        **run.job.overrides,
        "trainer.default_root_dir": str(run.folder),
        "trainer.enable_progress_bar": False,
        "trainer.enable_model_summary": False,
    }
    checkpoints = _checkpoints(run)
    newest = whole_checkpoint(checkpoints)
    if newest is not None:
        options["ckpt_path"] = str(newest)
    arguments = ["fit", "-c", str(config)]
    for name, value in options.items():
        arguments += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    callbacks = [epochs, *run.job.callbacks, _NowAndThen(save_on_train_epoch_end=True)]
    with quiet():
        training(arguments, callbacks)
    last = whole_checkpoint(_checkpoints(run))  # the old one if it was made at the end
    for superseded in checkpoints:
        if superseded != last:
            superseded.unlink(missing_ok=True)


def _newest(paths: Iterable[Path]) -> Path:
    return max(paths, key=lambda path: path.stat().st_mtime)


class _NowAndThen(ModelCheckpoint):
    """A checkpoint callback that saves every few seconds and at the end, for short epochs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.saved = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, unless the last save was a moment ago and training continues."""
        now = time.monotonic()
        if ends(trainer) or now - self.saved >= _BETWEEN_CHECKPOINTS:
            super().on_train_epoch_end(trainer, pl_module)
            self.saved = now


class _Epochs(L.Callback):
    """A callback that moves the bar of all runs, at once over epochs before an interruption."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move to the epoch at which the run continues."""
        self.bar.update(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move the bar by one epoch."""
        self.bar.update(1)
