"""The networks of a bank, read by row or by layer without the rest."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor

from lightning_bnn.bank.manifest import Manifest
from lightning_bnn.bank.shards import OpenShards, ShardFolder, overlapping
from lightning_bnn.params import Params, stack

__all__ = ["StoredNetworks"]

_ATTEMPTS = 10


class StoredNetworks:
    """The networks that the manifest of a folder names, checked as they are read.

    Args:
        path: the folder.
        mode: ``"a"`` where only this process changes it, ``"r"`` where another one may.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self.path, self.mode = path, mode
        self._open = OpenShards(path)
        self._folder = ShardFolder(path)

    def reload(self) -> None:
        """Read the manifest again, to see what another process has appended."""
        for attempt in range(_ATTEMPTS):
            try:
                self._reload()
                return
            except FileNotFoundError:  # the writer has merged files meanwhile
                if self.mode == "a" or attempt == _ATTEMPTS - 1:
                    raise

    def _reload(self) -> None:
        files = self._folder.names()
        manifest = Manifest(self.path / "manifest.jsonl")
        for shard in manifest.shards:
            self._folder.check(shard)
        unnamed = files - manifest.named
        if unnamed:
            raise ValueError(
                f"The manifest of the bank {self.path} has lost {len(unnamed)} of its files, "
                f"{min(unnamed)} among them: put back a copy of manifest.jsonl, or move these "
                "files to another folder to go on without their networks; nothing has been changed."
            )
        self._manifest = manifest

    # -------------------------------------------------------- what there is
    @property
    def rows(self) -> int:
        """The number of networks in the bank."""
        return len(self._manifest.records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of the networks: step, epoch, metrics, ..."""
        return self._manifest.records

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, including buffers."""
        return tuple(self._manifest.layout)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The layers: shapes of the weights of one network, without buffers."""
        return {name: t.shape for name, t in self._manifest.layout.items() if t.is_weight}

    @property
    def nbytes(self) -> int:
        """The size of all files that count."""
        return sum(shard.size for shard in self._manifest.shards)

    def __len__(self) -> int:
        return self.rows

    # -------------------------------------------------------- reading
    @overload
    def __getitem__(self, rows: SupportsIndex) -> Params: ...
    @overload
    def __getitem__(self, rows: slice | Sequence[int]) -> Params: ...
    def __getitem__(self, rows: SupportsIndex | slice | Sequence[int]) -> Params:
        """One network, or a stack of some, in their own types."""
        if hasattr(rows, "__index__"):
            rows = operator.index(rows)
            if not -self.rows <= rows < self.rows:
                raise IndexError(f"The bank has {self.rows} networks, there is no {rows}.")
            row = rows % self.rows
            return {n: self.layer(n, slice(row, row + 1))[0].clone() for n in self.names}
        if isinstance(rows, slice) and rows.step in (None, 1):
            rows = slice(*rows.indices(self.rows))  # the same ones if the bank grows meanwhile
            return {name: self.layer(name, rows).clone() for name in self.names}
        chosen = range(self.rows)[rows] if isinstance(rows, slice) else _indices(rows, self.rows)
        return stack([self[row] for row in chosen]) if chosen else self[0:0]

    def __iter__(self) -> Iterator[Params]:
        return (self[row] for row in range(self.rows))

    def layer(self, name: str, rows: slice = slice(None)) -> Tensor:
        """One tensor of some networks, ``(rows, *shape)``, in its own type.

        It may share memory with the bank's view of the file: clone what you change in place.
        """
        parts = self._parts(name, rows)
        dtype, shape, _ = self._manifest.layout[name]
        return _joined(parts).to(dtype) if parts else torch.empty(0, *shape, dtype=dtype)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Some features of one flattened layer of some networks, as stored."""
        parts = [p.reshape(len(p), -1)[:, columns] for p in self._parts(name, rows)]
        return _joined(parts) if parts else torch.empty(0, 0)

    def blocks(self, memory: int = 2**28) -> Iterator[Params]:
        """Stack after stack, each of at most so many bytes (and at least one network)."""
        layout = self._manifest.layout.values()
        size = sum(math.prod(t.shape) * t.dtype.itemsize for t in layout)
        step = max(1, memory // max(1, size))
        for start in range(0, self.rows, step):
            yield self[start : start + step]

    def _parts(self, name: str, rows: slice) -> list[Tensor]:
        """Read a tensor of some networks from every file."""
        if name not in self._manifest.layout:
            names = ", ".join(self.names[:5]) or "nothing"
            raise ValueError(f"The bank has no tensor {name!r}; it holds {names}, ...")
        for _ in range(_ATTEMPTS):
            layout = self._manifest.stored_layout(name)
            parts = overlapping(self._manifest.shards, rows)
            try:
                return [self._open.tensor(shard, name, layout)[part] for shard, part in parts]
            except FileNotFoundError:
                if self.mode == "a":
                    raise
                self.reload()  # another process has merged some files
        raise FileNotFoundError(f"The files of {self.path} change faster than they can be read.")


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join the parts of a stack, without copying a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _indices(rows: Sequence[int], count: int) -> list[int]:
    """Row numbers, from numbers or from one truth value per row."""
    values = list(rows)
    if values and isinstance(values[0], bool):
        if len(values) != count:
            raise IndexError(f"The bank has {count} networks, the mask {len(values)} values.")
        return [row for row, is_chosen in enumerate(values) if is_chosen]
    return [operator.index(row) for row in values]
