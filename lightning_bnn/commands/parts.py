"""One part of a population: some members, trained side by side in a folder of their own."""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.commands.silence import quiet
from lightning_bnn.commands.training import training

__all__ = ["Part", "train_part"]

_NEVER = 10**9
_SECONDS = 0.5


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
        path = self.folder / "part.json"
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def progress(self) -> float:
        """How much of it is done, from 0 to 1."""
        if self.summary is not None:
            return 1.0
        try:
            return float((self.folder / "progress").read_text())
        except (OSError, ValueError):  # not begun, or just being written
            return 0.0


def train_part(part: Part, tick: Callable[[], None]) -> None:
    """Train it, or what is left of it; nothing where it is finished.

    Args:
        part: what to train.
        tick: called now and then.
    """
    if part.summary is not None:
        return
    part.folder.mkdir(parents=True, exist_ok=True)
    config = part.folder / "config.yaml"
    config.write_text(yaml.safe_dump(part.config, sort_keys=False), encoding="utf-8")
    checkpoints = part.folder / "checkpoints"
    whole = _newest(checkpoints)
    keeper, start = _Keeper(part), time.monotonic()
    with quiet():
        training(
            [
                "fit", "-c", str(config),
                "--trainer.default_root_dir", str(part.folder),
                "--trainer.enable_progress_bar", "false",
                "--trainer.enable_model_summary", "false",
                *(["--ckpt_path", str(whole)] if whole else []),
            ],
            [
                keeper,
                _Progress(part, tick),
                ModelCheckpoint(
                    checkpoints, filename="{step}", save_top_k=1,
                    train_time_interval=timedelta(minutes=part.minutes),
                ),
            ],
        )  # fmt: skip
    _write(part.folder / "part.json", json.dumps({
        "first": part.first, "last": part.last, "seconds": round(time.monotonic() - start, 1),
        "left_out": keeper.left_out, "losses": keeper.losses,
    }))  # fmt: skip
    shutil.rmtree(checkpoints, ignore_errors=True)


def _newest(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end."""
    whole = [path for path in folder.glob("*.ckpt") if zipfile.is_zipfile(path)]
    return max(whole, key=lambda path: path.stat().st_mtime, default=None)


def _write(path: Path, text: str) -> None:
    """At once, or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)


class _Keeper(CheckpointHarvester):
    """Harvests at the end, too, under the members' own numbers."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.bank, every_n_epochs=part.every_n_epochs or _NEVER)
        self.first, self._kept_at = part.first, -1
        self.left_out: list[int] = []
        self.losses: list[float] = []

    def _harvest(self, trainer: Any, pl_module: Any) -> None:
        super()._harvest(trainer, pl_module)
        self._kept_at = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._kept_at != trainer.global_step:
            self._harvest(trainer, pl_module)
        super().on_train_end(trainer, pl_module)
        healthy = set(pl_module.healthy().tolist())
        self.left_out = [self.first + m for m in range(pl_module.members) if m not in healthy]
        divergence = getattr(pl_module, "divergence", None)
        means = getattr(divergence, "means", None)
        self.losses = [] if means is None else [float(loss) for loss in means]


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
            _write(self.part.folder / "progress", f"{min(1.0, trainer.global_step / total):.4f}")
            self.tick()


def networks_of(part: Part) -> tuple[CheckpointBank, list[dict[str, Any]]]:
    """Its bank, and a record of every network under the number that the member has in the whole."""
    summary = part.summary or {}
    bank = CheckpointBank(part.bank, "r")
    losses = torch.tensor(summary.get("losses", []))
    records = []
    for record in bank.records:
        own = {**record, "member": part.first + record["member"]}
        if len(losses):
            own["loss"] = float(losses[record["member"]])
        records.append(own)
    return bank, records
