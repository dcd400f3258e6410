"""An append-only file of JSON lines: entries survive a crash, and no byte changes unnoticed.

Every line ends with the CRC of all bytes before it and of its own, so that the lines after it
reveal whether it has been changed, lost or moved.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Journal", "sync_folder"]

_CHECK = re.compile(rb',"check":"([0-9a-f]{8})"}\n\Z')
_log = logging.getLogger(__name__)


class Journal:
    """Entries that survive a crash at any moment.

    Args:
        path: the file; it is made when the first entry is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._length = self._size = self._crc = 0
        """Bytes of all whole entries, bytes of the file, and the CRC of the former."""

    @property
    def is_torn(self) -> bool:
        """Whether a crash has cut off the last entry; the next one that is written replaces it."""
        return self._length < self._size

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """All entries with their line numbers; a torn one is left out, with one warning."""
        content = self._content()
        self._size, self._length, self._crc = len(content), _intact(content), 0
        if self.is_torn:
            _log.warning("%s ends in the middle of an entry, which is dropped.", self.path)
        for number, line in enumerate(content[: self._length].splitlines(keepends=True), 1):
            body, check = _split(line)
            entry = _parsed(body) if check == zlib.crc32(body, self._crc) else None
            if entry is None:
                raise self.damaged(number, "it is not as it was written")
            self._crc = zlib.crc32(line, self._crc)
            yield number, entry

    def damaged(self, line: int, why: str) -> ValueError:
        """The error for a line that cannot be trusted."""
        return ValueError(
            f"Line {line} of {self.path} is damaged ({why}): put back a copy of the file; nothing "
            "has been changed."
        )

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry: it is on disk when this returns, and not in the file if this raises."""
        body = json.dumps(entry, separators=(",", ":"), allow_nan=True).encode()
        check = zlib.crc32(body, self._crc)
        line = body[:-1] + f',"check":"{check:08x}"}}\n'.encode()
        with self.path.open("ab", buffering=0) as file:
            self._cut(file)
            try:
                if file.write(line) != len(line):
                    raise OSError(f"Only a part of an entry could be written to {self.path}.")
                os.fsync(file.fileno())
                if not self._length:
                    sync_folder(self.path.parent)
            except OSError:
                self._size = os.fstat(file.fileno()).st_size
                self._cut(file)  # or the next entry would be written behind half of this one
                raise
        self._length = self._size = self._length + len(line)
        self._crc = zlib.crc32(line, self._crc)

    def _cut(self, file: BinaryIO) -> None:
        """Remove what follows the last whole entry."""
        size = os.fstat(file.fileno()).st_size
        if size not in (self._length, self._size):
            raise ValueError(f"{self.path} has been changed by another process: open it anew.")
        if size > self._length:
            file.truncate(self._length)
            os.fsync(file.fileno())
        self._size = self._length

    def _content(self) -> bytes:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ValueError(f"{self.path} must be a file of its own, and is a link or a folder.")
        return self.path.read_bytes() if self.path.exists() else b""


def _intact(content: bytes) -> int:
    """The length without a torn end: one without a newline, or with the zeros of a power cut."""
    length = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(0, length - 1)) + 1
    return last if b"\0" in content[last:length] else length


def _split(line: bytes) -> tuple[bytes, int | None]:
    """A line as it was before its CRC was put in, and the CRC if it has one."""
    match = _CHECK.search(line)
    return (line, None) if match is None else (line[: match.start()] + b"}", int(match[1], 16))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; Windows, where this is impossible, does so by itself."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
