"""One part of a population: members trained side by side in a folder of their own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.commands.training import training, whole_checkpoint
from lightning_bnn.harvest import ends
from lightning_bnn.methods.health import Diverged, finite_members
from lightning_bnn.quiet_runs import quiet
from weightsym.files import read_json, write_whole

_NEVER = 10**9


@dataclass(frozen=True)
class Part:
    """Members ``first`` to ``last - 1`` of a population.

    Attributes:
        folder: for all its files.
        config: the configuration, with the members of this part.
        first, last: which members.
        every_n_epochs: interval between stored networks, in addition to those at the end.
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
        """Folder of its networks."""
        return self.folder / "bank"

    @property
    def summary(self) -> dict[str, Any] | None:
        """Its seconds, losses and omitted members once it is finished, else None."""
        path, remedy = self.folder / "part.json", "remove it to train its members again"
        if not path.is_file():
            return None
        summary = read_json(path, remedy)
        ends = summary.get("first"), summary.get("last")
        if ends != (self.first, self.last) or not isinstance(summary.get("left_out"), list):
            raise ValueError(f"{path} is damaged: {remedy}.")
        return summary


def train_part(part: Part, bar: Any) -> None:
    """Train a part, or the rest of it.

    Args:
        part: the part.
        bar: of `tqdm`, which counts members.
    """
    config = part.folder / "config.yaml"
    part.folder.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(part.config, sort_keys=False), encoding="utf-8")
    checkpoints = part.folder / "checkpoints"
    newest = whole_checkpoint(checkpoints.glob("*.ckpt"))
    if newest is None:  # what an attempt has left that made no checkpoint
        shutil.rmtree(part.bank, ignore_errors=True)
    start = time.monotonic()
    try:
        outcome = _outcome(part, _fit(part, config, checkpoints, newest, bar))
    except Diverged:  # nobody is left to be validated
        shutil.rmtree(part.bank, ignore_errors=True)
        outcome = {"left_out": list(range(part.first, part.last)), "losses": []}
    seconds = round(time.monotonic() - start, 1)
    summary = {"first": part.first, "last": part.last, "seconds": seconds, **outcome}
    write_whole(part.folder / "part.json", json.dumps(summary))
    shutil.rmtree(checkpoints, ignore_errors=True)


def networks_of(part: Part) -> tuple[CheckpointBank, list[dict[str, Any]]]:
    """Open the bank of a part, with records whose member indices count over all parts."""
    bank = CheckpointBank(part.bank, "r")
    losses = (part.summary or {}).get("losses")
    records = []
    for row in bank.records:
        record = {**row, "member": part.first + row["member"]}
        record.pop("metrics", None)  # those of the whole part
        if losses:
            record["loss"] = losses[row["member"]]
        records.append(record)
    return bank, records


def _fit(part: Part, config: Path, checkpoints: Path, newest: Path | None, bar: Any) -> Any:
    """Train a part from its newest checkpoint, and return the module."""
    arguments = [
        "fit", "-c", str(config),
        "--trainer.default_root_dir", str(part.folder),
        "--trainer.enable_progress_bar", "false",
        "--trainer.enable_model_summary", "false",
        "--trainer.enable_checkpointing", "true",
        *(["--ckpt_path", str(newest)] if newest else []),
    ]  # fmt: skip
    interval = timedelta(minutes=part.minutes)
    callbacks = [
        FullHarvester(part.bank, part.every_n_epochs),
        TrainedShare(len(part), bar),
        CheckpointsBeforeTheEnd(
            checkpoints, filename="{step}", save_top_k=1, train_time_interval=interval
        ),
    ]
    with quiet():
        return training(arguments, callbacks).model


def _outcome(part: Part, module: Any) -> dict[str, Any]:
    """List the omitted members, and all losses over the last epoch if known."""
    left_out, losses = ~finite_members(module.state.parameters()).cpu(), None
    divergence = getattr(module.state, "divergence", None)
    if divergence is not None:
        left_out, losses = left_out | divergence.left_out, divergence.means
    return {
        "left_out": [part.first + member for member in left_out.nonzero().flatten().tolist()],
        "losses": [] if losses is None else losses.tolist(),
    }


# ------------------------------------------------------------ callbacks of a part
class FullHarvester(CheckpointHarvester):
    """A harvester that also harvests at the end, and stops the part if the disk is full."""

    def __init__(self, path: Path, every_n_epochs: int | None) -> None:
        super().__init__(path, every_n_epochs=every_n_epochs or _NEVER)
        self._harvested_at = -1

    def _harvest(self, trainer: Any, pl_module: Any) -> None:
        super()._harvest(trainer, pl_module)
        self._harvested_at = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Harvest, unless the networks of this step are in the bank already."""
        if self._harvested_at != trainer.global_step:
            self._harvest(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def on_full_disk(self, first: bool) -> None:
        """Stop before a checkpoint that a resumed run would continue without these networks."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


class CheckpointsBeforeTheEnd(ModelCheckpoint):
    """A checkpoint callback without a save at the end, since a resumed run would do nothing."""

    def on_train_batch_end(self, trainer: L.Trainer, *more: Any) -> None:
        """Save a checkpoint if due."""
        if not ends(trainer):
            super().on_train_batch_end(trainer, *more)


class TrainedShare(L.Callback):
    """Moves a bar by the share of a part that is trained, at once over steps of earlier calls."""

    def __init__(self, members: int, bar: Any) -> None:
        self.members, self.bar, self.before = members, bar, bar.n

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Move the bar."""
        share = min(1.0, trainer.global_step / trainer.estimated_stepping_batches)
        self.bar.update(self.before + share * self.members - self.bar.n)
