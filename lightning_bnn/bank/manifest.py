"""The manifest of a bank: a journal of JSON lines, and the files and records that they add up to.

Every line ends with a checksum of its text and its number, so that none is changed, lost or moved
unnoticed. A last line that a crash has cut off is dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_bnn.bank.disk import sync_folder
from lightning_bnn.bank.shards import Layout, Shard, is_shard_name, overlapping
from lightning_bnn.params import Params, is_weight

__all__ = ["FORMAT", "Manifest", "check_records", "header"]

FORMAT = 2
"""The format that this version writes and reads."""
_CHECK = re.compile(rb',"check":"([0-9a-f]{8})"}\n\Z')
_log = logging.getLogger(__name__)


class Manifest:
    """The state of a bank, and the file that it is read from.

    Args:
        path: the file; it is made when the first entry is written.

    Attributes:
        dtype: the type in which floating tensors are stored, if not their own.
        layout: the tensors of a network.
        shards: the files, in the order of their rows.
        records: what is known of each network.
        named: every file that there ever was; those that are no longer among the shards have been
            merged or truncated away.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dtype: torch.dtype | None = None
        self.layout: dict[str, Layout] = {}
        self.shards: list[Shard] = []
        self.records: list[dict[str, Any]] = []
        self.named: set[str] = set()
        content = _content(path)
        self._size, self._length, self._lines = len(content), _intact(content), 0
        """Bytes of the file, and bytes and number of its whole entries."""
        if self._length < self._size:
            _log.warning("%s ends in the middle of an entry, which is dropped.", path)
        for line in content[: self._length].splitlines(keepends=True):
            self._read(line)

    @property
    def replaced(self) -> set[str]:
        """Files whose networks are in other files now, or were truncated away."""
        return self.named - {shard.name for shard in self.shards}

    # -------------------------------------------------------- lines
    def _read(self, line: bytes) -> None:
        match = _CHECK.search(line)
        body = line if match is None else line[: match.start()] + b"}"
        intact = match is not None and int(match[1], 16) == zlib.crc32(body, self._lines)
        version = re.match(rb'{"bank":(\d+),', body)
        if intact and version is not None and int(version[1]) != FORMAT:
            raise ValueError(
                f"The bank {self.path.parent} has format {int(version[1])}, and this version of "
                f"lightning_bnn reads format {FORMAT}: export its networks with the version that "
                "wrote them."
            )
        try:
            if not intact:
                raise ValueError("it is not as it was written")
            self._apply(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"Line {self._lines + 1} of {self.path} is damaged ({error}): put back a copy of "
                "the file; nothing has been changed."
            ) from None
        self._lines += 1

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry: it is on disk when this returns, and not in the file if this raises."""
        body = json.dumps(entry, separators=(",", ":")).encode()
        line = body[:-1] + f',"check":"{zlib.crc32(body, self._lines):08x}"}}\n'.encode()
        with self.path.open("ab", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self._size:
                raise ValueError(f"{self.path} has been changed by another process: open it anew.")
            try:
                file.truncate(self._length)
                if file.write(line) != len(line):
                    raise OSError(f"Only a part of an entry could be written to {self.path}.")
                os.fsync(file.fileno())
                if not self._length:
                    sync_folder(self.path.parent)
            except OSError:  # or the next entry would be written behind half of this one
                file.truncate(self._length)
                with contextlib.suppress(OSError):
                    os.fsync(file.fileno())
                self._size = self._length
                raise
        self._length = self._size = self._length + len(line)
        self._apply(entry)
        self._lines += 1

    # -------------------------------------------------------- entries
    def _apply(self, entry: Any) -> None:
        """Change the state as one line says, or raise an error whose message is half a sentence."""
        match entry:
            case {"bank": int(), "dtype": dtype, "tensors": dict(tensors)} if not self._lines:
                self.dtype = None if dtype is None else _type(dtype)
                self.layout = {name: _layout(row) for name, row in tensors.items()}
            case {"truncate": rows} if _is_count(rows) and rows <= len(self.records):
                del self.records[rows:]
                remaining = overlapping(self.shards, slice(rows))
                self.shards = [replace(shard, rows=part.stop) for shard, part in remaining]
            case {"records": list(records)} if all(isinstance(r, dict) for r in records):
                self.shards.append(self._shard(entry, len(records)))
                self.records += records
            case {"merge": [str(), *_] as merged}:
                names = [shard.name for shard in self.shards]
                first = names.index(merged[0]) if merged[0] in names else 0
                joined = slice(first, first + len(merged))
                if names[joined] != merged:
                    raise ValueError("the files that are merged are not those of the bank")
                rows = sum(shard.rows for shard in self.shards[joined])
                self.shards[joined] = [self._shard(entry, rows)]
            case _:
                raise ValueError("it is no entry of a bank")

    def _shard(self, entry: Mapping[str, Any], rows: int) -> Shard:
        """Read what an entry says of a new file, whose name leads to no other folder."""
        name, size, checks = (entry.get(key) for key in ("shard", "bytes", "checks"))
        if not isinstance(name, str) or not is_shard_name(name) or name in self.named:
            raise ValueError(f"'shard' cannot be {str(name)[:80]!r}")
        if entry.get("rows") != rows or not _is_count(size):
            raise ValueError(f"{name} has other rows or bytes than it could have")
        if not isinstance(checks, dict) or checks.keys() != self.layout.keys():
            raise ValueError(f"{name} holds other tensors than the header tells")
        self.named.add(name)
        return Shard(name, rows, size, checks)

    # -------------------------------------------------------- networks
    def stored_layout(self, name: str) -> Layout:
        """Describe one tensor as it is in the files."""
        layout = self.layout[name]
        return layout._replace(dtype=self.dtype) if self.dtype and layout.is_weight else layout

    def check(self, networks: Params) -> None:
        """Refuse networks of another kind than the first ones."""
        if networks.keys() != self.layout.keys():
            odd = sorted(networks.keys() ^ self.layout.keys())[0]
            raise ValueError(
                f"The bank {self.path.parent} holds other networks: {odd!r} is in only one."
            )
        for name, tensor in networks.items():
            dtype, shape, _ = self.layout[name]
            if tensor.shape[1:] != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape[1:])}, in the bank {tuple(shape)}."
                )
            if torch.promote_types(dtype, tensor.dtype) != dtype:
                raise ValueError(f"`{name}` is {tensor.dtype}, the bank keeps {dtype}.")

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a tensor, unless it is a buffer, to the type in which it is stored."""
        result = tensor.to(self.stored_layout(name).dtype)
        if self.dtype == torch.float16 and bool((result.isinf() & ~tensor.isinf()).any()):
            raise ValueError(f"`{name}` is too large for torch.float16: use torch.bfloat16.")
        return result


