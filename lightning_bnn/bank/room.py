"""A full disk: known before it is full to the last byte, and told from other errors."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

__all__ = ["is_full", "require_room"]

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def require_room(folder: Path, size: int) -> None:
    """Refuse to write some bytes where little more would be left for others, as checkpoints are.

    Raises:
        OSError: the same as when the disk is full.
    """
    if shutil.disk_usage(folder).free <= 2 * size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def is_full(error: BaseException) -> bool:
    """Whether the disk, or what a user may have of it, is used up."""
    return isinstance(error, OSError) and error.errno in _FULL
