"""Shards: safetensors files in which every tensor has a leading dimension for networks."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightning_bnn.bank.journal import sync_folder
from lightning_bnn.params import Params

__all__ = [
    "Shard", "check_hash", "check_shard", "checksum", "is_shard_name", "new_shard_name",
    "overlapping", "sha256", "write_shard",
]  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One file of a bank.

    Attributes:
        name: of the file, without a folder.
        rows: how many of its networks count, from the first on.
        size: in bytes.
        sha256: of the whole file.
        checks: the CRC of every tensor, so that one can be checked without reading the others.
    """

    name: str
    rows: int
    size: int
    sha256: str
    checks: Mapping[str, int]


def new_shard_name() -> str:
    """A name that no other shard has."""
    return f"shard-{uuid.uuid4().hex[:12]}.safetensors"


def is_shard_name(name: str) -> bool:
    """Whether a bank has given this name; files with other names belong to somebody else."""
    return re.fullmatch(r"shard-[0-9a-f]{12}\.safetensors", name) is not None


def write_shard(draft: Path, target: Path, tensors: Params) -> Shard:
    """Write a stack to a new file, which is complete and on disk when this returns.

    Args:
        draft: where to write; if that fails, partial files may be left beside it.
        target: where the file goes once it is complete.
        tensors: the stack.
    """
    tensors = _separate(tensors)
    try:
        save_file(tensors, draft)
    except SafetensorError as error:
        raise _system_error(error) or error from error
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    digest, size = sha256(draft), draft.stat().st_size
    os.replace(draft, target)
    sync_folder(target.parent)
    checks = {name: checksum(tensor) for name, tensor in tensors.items()}
    return Shard(target.name, len(next(iter(tensors.values()))), size, digest, checks)


def _system_error(error: SafetensorError) -> OSError | None:
    """The error of the operating system, of which safetensors keeps only the number, as text."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return None if match is None else OSError(int(match[1]), os.strerror(int(match[1])))


def _separate(tensors: Params) -> Params:
    """Contiguous tensors on the CPU, no two of which share memory."""
    storages: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return result


def checksum(tensor: Tensor) -> int:
    """The CRC of a tensor's bytes as they are in a file."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def sha256(path: Path) -> str:
    """The hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def check_shard(folder: Path, shard: Shard) -> None:
    """Refuse a shard that is missing, is a link, or no longer has the size it was written with."""
    path = folder / shard.name
    if path.is_symlink():
        raise ValueError(f"Shard {path} must be a file of its own, and is a link.")
    if not path.is_file():
        raise FileNotFoundError(f"Shard {path} is missing.")
    size = path.stat().st_size
    if size != shard.size:
        raise ValueError(f"Shard {path} is corrupt: it has {size} bytes instead of {shard.size}.")


def check_hash(folder: Path, shard: Shard) -> None:
    """Refuse a shard of which any byte has changed since it was written."""
    check_shard(folder, shard)
    if sha256(folder / shard.name) != shard.sha256:
        raise ValueError(f"Shard {folder / shard.name} is corrupt: its hash is another.")


def overlapping(shards: Sequence[Shard], rows: slice) -> list[tuple[Shard, slice]]:
    """The shards that hold some rows, and where in each of them these rows are."""
    if rows.step not in (None, 1):
        raise ValueError(f"`rows` must be a slice without a step, got {rows}.")
    start, stop, _ = rows.indices(sum(shard.rows for shard in shards))
    parts, offset = [], 0
    for shard in shards:
        low, high = max(start - offset, 0), min(stop - offset, shard.rows)
        if low < high:
            parts.append((shard, slice(low, high)))
        offset += shard.rows
    return parts
