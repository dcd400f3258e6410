"""The checkpoint to judge with where none is named: the newest of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bnn.loading import load

__all__ = ["checkpoint_folders", "newest_checkpoint"]


def checkpoint_folders(trainer: Any, configs: Iterable[str | Path]) -> list[Path]:
    """Where a run has left its checkpoints.

    The folder that its checkpoint callback was given; else beside its configuration, which is saved
    with its logs; else those of all runs below its logger's folder.

    Args:
        trainer: made as for the run.
        configs: files of the configuration.
    """
    callbacks = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    given = [Path(c.dirpath) for c in callbacks if c.dirpath is not None]
    beside = [Path(config).parent / "checkpoints" for config in configs]
    folders = given or [folder for folder in beside if folder.is_dir()]
    if folders:
        return folders
    root = Path(trainer.default_root_dir)
    if not trainer.loggers:
        return [root / "checkpoints"]
    logger = trainer.loggers[0]
    runs = Path(logger.save_dir or root) / str(logger.name)
    return sorted(runs.glob("*/checkpoints"))


def newest_checkpoint(folders: Sequence[Path], kind: str) -> Path | None:
    """The checkpoint of a module of one class that was written last; None if there is none.

    Args:
        folders: where to look.
        kind: name of the class of the module.
    """
    every = [path for folder in folders for path in folder.glob("*.ckpt")]
    newest = sorted(every, key=lambda path: (path.stat().st_mtime, path.name), reverse=True)
    return next((path for path in newest if _kind_in(path) in (kind, None)), None)


def _kind_in(path: Path) -> str | None:
    """The class that a checkpoint is of; None if it does not say, or cannot be read as it is."""
    try:
        content = load(path, mmap=True)
    except ValueError:  # whoever loads it says what is wrong
        return None
    return content.get("lightning_bnn", {}).get("class") if isinstance(content, dict) else None
