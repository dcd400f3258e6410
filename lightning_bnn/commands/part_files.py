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

from lightning_bnn.bank.journal import sync_folder
from lightning_bnn.loading import is_whole

__all__ = [
    "newest_checkpoint", "progress_in", "read_object", "replace_text", "summary_in", "write_whole",
]  # fmt: skip

_log = logging.getLogger(__name__)


def write_whole(path: Path, text: str) -> None:
    """A file, at once or not at all; on disk when this returns, whatever happens then."""
    with _draft_of(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """A file, at once or not at all, without waiting for the disk."""
    with _draft_of(path) as file:
        file.write(text)


@contextlib.contextmanager
def _draft_of(path: Path) -> Iterator[IO[str]]:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            yield file
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """What a file of JSON says under names.

    Args:
        path: the file.
        remedy: what to do if it is damaged.
    """
    try:
        held = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict):
        raise ValueError(f"{path} is damaged: {remedy}.")
    return held


def summary_in(folder: Path, first: int, last: int) -> dict[str, Any] | None:
    """What a part that is finished says of its members; None while it is not."""
    path, remedy = folder / "part.json", "remove it, and its members are trained again"
    if not path.is_file():
        return None
    held = read_object(path, remedy)
    out, losses = held.get("left_out"), held.get("losses")
    fits = (
        (held.get("first"), held.get("last")) == (first, last)
        and _is_number(held.get("seconds"))
        and isinstance(out, list)
        and all(isinstance(m, int) and first <= m < last for m in out)
        and isinstance(losses, list)
        and all(map(_is_number, losses))
        and len(losses) in (0, last - first)
    )
    if not fits:
        raise ValueError(f"{path} is damaged: {remedy}.")
    return held


def progress_in(folder: Path) -> float:
    """How much of a part is done, from 0 to 1, as far as it tells."""
    try:
        told = float((folder / "progress").read_text())
    except (OSError, ValueError):  # not begun, or torn
        return 0.0
    return min(max(told, 0.0), 1.0) if math.isfinite(told) else 0.0


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint whose bytes are as they were written; damaged ones are told."""
    found = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        if is_whole(path):
            return path
        _log.warning("%s is damaged, and skipped.", path)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
