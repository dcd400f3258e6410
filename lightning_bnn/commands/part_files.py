"""Files that say how far a population is: written whole, and read with doubt."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lightning_bnn.bank.disk import sync_folder
from lightning_bnn.loading import is_whole

__all__ = [
    "progress_in", "read_object", "summary_in", "whole_checkpoint", "write_progress", "write_whole",
]  # fmt: skip

_log = logging.getLogger(__name__)


def write_whole(path: Path, text: str) -> None:
    """Write a file to the disk, as a whole or not at all."""
    with _draft_of(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def write_progress(folder: Path, done: float) -> None:
    """Note how much of a part is done, from 0 to 1, without waiting for the disk."""
    with _draft_of(folder / "progress") as file:
        file.write(f"{done:.4f}")


@contextlib.contextmanager
def _draft_of(path: Path) -> Iterator[IO[str]]:
    """A file beside it, which takes its place once it is written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            yield file
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read an object from a file of JSON.

    Args:
        path: the file.
        remedy: what to do if it is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: {remedy}.")
    return content


def summary_in(folder: Path, first: int, last: int) -> dict[str, Any] | None:
    """Read the summary of a finished part, or return None while it is not finished."""
    path, remedy = folder / "part.json", "remove it, and its members are trained again"
    if not path.is_file():
        return None
    summary = read_object(path, remedy)
    left_out, losses = summary.get("left_out"), summary.get("losses")
    fits = (
        (summary.get("first"), summary.get("last")) == (first, last)
        and _is_number(summary.get("seconds"))
        and isinstance(left_out, list)
        and all(isinstance(member, int) and first <= member < last for member in left_out)
        and isinstance(losses, list)
        and all(map(_is_number, losses))
        and len(losses) in (0, last - first)
    )
    if not fits:
        raise ValueError(f"{path} is damaged: {remedy}.")
    return summary


def progress_in(folder: Path) -> float:
    """Read from its file how much of a part is done, from 0 to 1."""
    try:
        done = float((folder / "progress").read_text())
    except (OSError, ValueError):  # not begun, or torn
        return 0.0
    return min(max(done, 0.0), 1.0) if math.isfinite(done) else 0.0


def whole_checkpoint(folder: Path) -> Path | None:
    """Find the last checkpoint whose bytes are whole, and warn of damaged ones."""
    newest_first = sorted(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in newest_first:
        if is_whole(path):
            return path
        _log.warning("%s is damaged, and skipped.", path)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
