"""Atomic writes of files and folders: written beside their target, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path


@contextlib.contextmanager
def draft_of(target: Path, wait: bool = True) -> Iterator[Path]:
    """Yield a draft path beside a target, which the draft replaces at the end.

    If anything goes wrong before, the draft is removed and the target stays as it was.

    Args:
        target: a file or a folder, which may be there already.
        wait: until the draft is on the disk.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "it.txt"
    >>> with draft_of(target) as draft:
    ...     _ = draft.write_text("new")
    ...     target.exists()
    False
    >>> target.read_text()
    'new'
    """
    draft = target.with_name(f".{target.name[:200]}.{os.getpid()}")  # of a length that disks take
    _remove(draft)
    try:
        yield draft
        if wait:
            _sync_all(draft)
        _replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(draft)
        raise
    if wait:
        sync(target.parent)


def write_whole(path: Path, text: str, wait: bool = True) -> None:
    """Write a text file atomically.

    Args:
        path: the file.
        text: its new content.
        wait: until it is on the disk.
    """
    with draft_of(path, wait) as draft:
        draft.write_text(text, encoding="utf-8")


def write_all(file: FileIO, content: bytes | memoryview) -> None:
    """Write all bytes to an unbuffered file, whose writes may be partial.

    A disk with room for a part of them takes that part without an error, and then no more.

    Raises:
        OSError: the disk is full, or broken.
    """
    remaining = memoryview(content).cast("B")
    while remaining:
        count = file.write(remaining)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
        remaining = remaining[count:]


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, which Windows does by itself."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sync_all(path: Path) -> None:
    for inner in path.rglob("*") if path.is_dir() else ():
        sync(inner)
    sync(path)


def _replace(draft: Path, target: Path) -> None:
    if not target.is_dir() or target.is_symlink():
        os.replace(draft, target)
        return
    with contextlib.suppress(OSError):  # an empty folder makes room at once, on POSIX
        os.rename(draft, target)
        return
    old = draft.with_name(f"{draft.name}.old")
    os.rename(target, old)
    try:
        os.rename(draft, target)
    except BaseException:
        os.rename(old, target)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
