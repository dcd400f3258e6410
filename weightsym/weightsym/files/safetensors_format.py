"""The safetensors format: the header of a file, one tensor of it, and the one writer of files.

A file is the length of a header (8 bytes), the header (JSON: type, shape and place of every
tensor), and all numbers. The library of this name reads tensors one by one, but its memory maps
count as memory once they are touched, and it writes whole networks only.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

__all__ = ["StoredTensor", "TensorFile", "check_names", "read_file", "save_tensors", "write_file"]

_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor on disk.

    Attributes:
        dtype: its type.
        shape: its shape.
        read: gives it, into memory of its own.
    """

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """The size of its numbers in bytes."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class TensorFile:
    """One file of a network.

    Attributes:
        name: of the file.
        tensors: what is in it, in the order of the file.
        metadata: what its header says besides.
    """

    name: str
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


# ------------------------------------------------------------ reading
def read_file(path: Path) -> TensorFile:
    """Read the header of a safetensors file, which the library has checked, and no numbers."""
    _check(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", None) or {}
    check_names(path, header)
    rows = sorted(header.items(), key=lambda row: row[1]["data_offsets"])
    tensors = {name: _stored(path, name, row, 8 + length) for name, row in rows}
    return TensorFile(path.name, tensors, metadata)


def check_names(path: Path, names: Iterable[str]) -> None:
    """Refuse names with control characters, which terminals obey when they are printed."""
    bad = next((name for name in names if not name.isprintable()), None)
    if bad is not None:
        raise ValueError(f"{path} names a tensor {bad!r}, with characters that cannot be printed.")


def _check(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or it is damaged: {error}.") from error


def _stored(path: Path, name: str, row: dict[str, object], data: int) -> StoredTensor:
    type_name, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    if type_name not in _TYPES:
        raise ValueError(
            f"{path}: {name!r} is of type {type_name}, which this package cannot read."
        )
    if max(shape, default=0) >= 2**63:
        raise ValueError(f"{path} is damaged: {name!r} has a shape that no tensor can have.")
    dtype, size, start = _TYPES[type_name], torch.Size(shape), data + offsets[0]
    return StoredTensor(dtype, size, lambda: _read(path, start, dtype, size))


def _read(path: Path, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """One tensor, without a memory map: what is mapped stays in memory once it is touched."""
    numbers = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    with path.open("rb") as file:
        file.seek(start)
        if file.readinto(numbers.numpy().data) != len(numbers):
            raise ValueError(f"{path} is damaged: it ends before its last tensor.")
    return numbers.view(dtype).reshape(shape)


# ------------------------------------------------------------ writing
def write_file(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    metadata: Mapping[str, str],
    value: Callable[[str], Tensor],
) -> dict[str, int]:
    """Write a file that is new, tensor by tensor, and return once it is on the disk.

    Args:
        path: where nothing may be.
        tensors: the types and shapes.
        metadata: for the header.
        value: gives the tensor of a name; only one is held at a time.

    Returns:
        The CRC of every tensor.
    """
    checks = {}
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # starts are aligned
    with path.open("xb") as file:
        _write_header(file, {name: tensors[name] for name in order}, metadata)
        for name in order:
            numbers = value(name)
            expected = tensors[name]
            assert (numbers.dtype, numbers.shape) == (expected.dtype, expected.shape), name
            flat = numbers.detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
            file.write(content)
            checks[name] = zlib.crc32(content)
            del numbers, flat, content
        file.flush()
        os.fsync(file.fileno())
    return checks


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Write tensors to a file that is new.

    Args:
        path: where nothing may be.
        tensors: by name.
        metadata: for the header.

    Returns:
        The CRC of every tensor.
    """
    stored = {n: StoredTensor(t.dtype, t.shape, t.detach) for n, t in tensors.items()}
    return write_file(path, stored, metadata or {}, tensors.__getitem__)


def _write_header(
    file: BinaryIO, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]
) -> None:
    rows: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        kind, shape = _NAMES[tensor.dtype], list(tensor.shape)
        rows[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
