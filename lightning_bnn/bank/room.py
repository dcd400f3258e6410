"""Full disks: noticed before the last byte is used, and told apart from other errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_full", "require_room", "explain_full_disk"]

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def require_room(folder: Path, size: int) -> None:
    """Refuse to write so many bytes where hardly as many would be left, say for checkpoints.

    Raises:
        OSError: the same as when the disk is full.
    """
    if shutil.disk_usage(folder).free <= 2 * size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def is_full(error: BaseException) -> bool:
    """Whether the disk, or the user's quota on it, is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk into one sentence for the user of a command that can be given again."""
    try:
        yield
    except Exception as error:
        if not any(map(is_full, _causes(error))):
            raise
        raise ValueError(
            f"The disk of {folder} is full: make room and give the same command again, which goes "
            "on where it was stopped."
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
