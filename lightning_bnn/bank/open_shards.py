"""Shards mapped into memory; each tensor is checked when it is read for the first time."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_bnn.bank.entries import Layout
from lightning_bnn.bank.shards import Shard, check_shard, checksum

__all__ = ["OpenShards"]

_MOST_OPEN = 64


class OpenShards:
    """Memory-mapped shards; those that have not been used for longest are closed first.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._checked: set[tuple[str, str]] = set()

    def tensor(self, shard: Shard, name: str, layout: Layout) -> Tensor:
        """One tensor of all rows, without a copy: after its first use, pages are read when needed.

        Args:
            shard: the file.
            name: of the tensor.
            layout: the type and shape that the tensor must have.
        """
        file = self._open.pop(shard.name, None) or self._map(shard)
        self._open[shard.name] = file
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, RuntimeError) as error:
            raise self._corrupt(shard, str(error)) from error
        if (shard.name, name) not in self._checked:
            self._check(shard, name, tensor, layout)
            self._checked.add((shard.name, name))
        return tensor[: shard.rows]

    def close(self) -> None:
        """Close all files; they are opened again when needed."""
        self._open.clear()

    def _check(self, shard: Shard, name: str, tensor: Tensor, layout: Layout) -> None:
        if checksum(tensor) != shard.checks[name]:
            raise self._corrupt(shard, f"the hash of {name!r} is another")
        kind = tensor.dtype, tensor.shape[1:]
        if kind != (layout.dtype, layout.shape) or len(tensor) < shard.rows:
            raise self._corrupt(shard, f"{name!r} has {tuple(tensor.shape)} {tensor.dtype}")

    def _map(self, shard: Shard) -> Any:
        check_shard(self._folder, shard)
        path = self._folder / shard.name
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:
            if not path.exists():  # the writer has merged it since it was checked
                raise FileNotFoundError(f"Shard {path} is missing.") from error
            raise self._corrupt(shard, str(error)) from error

    def _corrupt(self, shard: Shard, why: str) -> ValueError:
        return ValueError(f"Shard {self._folder / shard.name} is corrupt: {why}.")
