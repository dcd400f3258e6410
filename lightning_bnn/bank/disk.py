"""Disk access: one writer per bank, durable names, and free space."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class WriterLock:
    """A lock on a folder, held from construction to `release`.

    Args:
        path: the folder, created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(p for p in (path, *path.parents) if p.exists())
            raise ValueError(f"{file} is a file, not the folder needed for {path}.") from None
        check_file(path / ".lock")
        self._file: IO[str] | None = (path / ".lock").open("a")
        try:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"The bank {path} is open for appending in another process; mode='r' reads it."
            ) from None
        except (ImportError, OSError):  # no such locks on Windows, and on some shared disks
            return
        _LOCKS.add(self)

    def release(self) -> None:
        """Release the lock for other processes."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _release_in_child() -> None:
    """Release the lock in a forked child (a data loader's worker) when its parent is killed."""
    for lock in list(_LOCKS):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def check_file(path: Path) -> None:
    """Refuse links and folders in place of a file of a bank."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} must be a regular file, but is a link or a folder.")


_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def require_room(folder: Path, size: int) -> None:
    """Raise an error if a write would leave too little free disk space.

    Raises:
        OSError: the same as when the disk is full.
    """
    if shutil.disk_usage(folder).free <= 2 * size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def is_full(error: BaseException) -> bool:
    """Return whether the disk, or the user's quota on it, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Explain a full disk to the user of a command that can be resumed."""
    try:
        yield
    except Exception as error:
        if not any(map(is_full, _causes(error))):
            raise
        raise ValueError(
            f"The disk of {folder} is full: free some space and run the same command "
            "again, which continues where it stopped."
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
