"""The disk: one writer for each bank, names that are durable, and room that is left."""

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


class Locked(ValueError):
    """Another process has the lock of a bank."""


class WriterLock:
    """A lock on a folder, from its construction to `release`.

    Args:
        path: the folder; it is made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(p for p in (path, *path.parents) if p.exists())
            raise ValueError(f"{file} is a file, and no folder for {path}.") from None
        check_file(path / ".lock")
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


def check_file(path: Path) -> None:
    """Refuse links and folders where a file of a bank is, or is to be."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} must be a file of its own, and is a link or a folder.")


_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def require_room(folder: Path, size: int) -> None:
    """Refuse to write so many bytes where hardly as many would be left, say for checkpoints.

    Raises:
        OSError: the same as when the disk is full.
    """
    if shutil.disk_usage(folder).free <= 2 * size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def is_full(error: BaseException) -> bool:
    """Tell whether the disk, or the user's quota on it, is used up."""
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
