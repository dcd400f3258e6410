"""Shards: safetensors files in which every tensor has a leading dimension for networks."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_bnn.bank.journal import sync_folder
from lightning_bnn.params import Params

__all__ = ["OpenShards", "Shard", "check_shard", "joined", "overlapping", "sha256", "write_shard"]


@dataclass(frozen=True)
class Shard:
    """One file of a bank, and how many of its rows count."""

    name: str
    rows: int
    size: int
    sha256: str

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Shard:
        """From an entry of the manifest."""
        return cls(entry["shard"], entry["rows"], entry["bytes"], entry["sha256"])

    def first(self, rows: int) -> Shard:
        """Only its first rows."""
        return replace(self, rows=rows)


def write_shard(folder: Path, name: str, tensors: Params) -> Shard:
    """Write a stack to a new file; complete and on disk when this returns."""
    target, temporary = folder / name, folder / f".{name}.tmp"
    save_file(_separate(tensors), temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    digest, size = sha256(temporary), temporary.stat().st_size
    os.replace(temporary, target)
    sync_folder(folder)
    return Shard(name, len(next(iter(tensors.values()))), size, digest)


def _separate(tensors: Params) -> Params:
    """Contiguous tensors on the CPU, none of which shares memory with another."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def sha256(path: Path) -> str:
    """Hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def check_shard(folder: Path, shard: Shard) -> None:
    """Refuse a shard that is missing or has another size than when it was written."""
    path = folder / shard.name
    if not path.is_file():
        raise FileNotFoundError(f"Shard {path} is missing.")
    size = path.stat().st_size
    if size != shard.size:
        raise ValueError(f"Shard {path} is corrupt: it has {size} bytes instead of {shard.size}.")


def overlapping(shards: Sequence[Shard], rows: slice) -> list[tuple[Shard, slice]]:
    """The shards that hold some rows, and where in them these are."""
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


class OpenShards:
    """Memory-mapped shards; those not used for long are closed."""

    def __init__(self, folder: Path, limit: int = 64) -> None:
        self._folder, self._limit = folder, limit
        self._open: OrderedDict[str, Any] = OrderedDict()

    def tensor(self, shard: Shard, name: str) -> Tensor:
        """One tensor of all rows, without a copy: pages are read when they are looked at."""
        handle = self._open.pop(shard.name, None) or self._map(shard)
        self._open[shard.name] = handle
        while len(self._open) > self._limit:
            self._open.popitem(last=False)
        return handle.get_tensor(name)[: shard.rows]

    def close(self) -> None:
        """Forget all files."""
        self._open.clear()

    def _map(self, shard: Shard) -> Any:
        check_shard(self._folder, shard)
        path = self._folder / shard.name
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:
            if not path.exists():  # the writer has merged it in between
                raise FileNotFoundError(f"Shard {path} is missing.") from error
            raise ValueError(f"Shard {path} is corrupt: {error}.") from error


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a stack as one; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
