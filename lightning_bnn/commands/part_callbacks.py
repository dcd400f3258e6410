"""What watches over the training of a part: its networks, its checkpoints and its progress."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.commands.part_files import write_progress
from lightning_bnn.harvest import ends

__all__ = ["CheckpointsBeforeTheEnd", "FullHarvester", "ProgressWriter"]

_NEVER = 10**9
_SECONDS = 0.5


class FullHarvester(CheckpointHarvester):
    """Harvests at the end, too, and needs the room: the networks are all that a part is about."""

    def __init__(self, path: Path, every_n_epochs: int | None) -> None:
        super().__init__(path, every_n_epochs=every_n_epochs or _NEVER)
        self._kept_at = -1

    def _harvest(self, trainer: Any, pl_module: Any) -> None:
        super()._harvest(trainer, pl_module)
        self._kept_at = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the networks, unless those of this very step are kept already."""
        if self._kept_at != trainer.global_step:
            self._harvest(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def on_full_disk(self, first: bool) -> None:
        """Stop before a checkpoint is made that would not train them again."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


class CheckpointsBeforeTheEnd(ModelCheckpoint):
    """None at the very end: a run that goes on from there would do nothing, and keep nothing.

    None in the last batch of an epoch either, but after it: from a checkpoint that was made in
    between, Lightning skips the end of the epoch, and miscounts the next one if it is interrupted.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *more: Any) -> None:
        """Save a checkpoint if it is time, within an epoch."""
        if not trainer.is_last_batch:
            super().on_train_batch_end(trainer, *more)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a checkpoint if it is time, between epochs."""
        if not ends(trainer):
            super().on_train_batch_end(trainer, pl_module, None, None, 0)


class ProgressWriter(L.Callback):
    """Writes how far a part is, for whoever watches, on whatever machine."""

    def __init__(self, folder: Path, tick: Callable[[], None]) -> None:
        self.folder, self.tick, self._written_at = folder, tick, 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Write at most twice a second."""
        now = time.monotonic()
        if now - self._written_at > _SECONDS:
            self._written_at = now
            done = min(1.0, trainer.global_step / trainer.estimated_stepping_batches)
            with contextlib.suppress(OSError):  # whoever watches sees less; no reason to stop
                write_progress(self.folder, done)
            self.tick()
