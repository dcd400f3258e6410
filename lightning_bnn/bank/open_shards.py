"""Shards mapped into memory; each tensor is checked when it is read for the first time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_bnn.bank.entries import Layout
from lightning_bnn.bank.shards import Shard, check_hash, check_shard, checksum

__all__ = ["OpenShards", "joined"]


class OpenShards:
    """Memory-mapped shards; those not used for long are closed.

    Args:
        folder: where they are.
        limit: how many may be open.
    """

    def __init__(self, folder: Path, limit: int = 64) -> None:
        self._folder, self._limit = folder, limit
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._sound: set[tuple[str, str]] = set()

    def tensor(self, shard: Shard, name: str, expected: Layout) -> Tensor:
        """One tensor of all rows, without a copy: after the first time, pages are read when needed.

        Args:
            shard: the file.
            name: of the tensor.
            expected: its type and shape without rows.
        """
        handle = self._open.pop(shard.name, None) or self._map(shard)
        self._open[shard.name] = handle
        while len(self._open) > self._limit:
            self._open.popitem(last=False)
        try:
            tensor = handle.get_tensor(name)
        except (SafetensorError, RuntimeError) as error:
            raise self._corrupt(shard, str(error)) from error
        if (shard.name, name) not in self._sound:
            self._check(shard, name, tensor, expected)
            self._sound.add((shard.name, name))
        return tensor[: shard.rows]

    def close(self) -> None:
        """Forget all files."""
        self._open.clear()

    def _check(self, shard: Shard, name: str, tensor: Tensor, expected: Layout) -> None:
        if shard.checks is None:
            check_hash(self._folder, shard)
        elif checksum(tensor) != shard.checks[name]:
            raise self._corrupt(shard, f"the hash of {name!r} is another")
        found = tensor.dtype, tensor.shape[1:]
        if found != (expected.dtype, expected.shape) or len(tensor) < shard.rows:
            raise self._corrupt(shard, f"{name!r} has {tuple(tensor.shape)} {tensor.dtype}")

    def _map(self, shard: Shard) -> Any:
        check_shard(self._folder, shard)
        path = self._folder / shard.name
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:
            if not path.exists():  # the writer has merged it in between
                raise FileNotFoundError(f"Shard {path} is missing.") from error
            raise self._corrupt(shard, str(error)) from error

    def _corrupt(self, shard: Shard, why: str) -> ValueError:
        return ValueError(f"Shard {self._folder / shard.name} is corrupt: {why}.")


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a stack as one; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
