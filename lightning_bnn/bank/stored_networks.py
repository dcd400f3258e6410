"""The networks of a bank, read by row or by layer without the rest."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor

from lightning_bnn.bank.contents import Contents
from lightning_bnn.bank.entries import FORMAT, parsed
from lightning_bnn.bank.journal import Journal
from lightning_bnn.bank.open_shards import OpenShards, joined
from lightning_bnn.bank.shard_folder import ShardFolder
from lightning_bnn.bank.shards import check_shard, overlapping
from lightning_bnn.params import Params, stack

__all__ = ["StoredNetworks"]

_ATTEMPTS = 10


class StoredNetworks:
    """What the manifest of a folder names, checked as it is read.

    Args:
        path: the folder.
        mode: ``"a"`` where only this process changes it, ``"r"`` where another one may.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self.path, self.mode = path, mode
        self._open = OpenShards(path)
        self._folder = ShardFolder(path)

    def reload(self) -> None:
        """Read the manifest anew, to see what another process has appended."""
        for attempt in range(_ATTEMPTS):
            try:
                self._reload()
                return
            except FileNotFoundError:  # the writer has merged files in between
                if self.mode == "a" or attempt == _ATTEMPTS - 1:
                    raise

    def _reload(self) -> None:
        found = self._folder.strangers()
        journal, contents = Journal(self.path / "manifest.jsonl"), Contents()
        for number, line in journal.read():
            if number == 1 and isinstance(line.get("bank"), int) and line["bank"] != FORMAT:
                raise ValueError(
                    f"The bank {self.path} has format {line['bank']}, and this version of "
                    f"lightning_bnn reads format {FORMAT}."
                )
            try:
                contents.apply(parsed(line))
            except ValueError as error:
                raise journal.damaged(number, str(error)) from None
        for shard in contents.shards:
            check_shard(self.path, shard)
        self._strangers = self._refuse_lost(found - contents.named, journal.is_torn)
        self._journal, self._contents = journal, contents

    def _refuse_lost(self, strangers: set[str], is_torn: bool) -> set[str]:
        """A torn entry has named one file; any other file is one that the manifest has lost."""
        if len(strangers) > is_torn:
            raise ValueError(
                f"The manifest of the bank {self.path} has lost {len(strangers)} of its files, "
                f"{sorted(strangers)[0]} among them: put back a copy of manifest.jsonl, or move "
                "these files to another folder to go on without their networks; nothing has been "
                "changed."
            )
        return strangers

    # -------------------------------------------------------- what there is
    @property
    def rows(self) -> int:
        """How many networks there are."""
        return len(self._contents.records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """What is known of each network: step, epoch, metrics, ..."""
        return self._contents.records

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, buffers too."""
        return tuple(self._contents.layout)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The layers: shapes of the weights of one network, without buffers."""
        return {name: t.shape for name, t in self._contents.layout.items() if t.is_weight}

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(shard.size for shard in self._contents.shards)

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
            return {name: self.layer(name, rows).clone() for name in self.names}
        wanted = range(self.rows)[rows] if isinstance(rows, slice) else _indices(rows, self.rows)
        return stack([self[row] for row in wanted]) if wanted else self[0:0]

    def __iter__(self) -> Iterator[Params]:
        return (self[row] for row in range(self.rows))

    def layer(self, name: str, rows: slice = slice(None)) -> Tensor:
        """One tensor of some networks, ``(rows, *shape)``, in its own type.

        It may share memory with the bank's view of the file: clone what you change in place.
        """
        self._check_name(name)
        dtype, shape, _ = self._contents.layout[name]
        parts = self._parts(name, rows)
        if not parts:
            return torch.empty(0, *shape, dtype=dtype)
        return joined(parts).to(dtype)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Some features of one flattened layer of some networks, as stored."""
        self._check_name(name)
        parts = [p.reshape(len(p), -1)[:, columns] for p in self._parts(name, rows)]
        return joined(parts) if parts else torch.empty(0, 0)

    def blocks(self, memory: int = 2**28) -> Iterator[Params]:
        """Stack after stack, each of at most so many bytes (and at least one network)."""
        layout = self._contents.layout.values()
        size = sum(math.prod(t.shape) * t.dtype.itemsize for t in layout)
        step = max(1, memory // max(1, size))
        for start in range(0, self.rows, step):
            yield self[start : start + step]

    def _parts(self, name: str, rows: slice) -> list[Tensor]:
        for _ in range(_ATTEMPTS):
            try:
                found = overlapping(self._contents.shards, rows)
                expected = self._contents.kept_as(name)
                return [self._open.tensor(shard, name, expected)[part] for shard, part in found]
            except FileNotFoundError:
                if self.mode == "a":
                    raise
                self.reload()  # another process has merged some files
        raise FileNotFoundError(f"The files of {self.path} change faster than they can be read.")

    def _check_name(self, name: str) -> None:
        if name not in self._contents.layout:
            held = ", ".join(self.names[:5]) or "nothing"
            raise ValueError(f"The bank has no tensor {name!r}; it holds {held}, ...")


def _indices(rows: Sequence[int], count: int) -> list[int]:
    """Row numbers, from numbers or from one truth value per row."""
    values = list(rows)
    if values and isinstance(values[0], bool):
        if len(values) != count:
            raise IndexError(f"The bank has {count} networks, the mask {len(values)} values.")
        return [row for row, chosen in enumerate(values) if chosen]
    return [operator.index(row) for row in values]
