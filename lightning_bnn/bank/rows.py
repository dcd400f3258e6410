"""Networks as rows of bytes, in blocks of bounded memory with checksums of their tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from io import FileIO

import torch
from torch import Tensor

from lightning_bnn.bank.manifest import Layout
from weightsym.files import bytes_of, write_all

_PIECE = 2**24


def rows_per_block(row_bytes: int) -> int:
    """Return the number of networks that are written, and later checked, together."""
    return max(1, _PIECE // max(1, row_bytes))


def write_block(
    file: FileIO,
    layout: Mapping[str, Layout],
    row_bytes: int,
    tensor_of: Callable[[str], Tensor],
    count: int,
) -> list[int]:
    """Write networks at the position of a file, and return the checksums of their tensors.

    Args:
        file: unbuffered.
        layout: of a row.
        row_bytes: the size of a row.
        tensor_of: returns a tensor of all these networks by name, as stored.
        count: number of networks, at most `rows_per_block`.
    """
    if count * row_bytes <= _PIECE:  # small networks at once
        content, checks_of = torch.zeros(count, row_bytes, dtype=torch.uint8), list[int]()
        for name, row in layout.items():
            raw = bytes_of(tensor_of(name))
            width = raw.numel() // count
            content[:, row.offset : row.offset + width] = raw.view(count, width)
            checks_of.append(zlib.crc32(raw.numpy().data))
        write_all(file, content.numpy().data.cast("B"))
        return checks_of
    checks, end = dict.fromkeys(layout, 0), file.tell() + row_bytes
    for name in sorted(layout, key=lambda name: layout[name].offset):
        for piece in _pieces(tensor_of(name)):
            write_all(file, piece)
            checks[name] = zlib.crc32(piece, checks[name])
    write_all(file, bytes(end - file.tell()))
    return list(checks.values())


def checksum(tensor: Tensor) -> int:
    """Return the checksum of one tensor of some networks, with one piece in memory at a time."""
    check = 0
    for piece in _pieces(tensor):
        check = zlib.crc32(piece, check)
    return check


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of some networks, ``(rows, *shape)``, in bounded pieces."""
    size = tensor.shape[1:].numel()
    flat = tensor.reshape(len(tensor), size)
    rows = rows_per_block(size * tensor.dtype.itemsize)
    columns = max(1, _PIECE // tensor.dtype.itemsize if rows == 1 else size)
    for start in range(0, len(tensor), rows):
        for first in range(0, size, columns):
            piece = flat[start : start + rows, first : first + columns]
            yield bytes_of(piece).numpy().data
