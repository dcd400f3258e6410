"""Thousands of weight snapshots on disk, appended one by one or by stacks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.arguments import check_floating_type
from lightning_bnn.bank.disk import WriterLock, is_full, require_room
from lightning_bnn.bank.manifest import check_records, header
from lightning_bnn.bank.shards import OpenShards, Shard, mergeable
from lightning_bnn.bank.stored_networks import StoredNetworks
from lightning_bnn.params import Params, stack_size, weighted_mean

__all__ = ["CheckpointBank"]

_log = logging.getLogger(__name__)


class CheckpointBank(StoredNetworks):
    """Networks of one architecture, appended one by one or by stacks.

    A folder of safetensors files, in which every tensor has a leading dimension for networks, and a
    manifest of JSON lines. Once `append` has returned, its network survives a crash at any moment.
    Small files are merged as the bank grows. Reading maps files into memory: a layer of all
    networks, or one network, is read without touching the rest.

    Files are checked before they are trusted: a manifest that does not fit its checksums or files
    is refused, and every tensor is compared with its checksum when it is read for the first time.
    Opening a bank removes nothing but what a crash of its own has left behind.

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
            check_floating_type("dtype", dtype)
        super().__init__(Path(path), mode)
        if mode == "r" and not self.path.is_dir():
            raise ValueError(f"There is no bank at {self.path}.")
        self._dtype, self._weights = dtype, weights
        self._merge_from = 0
        self._lock = WriterLock(self.path) if mode == "a" else None
        try:
            self._begin()
        except BaseException:  # or nobody could append until this one is collected
            self.close()
            raise

    def _begin(self) -> None:
        if not os.path.lexists(self.path / "manifest.jsonl") and (
            self.mode == "r" or any(self.path.glob("shard-*.safetensors"))
        ):  # files without a manifest are somebody's networks, not leftovers
            raise ValueError(f"There is no manifest.jsonl among the files at {self.path}.")
        self.reload()
        if self._dtype not in (None, self._manifest.dtype) and self._manifest.layout:
            raise ValueError(f"`dtype`: {self!r} is there already, asked for {self._dtype}.")
        if self.mode == "a":
            self._folder.tidy(self._manifest.named, self._manifest.replaced)

    # -------------------------------------------------------- averages
    def average(
        self,
        sym: Any = None,
        weights: Sequence[int | float] | Tensor | None = None,
        *,
        align: bool = True,
        rows: slice | Sequence[int] = slice(None),
        **options: Any,
    ) -> Params:
        """One network: the weighted average of those in the bank, brought into one frame before.

        Args:
            sym: what `lightning_bnn.symmetry.discover` returned; needed to align.
            weights: one number for each network, not negative; by default all count the same.
            align: bring the networks into one frame, without which those of different runs have
                no average that computes anything of use.
            rows: which networks, such as the last ten, ``slice(-10, None)``.
            **options: of `lightning_bnn.symmetry.average`, such as ``model`` and ``batches`` for
                the statistics of batch norms, ``signs`` and ``mixing``.
        """
        from lightning_bnn.symmetry import average

        networks = self[rows]
        if not stack_size(networks):
            raise ValueError(f"There are no networks to average in {self!r}.")
        if not align:
            if options:
                raise ValueError(f"`{min(options)}` is for `align=True`.")
            return weighted_mean(networks, weights)
        if sym is None:
            raise ValueError("`sym` is missing: `discover` the symmetries, or `align=False`.")
        return average(networks, sym, weights, **options)

    # -------------------------------------------------------- writing
    def append(self, network: Params, **record: Any) -> None:
        """Add one network, and return once it is on disk.

        Args:
            network: its tensors.
            **record: what to remember about it: ``step``, ``epoch``, ``metrics``, ...
        """
        self.extend({name: t[None] for name, t in network.items()}, [record])

    def extend(self, networks: Params, records: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Add a stack of networks in one write, or leave the bank as it was before.

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
        stored = {name: self._manifest.stored(name, t) for name, t in networks.items()}
        with self._folder.adding(stored) as shard:
            self._manifest.write(shard.entry(records=[dict(r) for r in records]))
        self._merge()

    def truncate(self, rows: int) -> None:
        """Forget all networks after the first few."""
        self._check_writable()
        if not 0 <= rows <= self.rows:
            raise ValueError(f"`rows` must be in 0..{self.rows}, got {rows}.")
        if rows < self.rows:
            self._manifest.write({"truncate": rows})
            self._folder.remove(self._manifest.replaced)

    def absorb(self, other: CheckpointBank) -> None:
        """Add all networks of another bank, by links to its files or copies where they fit."""
        self._check_writable()
        if other.path.resolve() == self.path.resolve():
            raise ValueError("`other` is this very bank.")
        if not other.rows:
            return
        self._check_layout({n: other.layer(n, slice(0, 1)) for n in other.names})
        start = 0
        for shard in list(other._manifest.shards):
            records = other.records[start : start + shard.rows]
            ours, theirs = self._manifest, other._manifest
            if (ours.dtype, ours.layout) == (theirs.dtype, theirs.layout):
                other._verify(shard)
                with self._folder.copying(other.path, shard) as duplicate:
                    self._manifest.write(duplicate.entry(records=records))
            else:
                self.extend(other[start : start + shard.rows], records)
            start += shard.rows

    def verify(self) -> None:
        """Read every file, compare it with its checksums, and name the first that differs."""
        for shard in self._manifest.shards:
            self._verify(shard)

    def close(self) -> None:
        """End appending, so that another process may append, and go on reading."""
        self._open.close()
        lock, self._lock, self.mode = self._lock, None, "r"
        if lock is not None:
            try:
                self._folder.sweep()
            finally:
                lock.release()

    def __enter__(self) -> CheckpointBank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = f", stored as {self._manifest.dtype}" if self._manifest.dtype else ""
        return f"CheckpointBank({str(self.path)!r}: {self.rows} networks{kind})"

    # -------------------------------------------------------- pieces
    def _verify(self, shard: Shard) -> None:
        files = OpenShards(self.path)  # which has not checked anything yet
        for name in self.names:
            files.tensor(shard, name, self._manifest.stored_layout(name))

    def _merge(self) -> None:
        """Join small files, so that there never are many, and leave what cannot be joined now.

        Their networks are on disk already, and none is lost whatever goes wrong here.
        """
        shards = self._manifest.shards
        while len(shards) >= self._merge_from and (last := mergeable(shards)):
            try:
                self._join(last)
            except (OSError, ValueError) as error:
                self._merge_from = len(shards) + len(last)  # later, and other files
                level = logging.INFO if is_full(error) else logging.WARNING
                _log.log(level, "Some files of %s are not merged: %s", self.path, error)

    def _join(self, last: Sequence[Shard]) -> None:
        require_room(self.path, sum(shard.size for shard in last))
        tensors = {
            name: torch.cat(
                [self._open.tensor(s, name, self._manifest.stored_layout(name)) for s in last]
            )
            for name in self.names
        }
        with self._folder.adding(tensors) as merged:
            self._manifest.write(merged.entry(merge=[shard.name for shard in last]))
        self._open.close()
        self._folder.retire(last)

    def _check_writable(self) -> None:
        if self.mode != "a":
            raise ValueError(f"The bank {self.path} is open for reading only.")

    def _check_layout(self, networks: Params) -> None:
        if not self._manifest.layout:
            self._manifest.write(header(networks, self._dtype, self._weights))
        self._manifest.check(networks)
