"""One writer per bank: a lock that ends with the process, and that its children do not inherit."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import IO

__all__ = ["Locked", "WriterLock"]

_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class Locked(ValueError):
    """Another process has the lock of a bank."""


class WriterLock:
    """A lock on a folder, from its construction to `release`.

    Args:
        path: the folder; it is made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if (path / ".lock").is_symlink():
            raise ValueError(f"{path / '.lock'} must be a file of its own, and is a link.")
        self._file: IO[str] | None = (path / ".lock").open("a")
        try:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise Locked(
                f"The bank {path} is open for appending in another process; mode='r' reads it."
            ) from None
        except (ImportError, OSError):  # no such locks on Windows, and on some shared disks
            return
        _LOCKS.add(self)

    def release(self) -> None:
        """Let another process take the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _release_in_child() -> None:
    """A forked child (a data loader's worker) must not keep the lock when its parent is killed."""
    for lock in list(_LOCKS):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