def header(
    networks: Params, dtype: torch.dtype | None, weights: Sequence[str] | None
) -> dict[str, Any]:
    """Describe networks in the first entry: they decide what all others look like.

    Args:
        networks: a stack.
        dtype: of stored weights, if not their own.
        weights: names of the tensors that count as weights, by default those of `is_weight`.
    """
    tensors = {
        name: [
            _name(t.dtype),
            list(t.shape[1:]),
            is_weight(name, t) if weights is None else name in weights,
        ]
        for name, t in networks.items()
    }
    return {"bank": FORMAT, "dtype": dtype and _name(dtype), "tensors": tensors}


def check_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse records that are not plain JSON, before anything is written."""
    try:
        json.dumps([dict(record) for record in records])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`records` must be plain JSON: {error}.") from None


def _content(path: Path) -> bytes:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} must be a file of its own, and is a link or a folder.")
    return path.read_bytes() if path.exists() else b""


def _intact(content: bytes) -> int:
    """Return the length without a torn end: no newline, or the zeros of a power cut."""
    length = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(0, length - 1)) + 1
    return last if b"\0" in content[last:length] else length


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{str(name)[:80]!r} is no type of numbers")
    return dtype


def _layout(row: Any) -> Layout:
    match row:
        case [dtype, list(shape), bool(is_weight)] if all(map(_is_count, shape)):
            return Layout(_type(dtype), torch.Size(shape), is_weight)
    raise ValueError(f"{str(row)[:80]!r} describes no tensor")
