"""Thousands of weight snapshots on disk, to be read by row or by layer without the rest."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

import torch
from torch import Tensor

from lightning_bnn.arguments import floating_type
from lightning_bnn.bank.contents import Contents, check_records, header, shard_entry
from lightning_bnn.bank.journal import Journal
from lightning_bnn.bank.lock import WriterLock
from lightning_bnn.bank.shard_folder import ShardFolder, mergeable
from lightning_bnn.bank.shards import (
    OpenShards,
    check_shard,
    joined,
    overlapping,
    sha256,
)
from lightning_bnn.params import Params, stack, stack_size

__all__ = ["CheckpointBank"]

_ATTEMPTS = 10


class CheckpointBank:
    """Networks of one architecture, appended one by one or by stacks.

    A folder of safetensors files, in which every tensor has a leading dimension for networks, and a
    manifest of JSON lines. What `append` has returned from survives a crash at any moment. Small
    files are merged as the bank grows. Reading maps files into memory: a layer of all networks, or
    one network, is read without touching the rest.

    Args:
        path: the folder.
        mode: ``"a"`` to append (the folder is made), ``"r"`` to read only, also while another
            process appends.
        dtype: floating tensors are stored in this type, for example ``torch.float16``; networks
            come back in their own. By default they are stored as they are.
        weights: names of the tensors that count as weights, see `shapes`; by default all floating
            ones that are not BatchNorm statistics.

    >>> import tempfile
    >>> bank = CheckpointBank(tempfile.mkdtemp())
    >>> bank.append({"w": torch.zeros(2)}, step=1)
    >>> bank.extend({"w": torch.ones(3, 2)})
    >>> len(bank), bank[1]["w"], bank.records[0]
    (4, tensor([1., 1.]), {'step': 1})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["a", "r"] = "a",
        dtype: torch.dtype | None = None,
        weights: Sequence[str] | None = None,
    ) -> None:
        if mode not in ("a", "r"):
            raise ValueError(f"`mode` must be 'a' or 'r', got {mode!r}.")
        if dtype is not None:
            floating_type("dtype", dtype)
        self.path, self.mode = Path(path), mode
        if mode == "r" and not self.path.is_dir():
            raise ValueError(f"There is no bank at {self.path}.")
        self._dtype, self._weights = dtype, weights
        self._open = OpenShards(self.path)
        self._folder = ShardFolder(self.path)
        self._lock = WriterLock(self.path) if mode == "a" else None
        self._check_manifest()
        self.reload()
        if dtype not in (None, self._contents.dtype) and self._contents.layout:
            raise ValueError(f"`dtype`: {self!r} is there already, asked for {dtype}.")
        if mode == "a":
            self._folder.remove_all_but(self._contents.shards)

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
        self._journal = Journal(self.path / "manifest.jsonl", self.mode == "a")
        self._contents = Contents()
        for entry in self._journal.read():
            self._contents.apply(entry)
        for shard in self._contents.shards:
            check_shard(self.path, shard)

    # -------------------------------------------------------- reading
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

    # -------------------------------------------------------- writing
    def append(self, network: Params, **record: Any) -> None:
        """Add one network; on disk when this returns.

        Args:
            network: its tensors.
            **record: what to remember about it: ``step``, ``epoch``, ``metrics``, ...
        """
        self.extend({name: t[None] for name, t in network.items()}, [record])

    def extend(self, networks: Params, records: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Add a stack of networks in one write.

        Args:
            networks: their tensors, each with a leading dimension.
            records: what to remember about each.
        """
        self._check_writable()
        rows = stack_size(networks)
        records = [{}] * rows if records is None else records
        if len(records) != rows:
            raise ValueError(f"`records` must be one per network: {rows}, got {len(records)}.")
        check_records(records)
        self._check_layout(networks)
        stored = {name: self._contents.stored(name, t) for name, t in networks.items()}
        shard = self._folder.write(stored)
        self._write(shard_entry(shard, records=[dict(r) for r in records]))
        self._merge()

    def truncate(self, rows: int) -> None:
        """Forget all networks after the first few."""
        self._check_writable()
        if not 0 <= rows <= self.rows:
            raise ValueError(f"`rows` must be in 0..{self.rows}, got {rows}.")
        if rows < self.rows:
            self._write({"truncate": rows})
            self._folder.remove_all_but(self._contents.shards)

    def absorb(self, other: CheckpointBank) -> None:
        """Add all networks of another bank; files are linked or copied where they fit."""
        self._check_writable()
        if other.path.resolve() == self.path.resolve():
            raise ValueError("`other` is this very bank.")
        if not other.rows:
            return
        self._check_layout({n: other.layer(n, slice(0, 1)) for n in other.names})
        start = 0
        for shard in other._contents.shards:
            records = other.records[start : start + shard.rows]
            mine, theirs = self._contents, other._contents
            if (mine.dtype, mine.layout) == (theirs.dtype, theirs.layout):
                self._write(shard_entry(self._folder.copy(other.path, shard), records=records))
            else:
                self.extend(other[start : start + shard.rows], records)
            start += shard.rows

    def verify(self) -> None:
        """Read everything and compare it with the hashes that were written; names what is bad."""
        for shard in self._contents.shards:
            check_shard(self.path, shard)
            if sha256(self.path / shard.name) != shard.sha256:
                raise ValueError(f"Shard {self.path / shard.name} is corrupt: its hash is another.")

    def close(self) -> None:
        """Let another process append."""
        self._open.close()
        if self._lock is not None:
            self._folder.sweep()
            self._lock.release()
            self._lock = None
        self.mode = "r"

    def __enter__(self) -> CheckpointBank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = f", stored as {self._contents.dtype}" if self._contents.dtype else ""
        return f"CheckpointBank({str(self.path)!r}: {self.rows} networks{kind})"

    # -------------------------------------------------------- manifest
    def _write(self, entry: dict[str, Any]) -> None:
        self._journal.append(entry)
        self._contents.apply(entry)

    def _merge(self) -> None:
        """Join small files, so that there never are many."""
        while last := mergeable(self._contents.shards):
            tensors = {
                name: torch.cat([self._open.tensor(shard, name) for shard in last])
                for name in self.names
            }
            merged = self._folder.write(tensors)
            self._write(shard_entry(merged, merge=[shard.name for shard in last]))
            self._open.close()
            self._folder.retire(last)

    # -------------------------------------------------------- pieces
    def _check_manifest(self) -> None:
        """Files without a manifest are somebody's networks, not leftovers."""
        if (self.path / "manifest.jsonl").is_file():
            return
        if self.mode == "r" or any(self.path.glob("shard-*.safetensors")):
            raise ValueError(f"There is no manifest.jsonl among the files at {self.path}.")

    def _parts(self, name: str, rows: slice) -> list[Tensor]:
        for _ in range(_ATTEMPTS):
            try:
                found = overlapping(self._contents.shards, rows)
                return [self._open.tensor(shard, name)[part] for shard, part in found]
            except FileNotFoundError:
                if self.mode == "a":
                    raise
                self.reload()  # another process has merged some files
        raise FileNotFoundError(f"The files of {self.path} change faster than they can be read.")

    def _check_writable(self) -> None:
        if self.mode != "a":
            raise ValueError(f"The bank {self.path} is open for reading only.")

    def _check_name(self, name: str) -> None:
        if name not in self._contents.layout:
            held = ", ".join(self.names[:5]) or "nothing"
            raise ValueError(f"The bank has no tensor {name!r}; it holds {held}, ...")

    def _check_layout(self, networks: Params) -> None:
        if not self._contents.layout:
            self._write(header(networks, self._dtype, self._weights))
        self._contents.check(networks, f"The bank {self.path}")


def _indices(rows: Sequence[int], count: int) -> list[int]:
    """Row numbers, from numbers or from one truth value per row."""
    values = list(rows)
    if values and isinstance(values[0], bool):
        if len(values) != count:
            raise IndexError(f"The bank has {count} networks, the mask {len(values)} values.")
        return [row for row, chosen in enumerate(values) if chosen]
    return [operator.index(row) for row in values]
