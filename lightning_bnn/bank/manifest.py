"""The manifest of a bank: a journal of JSON lines, and the networks and records they add up to.

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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.bank.disk import check_file
from weightsym.files import parse_json, sync
from weightsym.params import Params, is_weight

__all__ = ["FORMAT", "Block", "Layout", "Manifest", "check_records", "header"]

FORMAT = 3
"""The format that this version writes and reads."""
_CHECK = re.compile(rb',"check":"([0-9a-f]{8})"}\n\Z')
_log = logging.getLogger(__name__)


class Layout(NamedTuple):
    """One tensor of every network, and how a row of the file holds it."""

    dtype: torch.dtype
    shape: torch.Size
    is_weight: bool
    stored: torch.dtype
    offset: int


class Block(NamedTuple):
    """Rows that were written together, with a checksum of each of their tensors."""

    start: int
    stop: int
    checks: tuple[int, ...]


class Manifest:
    """The state of a bank, and the journal that it is read from.

    Args:
        path: of the journal; it is made when the first entry is written.

    Attributes:
        dtype: the type in which weights are stored, if not their own.
        layout: the tensors of a network.
        row_bytes: the size of a network in the file.
        blocks: the networks, in the order of their rows.
        records: what is known of each network.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dtype: torch.dtype | None = None
        self.layout: dict[str, Layout] = {}
        self.row_bytes = 0
        self.blocks: list[Block] = []
        self.records: list[dict[str, Any]] = []
        check_file(path)
        content = path.read_bytes() if path.exists() else b""
        self._size, self._length, self._lines = len(content), _intact(content), 0
        """Bytes of the file, and bytes and number of its whole entries."""
        if self._length < self._size:
            _log.warning("%s ends in the middle of an entry, which is dropped.", path)
        for line in content[: self._length].splitlines(keepends=True):
            self._read(line)

    # -------------------------------------------------------- lines
    def _read(self, line: bytes) -> None:
        match = _CHECK.search(line)
        body = line if match is None else line[: match.start()] + b"}"
        try:
            if match is None or int(match[1], 16) != zlib.crc32(body, self._lines):
                raise ValueError("it is not as it was written")
            self._apply(parse_json(body))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"Line {self._lines + 1} of {self.path} is damaged ({error}): put back a copy of "
                "the file; nothing has been changed."
            ) from None
        self._lines += 1

    def require_unchanged(self) -> None:
        """Refuse to write where another process has written, on a disk without locks."""
        if (self.path.stat().st_size if self.path.exists() else 0) != self._size:
            raise ValueError(f"{self.path} has been changed by another process: open it anew.")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry: it is on disk when this returns, and not in the file if this raises."""
        self.require_unchanged()
        body = json.dumps(entry, separators=(",", ":")).encode()
        line = body[:-1] + f',"check":"{zlib.crc32(body, self._lines):08x}"}}\n'.encode()
        with self.path.open("ab", buffering=0) as file:
            try:
                file.truncate(self._length)
                if file.write(line) != len(line):
                    raise OSError(f"Only a part of an entry could be written to {self.path}.")
                os.fsync(file.fileno())
                if not self._length:
                    sync(self.path.parent)
            except OSError:  # or the next entry would be written behind half of this one
                file.truncate(self._length)
                with contextlib.suppress(OSError):
                    os.fsync(file.fileno())
                self._size = self._length
                raise
        self._length = self._size = self._length + len(line)
        self._apply(json.loads(body))
        self._lines += 1

    # -------------------------------------------------------- entries
    def _apply(self, entry: dict[str, Any]) -> None:
        """Change the state as one line says, or raise an error whose message is half a sentence."""
        if not self._lines:
            self._begin(entry)
        elif "truncate" in entry:
            self._truncate(entry["truncate"], _checks(entry, self.layout))
        else:
            records, start = entry["records"], len(self.records)
            if not all(isinstance(record, dict) for record in records):
                raise ValueError("a record is not a group of values")
            self.records += records
            self.blocks.append(Block(start, len(self.records), _checks(entry, self.layout)))

    def _begin(self, entry: dict[str, Any]) -> None:
        if entry["bank"] != FORMAT:
            raise ValueError(f"the bank has format {entry['bank']}, this version reads {FORMAT}")
        self.dtype = entry["dtype"] and _type(entry["dtype"])
        rows = {n: (_type(t), torch.Size(shape), bool(w)) for n, (t, shape, w) in
                entry["tensors"].items()}  # fmt: skip
        if any(size < 0 for _, shape, _ in rows.values() for size in shape):
            raise ValueError("a tensor has a negative size")
        stored = {n: (w and self.dtype) or t for n, (t, _, w) in rows.items()}
        for name in sorted(rows, key=lambda n: -stored[n].itemsize):  # starts are aligned
            self.layout[name] = Layout(*rows[name], stored[name], self.row_bytes)
            self.row_bytes += stored[name].itemsize * rows[name][1].numel()
        self.layout = {name: self.layout[name] for name in rows}
        self.row_bytes += -self.row_bytes % 8

    def _truncate(self, rows: int, checks: tuple[int, ...]) -> None:
        if type(rows) is not int or not 0 <= rows <= len(self.records):
            raise ValueError(f"{rows} networks cannot be left")
        del self.records[rows:]
        self.blocks = [block for block in self.blocks if block.start < rows]
        if self.blocks:
            self.blocks[-1] = Block(self.blocks[-1].start, rows, checks)

    # -------------------------------------------------------- networks
    def check(self, networks: Params) -> None:
        """Refuse networks of another kind than the first ones."""
        if networks.keys() != self.layout.keys():
            odd = sorted(networks.keys() ^ self.layout.keys())[0]
            raise ValueError(
                f"The bank {self.path.parent} holds other networks: {odd!r} is in only one."
            )
        for name, tensor in networks.items():
            dtype, shape, *_ = self.layout[name]
            if tensor.shape[1:] != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape[1:])}, in the bank {tuple(shape)}."
                )
            if torch.promote_types(dtype, tensor.dtype) != dtype:
                raise ValueError(f"`{name}` is {tensor.dtype}, the bank keeps {dtype}.")

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a tensor to the type in which it is stored, on the CPU."""
        result = tensor.detach().to("cpu", self.layout[name].stored)
        if self.dtype == torch.float16 and bool((result.isinf() & ~tensor.cpu().isinf()).any()):
            raise ValueError(f"`{name}` is too large for torch.float16: use torch.bfloat16.")
        return result


def header(
    networks: Params, dtype: torch.dtype | None, weights: Sequence[str] | None
) -> dict[str, Any]:
    """Describe networks in the first entry, which decides what all others look like.

    Args:
        networks: a stack.
        dtype: of stored weights, if not their own.
        weights: names of the tensors that count as weights, by default those of `is_weight`.
    """
    if unknown := [name for name in weights or () if name not in networks]:
        raise ValueError(f"`weights` names {unknown[0]!r}, which the networks do not have.")
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


def _checks(entry: dict[str, Any], layout: Mapping[str, Layout]) -> tuple[int, ...]:
    checks = tuple(entry["checks"])
    if len(checks) != len(layout):
        raise ValueError("it has checksums of other tensors than the header")
    return checks


def _intact(content: bytes) -> int:
    """Return the length without a torn end: no newline, or the zeros of a power cut."""
    length = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(0, length - 1)) + 1
    return last if b"\0" in content[last:length] else length


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:80]!r} is no type of numbers")
    return dtype
