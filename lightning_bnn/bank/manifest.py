"""The manifest of a bank: a journal of JSON lines that describes networks and records.

Every line ends with a checksum of its text and its number, so that no change, loss or move of a
line goes unnoticed. A last line cut off by a crash is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.bank.disk import check_file
from weightsym.files import parse_json, sync, write_all
from weightsym.params import Params, check_floating_type, first_line, is_weight

FORMAT = 3
"""The format that this version writes and reads."""
_CHECK = re.compile(rb',"check":"([0-9a-f]{8})"}\n\Z')
_DAMAGES = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError
_log = logging.getLogger(__name__)


class Layout(NamedTuple):
    """The layout of one tensor of every network in a row of the file."""

    dtype: torch.dtype
    shape: torch.Size
    is_weight: bool
    stored: torch.dtype
    offset: int


class Block(NamedTuple):
    """Rows written together, with a checksum of each of their tensors."""

    start: int
    stop: int
    checks: tuple[int, ...]


class Manifest:
    """The state of a bank, read from its journal.

    Args:
        path: of the journal, created with the first entry.

    Attributes:
        dtype: type in which weights are stored, if not their own.
        layout: the tensors of a network.
        row_bytes: size of a network in the file.
        blocks: the networks, in the order of their rows.
        records: the record of each network.
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
        """Size of the file, and bytes and number of its complete entries."""
        self._seen: tuple[int, ...] = ()
        self._left = 0
        """Identity of the file when it was last read, and the number of networks it had then."""
        if self._length < self._size:
            _log.warning("%s ends in the middle of an entry, which is dropped.", path)
        for line in content[: self._length].splitlines(keepends=True):
            self._read(line)

    # -------------------------------------------------------- lines
    def _read(self, line: bytes) -> None:
        try:
            self._apply(_entry(line, self._lines))
        except _DAMAGES as error:
            raise ValueError(
                f"Line {self._lines + 1} of {self.path} is damaged ({first_line(error)}): "
                "restore a copy of the file; nothing has been changed."
            ) from None
        self._lines += 1

    def require_unchanged(self) -> None:
        """Refuse to write if another process has written, on a disk without locks."""
        if (self.path.stat().st_size if self.path.exists() else 0) != self._size:
            raise ValueError(f"{self.path} has been changed by another process: open it again.")

    def require_rows(self, stop: int) -> None:
        """Refuse to read networks that another process may have overwritten.

        Args:
            stop: end of the range of networks to read.
        """
        try:
            state = os.stat(self.path)
        except FileNotFoundError:
            rows = 0
        else:
            identity = state.st_ino, state.st_size, state.st_mtime_ns
            rows = self._left if identity == self._seen else self._rows_left()
            self._seen, self._left = identity, rows
        if rows < stop:
            raise ValueError(
                f"Another process has removed the networks of {self.path.parent} after the first "
                f"{rows}: reopen the bank, or `reload` it."
            )

    def _rows_left(self) -> int:
        """Return the number of networks that other processes have left unchanged."""
        content, rows = self.path.read_bytes(), len(self.records)
        later = content[self._length : _intact(content)].splitlines(keepends=True)
        try:
            entries = [_entry(line, self._lines + k) for k, line in enumerate(later)]
            return min([rows, *(int(e["truncate"]) for e in entries if "truncate" in e)])
        except _DAMAGES:  # another bank is there
            return 0

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry, which is on disk on return, and not in the file after an error."""
        self.require_unchanged()
        body = json.dumps(entry, separators=(",", ":")).encode()
        line = body[:-1] + f',"check":"{zlib.crc32(body, self._lines):08x}"}}\n'.encode()
        with self.path.open("ab", buffering=0) as file:
            try:
                file.truncate(self._length)
                write_all(file, line)
                os.fsync(file.fileno())
                if not self._length:
                    sync(self.path.parent)
            except BaseException:  # or the next entry would be written behind half of this one
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
        """Apply one line to the state, or raise an error with a short message."""
        if not self._lines:
            self._begin(entry)
        elif "truncate" in entry:
            self._truncate(entry["truncate"], tuple(entry["checks"]))
        else:
            self._extend(entry["records"], entry.get("rows"), entry["checks"])

    def _begin(self, entry: dict[str, Any]) -> None:
        if entry["bank"] != FORMAT:
            raise ValueError(
                f"the bank has format {entry['bank']}, but this version reads {FORMAT}"
            )
        self.dtype = entry["dtype"] and type_named(entry["dtype"])
        check_floating_type("dtype", self.dtype, optional=True)
        rows = {n: (type_named(t), torch.Size(shape), bool(w)) for n, (t, shape, w) in
                entry["tensors"].items()}  # fmt: skip
        if not rows:
            raise ValueError("it names no tensors")
        if any(size < 0 for _, shape, _ in rows.values() for size in shape):
            raise ValueError("a tensor has a negative size")
        if any(math.prod(max(1, size) for size in s) > 2**48 for _, s, _ in rows.values()):
            raise ValueError("a tensor has an impossible size")
        stored = {n: _stored_type(t, self.dtype if w else None) for n, (t, _, w) in rows.items()}
        for name in sorted(rows, key=lambda n: -stored[n].itemsize):  # starts are aligned
            self.layout[name] = Layout(*rows[name], stored[name], self.row_bytes)
            self.row_bytes += stored[name].itemsize * rows[name][1].numel()
        self.layout = {name: self.layout[name] for name in rows}
        self.row_bytes += -self.row_bytes % 8

    def _extend(self, records: list[Any], rows: int | None, checks: list[int]) -> None:
        """Add records and blocks of rows, each with a checksum of every tensor."""
        start, stop = len(self.records), len(self.records) + len(records)
        if not all(isinstance(record, dict) for record in records):
            raise ValueError("a record is not a group of values")
        step = max(1, len(records)) if rows is None else rows
        if type(step) is not int or step < 1:
            raise ValueError(f"{step!r} is not a number of rows")
        starts, count = range(start, max(stop, start + 1), step), len(self.layout)
        if len(checks) != count * len(starts):
            raise ValueError("its checksums do not match the tensors of the header")
        self.records += records
        for k, first in enumerate(starts):
            of_block = tuple(checks[k * count : (k + 1) * count])
            self.blocks.append(Block(first, min(first + step, stop), of_block))

    def _truncate(self, rows: int, checks: tuple[int, ...]) -> None:
        if len(checks) != len(self.layout):
            raise ValueError("its checksums do not match the tensors of the header")
        if type(rows) is not int or not 0 <= rows <= len(self.records):
            raise ValueError(f"{rows} networks cannot remain")
        del self.records[rows:]
        self.blocks = [block for block in self.blocks if block.start < rows]
        if self.blocks:
            self.blocks[-1] = Block(self.blocks[-1].start, rows, checks)

    # -------------------------------------------------------- networks
    def check(self, networks: Params) -> None:
        """Refuse networks with another architecture than the first ones."""
        if networks.keys() != self.layout.keys():
            odd = sorted(networks.keys() ^ self.layout.keys())[0]
            raise ValueError(
                f"The bank {self.path.parent} holds networks of another architecture: "
                f"{odd!r} is in only one."
            )
        for name, tensor in networks.items():
            dtype, shape, *_ = self.layout[name]
            if tensor.shape[1:] != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape[1:])}, but {tuple(shape)} in the bank."
                )
            if torch.promote_types(dtype, tensor.dtype) != dtype:
                raise ValueError(f"`{name}` is {tensor.dtype}, but the bank stores {dtype}.")

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a tensor to its stored dtype, on the CPU."""
        stored = self.layout[name].stored
        result = tensor.detach().to("cpu", stored)
        if _overflows(tensor, stored):
            raise ValueError(f"`{name}` is too large for {stored}: choose another `dtype`.")
        return result


