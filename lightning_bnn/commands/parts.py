"""One part of a population: some members, trained side by side in a folder of their own."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.lock import Locked, WriterLock
from lightning_bnn.bank.room import told_if_full
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.commands.part_files import (
    newest_checkpoint,
    progress_in,
    replace_text,
    summary_in,
    write_whole,
)
from lightning_bnn.commands.training import training
from lightning_bnn.harvest import ends
from lightning_bnn.modules.divergence import Diverged
from lightning_bnn.modules.side_by_side import finite_members
from lightning_bnn.quiet_runs import quiet

__all__ = ["Part", "networks_of", "train_part"]

_NEVER = 10**9
_SECONDS = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Members ``first`` to ``last - 1`` of a population.

    Attributes:
        folder: where everything of it is.
        config: the configuration with the members of this part.
        first, last: which members.
        every_n_epochs: how often they are kept, besides at the end.
        minutes: between checkpoints.
    """

    folder: Path
    config: dict[str, Any]
    first: int
    last: int
    every_n_epochs: int | None = None
    minutes: float = 5.0

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def bank(self) -> Path:
        """Where its networks are."""
        return self.folder / "bank"

    @property
    def summary(self) -> dict[str, Any] | None:
        """What is known once it is finished."""
        return summary_in(self.folder, self.first, self.last)

    @property
    def progress(self) -> float:
        """How much of it is done, from 0 to 1."""
        return progress_in(self.folder) if self.summary is None else 1.0


def train_part(part: Part, tick: Callable[[], None]) -> None:
    """Train it, or what is left of it; nothing where it is finished.

    Args:
        part: what to train.
        tick: called now and then.
    """
    with told_if_full(part.folder), _alone_in(part.folder, tick):
        if part.summary is None:
            _train(part, tick)


@contextlib.contextmanager
def _alone_in(folder: Path, tick: Callable[[], None]) -> Iterator[None]:
    """Wait until no other process trains there, such as a job of a command that was killed."""
    waited = False
    while True:
        try:
            lock = WriterLock(folder)
            break
        except Locked:
            if not waited:
                _log.warning("%s: another process trains these members; waiting for it.", folder)
            waited = True
            tick()
            time.sleep(_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _train(part: Part, tick: Callable[[], None]) -> None:
    config = part.folder / "config.yaml"
    config.write_text(yaml.safe_dump(part.config, sort_keys=False), encoding="utf-8")
    checkpoints = part.folder / "checkpoints"
    whole = newest_checkpoint(checkpoints)
    if whole is None:  # what an attempt has left that made no checkpoint
        shutil.rmtree(part.bank, ignore_errors=True)
    start = time.monotonic()
    arguments = [
        "fit", "-c", str(config),
        "--trainer.default_root_dir", str(part.folder),
        "--trainer.enable_progress_bar", "false",
        "--trainer.enable_model_summary", "false",
        "--trainer.enable_checkpointing", "true",
        *(["--ckpt_path", str(whole)] if whole else []),
    ]  # fmt: skip
    saving = _Checkpoints(
        checkpoints, filename="{step}", save_top_k=1,
        train_time_interval=timedelta(minutes=part.minutes),
    )  # fmt: skip
    try:
        with quiet():
            run = training(arguments, [_Keeper(part), _Progress(part, tick), saving])
        outcome = _outcome(part, run.model)
    except Diverged:  # nobody is left to be validated
        shutil.rmtree(part.bank, ignore_errors=True)
        outcome = {"left_out": list(range(part.first, part.last)), "losses": []}
    told = {"first": part.first, "last": part.last, "seconds": round(time.monotonic() - start, 1)}
    write_whole(part.folder / "part.json", json.dumps({**told, **outcome}))
    shutil.rmtree(checkpoints, ignore_errors=True)


def _outcome(part: Part, module: Any) -> dict[str, Any]:
    """Who is left out, and the losses over the last epoch where they are known."""
    out = ~finite_members(module.stacked_parameters()).cpu()
    divergence = getattr(module, "divergence", None)
    if divergence is not None:
        out |= divergence.left_out
    means = None if divergence is None else divergence.means
    return {
        "left_out": [part.first + m for m in out.nonzero().flatten().tolist()],
        "losses": [] if means is None else means.tolist(),
    }


class _Keeper(CheckpointHarvester):
    """Harvests at the end, too, and needs the room: the networks are all that a part is about."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.bank, every_n_epochs=part.every_n_epochs or _NEVER)
        self._kept_at = -1

    def _harvest(self, trainer: Any, pl_module: Any) -> None:
        super()._harvest(trainer, pl_module)
        self._kept_at = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._kept_at != trainer.global_step:
            self._harvest(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def on_full_disk(self, first: bool) -> None:
        """Before a checkpoint is made that would not train them again."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


class _Checkpoints(ModelCheckpoint):
    """None at the very end: a run that goes on from there would do nothing, and keep nothing."""

    def on_train_batch_end(self, trainer: L.Trainer, *more: Any) -> None:
        """If it is time."""
        if not ends(trainer):
            super().on_train_batch_end(trainer, *more)


class _Progress(L.Callback):
    """Writes how far a part is, for whoever watches, on whatever machine."""

    def __init__(self, part: Part, tick: Callable[[], None]) -> None:
        self.part, self.tick, self._told = part, tick, 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """At most twice a second."""
        now = time.monotonic()
        if now - self._told > _SECONDS:
            self._told = now
            total = trainer.estimated_stepping_batches
            done = min(1.0, trainer.global_step / total)
            with contextlib.suppress(OSError):  # whoever watches sees less; no reason to stop
                replace_text(self.part.folder / "progress", f"{done:.4f}")
            self.tick()


def networks_of(part: Part) -> tuple[CheckpointBank, list[dict[str, Any]]]:
    """Its bank, and a record of every network under the number that the member has in the whole."""
    summary = part.summary or {}
    bank = CheckpointBank(part.bank, "r")
    losses = torch.tensor(summary.get("losses", []))
    records = []
    for record in bank.records:
        own = {**record, "member": part.first + record["member"]}
        own.pop("metrics", None)  # those of the whole part
        if len(losses):
            own["loss"] = float(losses[record["member"]])
        records.append(own)
    return bank, records
