"""An append-only file of JSON lines: what was written is on disk, a torn end is dropped."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

__all__ = ["Journal", "sync_folder"]

_log = logging.getLogger(__name__)


class Journal:
    """Entries that survive a crash at any moment.

    Args:
        path: the file; it is made when the first entry is written.
        writable: whether a torn last line, left by a crash, is cut off the file.
    """

    def __init__(self, path: Path, writable: bool) -> None:
        self.path, self._writable = path, writable

    def read(self) -> list[dict[str, Any]]:
        """All entries; a torn last line is left out, with one warning."""
        entries, intact = self._read()
        if self._writable and intact is not None:
            with self.path.open("r+b") as file:
                file.truncate(intact)
                os.fsync(file.fileno())
        return entries

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry; on disk when this returns."""
        line = json.dumps(entry, separators=(",", ":"), allow_nan=True).encode() + b"\n"
        new = not self.path.exists()
        with self.path.open("ab", buffering=0) as file:
            length = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(f"Only a part of an entry could be written to {self.path}.")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(length)  # or the next entry would be written behind half of this one
                raise
        if new:
            sync_folder(self.path.parent)

    def _read(self) -> tuple[list[dict[str, Any]], int | None]:
        """All entries, and the length of the intact part if the end is torn."""
        content = self.path.read_bytes() if self.path.exists() else b""
        intact = content.rfind(b"\n") + 1
        entries: list[dict[str, Any]] = []
        lines = content[:intact].splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            entry = _parse(line)
            if entry is None and number < len(lines):
                raise ValueError(f"Line {number} of {self.path} is damaged.")
            if entry is None:
                intact -= len(line)
            else:
                entries.append(entry)
        if intact == len(content):
            return entries, None
        _log.warning("%s ends in the middle of an entry, which is dropped.", self.path)
        return entries, intact


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a system without that (Windows) does it by itself."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