def header(
    networks: Params, dtype: torch.dtype | None, weights: Sequence[str] | None
) -> dict[str, Any]:
    """Describe networks in the first entry, which fixes their architecture.

    Args:
        networks: a stack.
        dtype: of stored weights, if not their own.
        weights: names of the weights, by default those for which `is_weight` holds.
    """
    if unknown := [name for name in weights or () if name not in networks]:
        raise ValueError(f"`weights` names {unknown[0]!r}, but the networks do not have it.")
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


def _entry(line: bytes, number: int) -> Any:
    """Parse a line, and check the checksum of its text and number."""
    match = _CHECK.search(line)
    body = line if match is None else line[: match.start()] + b"}"
    if match is None or int(match[1], 16) != zlib.crc32(body, number):
        raise ValueError("it differs from its checksum")
    return parse_json(body)


def _intact(content: bytes) -> int:
    """Return the length without an incomplete end: no newline, or the zeros of a power cut."""
    length = content.rfind(b"\n") + 1
    last = content.rfind(b"\n", 0, max(0, length - 1)) + 1
    return last if b"\0" in content[last:length] else length


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_named(name: str) -> torch.dtype:
    """Return the dtype of torch with a given name, such as ``"float32"``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not _is_storable(dtype):
        raise ValueError(f"{str(name)[:80]!r} is not a numeric dtype")
    return dtype


@functools.cache
def _is_storable(dtype: torch.dtype) -> bool:
    """Return whether torch converts values to a dtype, unlike quantised and half-byte ones."""
    try:
        torch.zeros(1, device="cpu").to(dtype)
    except RuntimeError:
        return False
    return True


def _stored_type(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype on disk: the stored one for floats, their own for other tensors."""
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _overflows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether finite values would overflow or saturate in a narrower dtype.

    Numbers are compared in parts, to save memory.
    """
    if not dtype.is_floating_point or dtype == tensor.dtype:
        return False
    largest = torch.finfo(dtype).max
    parts = (piece.detach().float() if piece.dtype.itemsize == 1 else piece.detach()
             for piece in tensor.flatten().split(2**20))  # fmt: skip
    return any(bool((piece.isfinite() & (piece.abs() > largest)).any()) for piece in parts)
