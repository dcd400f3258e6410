"""The safetensors format: lazy reading of the tensors of a file, and one writer."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightsym.networks.files.drafts import draft_of
from weightsym.networks.forward import first_line

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
        read: gives it, in pages of the file where that is mapped: clone what outlives the file.
    """

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
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
    """Read the dtypes and shapes of a safetensors file, in file order, but no values."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            rows = {name: file.get_slice(name) for name in file.offset_keys()}
            metadata = file.metadata() or {}
            check_names(path, rows)
            kinds = {name: (row.get_dtype(), row.get_shape()) for name, row in rows.items()}
    except SafetensorError as error:
        raise _damaged(path, error) from error
    content = _Content(path)
    tensors = {
        name: StoredTensor(*_checked(path, name, *entry), partial(content.read, name))
        for name, entry in kinds.items()
    }
    return TensorFile(path.name, tensors, metadata)


@dataclass(frozen=True, eq=False)
class _Content:
    """The numbers of a file, which is mapped when the first of them are read."""

    path: Path

    @cached_property
    def _mapped(self) -> Any:
        from safetensors import safe_open

        return safe_open(self.path, framework="pt").__enter__()

    def read(self, name: str) -> Tensor:
        """Return one tensor in the pages of the file."""
        from safetensors import SafetensorError

        try:
            tensor: Tensor = self._mapped.get_tensor(name)
        except SafetensorError as error:
            raise _damaged(self.path, error) from error
        return tensor


def read_bytes(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file in memory.

    Args:
        path: where it is from, for errors.
        content: of the file.
    """
    from safetensors import SafetensorError, deserialize

    try:
        rows = deserialize(content)
    except SafetensorError as error:
        raise _damaged(path, error) from error
    check_names(path, (name for name, _ in rows))
    return {name: _tensor(path, name, **row) for name, row in rows}


def _tensor(path: Path, name: str, dtype: str, shape: list[int], data: bytes | bytearray) -> Tensor:
    kind, size = _checked(path, name, dtype, shape)
    if not data:
        return torch.empty(size, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(size)


def check_names(path: Path, names: Iterable[str]) -> None:
    """Refuse names with control characters, which terminals would execute when printed."""
    bad = next((name for name in names if not name.isprintable()), None)
    if bad is not None:
        raise ValueError(f"{path} names a tensor {bad!r}, with unprintable characters.")


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a safetensors file, or is damaged: {first_line(error)}.")


def _checked(
    path: Path, name: str, dtype_name: str, shape: list[int]
) -> tuple[torch.dtype, torch.Size]:
    if dtype_name not in _TYPES:
        raise ValueError(
            f"{path}: {name!r} is of type {dtype_name}, which this package cannot read."
        )
    if math.prod(max(1, size) for size in shape) >= 2**60:
        raise ValueError(f"{path} is damaged: {name!r} has an impossible shape.")
    return _TYPES[dtype_name], torch.Size(shape)


# ------------------------------------------------------------ writing
def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a new file, and return once it is on disk.

    Args:
        path: where nothing may be.
        tensors: by name.
        metadata: for the header.
    """
    stored = {n: StoredTensor(t.dtype, t.shape, t.detach) for n, t in tensors.items()}
    write_file(path, stored, metadata or {})


def write_file(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]
) -> None:
    """Write a new file with one tensor in memory at a time, and return once it is on disk.

    The library would hold all of them, and a copy.

    Args:
        path: where nothing may be.
        tensors: by name, read when they are written.
        metadata: for the header.
    """
    check_types(path, {name: tensor.dtype for name, tensor in tensors.items()})
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # starts are aligned
    rows: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        dtype_name, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        rows[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    with draft_of(path) as draft, draft.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            numbers = tensors[name].read()
            assert (numbers.dtype, numbers.shape.numel()) == (
                tensors[name].dtype, tensors[name].shape.numel()
            ), name  # fmt: skip
            file.write(bytes_of(numbers).numpy().data)
            del numbers


def check_types(path: Path, types: Mapping[str, torch.dtype]) -> None:
    """Refuse dtypes that the format does not support.

    Args:
        path: where they shall be written.
        types: by name.
    """
    for name, dtype in types.items():
        if dtype not in _NAMES:
            raise ValueError(
                f"{name!r} is {dtype}, which safetensors files do not support: convert it before "
                f"writing to {path}."
            )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes on the CPU, without a copy if it is there and contiguous.

    >>> bytes_of(torch.ones(2, dtype=torch.int16))
    tensor([1, 0, 1, 0], dtype=torch.uint8)
    """
    numbers = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not numbers.numel():
        return torch.empty(0, dtype=torch.uint8)
    return numbers.as_strided((numbers.numel(),), (1,)).view(torch.uint8)  # one may have any stride
