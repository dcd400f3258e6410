"""Shards: safetensors files of stacks, written whole, checked, and merged when there are many."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_bnn.bank.disk import sync_folder
from lightning_bnn.bank.safetensors_format import save_tensors
from lightning_bnn.params import Params

__all__ = ["Layout", "OpenShards", "Shard", "ShardFolder", "is_shard_name", "mergeable",
           "overlapping"]  # fmt: skip


class Layout(NamedTuple):
    """One tensor of every network."""

    dtype: torch.dtype
    shape: torch.Size
    is_weight: bool


@dataclass(frozen=True)
class Shard:
    """One file of a bank.

    Attributes:
        name: of the file, without a folder.
        rows: how many of its networks count, from the first on.
        size: in bytes.
        checks: the CRC of every tensor, so that one can be checked without reading the others.
    """

    name: str
    rows: int
    size: int
    checks: Mapping[str, int]

    def entry(self, **more: Any) -> dict[str, Any]:
        """Describe it for the manifest."""
        line = {"shard": self.name, "rows": self.rows, "bytes": self.size}
        return {**line, "checks": dict(self.checks), **more}


def is_shard_name(name: str) -> bool:
    """Tell whether a bank has given this name, or the file belongs to somebody else."""
    return re.fullmatch(r"shard-[0-9a-f]{12}\.safetensors", name) is not None


def overlapping(shards: Sequence[Shard], rows: slice) -> list[tuple[Shard, slice]]:
    """List the shards that hold some rows, and where in each of them these rows are."""
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


_MOST_OPEN = 64


class OpenShards:
    """Memory-mapped shards, of which those that have not been used for longest are closed first.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = ShardFolder(folder)
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._checked: set[tuple[str, str]] = set()

    def tensor(self, shard: Shard, name: str, layout: Layout) -> Tensor:
        """Return a tensor of all rows without a copy: later, pages are read when needed.

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
            if _checksum(tensor) != shard.checks[name]:
                raise self._corrupt(shard, f"the checksum of {name!r} is another")
            kind = tensor.dtype, tensor.shape[1:]
            if kind != (layout.dtype, layout.shape) or len(tensor) < shard.rows:
                raise self._corrupt(shard, f"{name!r} has {tuple(tensor.shape)} {tensor.dtype}")
            self._checked.add((shard.name, name))
        return tensor[: shard.rows]

    def close(self) -> None:
        """Close all files, which are opened again when needed."""
        self._open.clear()

    def _map(self, shard: Shard) -> Any:
        path = self._folder.check(shard)
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:
            if not path.exists():  # the writer has merged it since it was checked
                raise FileNotFoundError(f"Shard {path} is missing.") from error
            raise self._corrupt(shard, str(error)) from error

    def _corrupt(self, shard: Shard, why: str) -> ValueError:
        return ValueError(f"Shard {self._folder.path / shard.name} is corrupt: {why}.")


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


_MERGE_SHARDS, _MERGE_BYTES = 32, 2**28
_GRACE = 10.0


class ShardFolder:
    """Adds and removes the files of one folder, of which those in the manifest count.

    A file is a draft, whose name begins with a dot, until the manifest names it. So a draft that
    the manifest does not name is what a crash has left, and any other file that it does not name
    is a sign of damage.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._retired: list[tuple[float, str]] = []
        """Merged files, and when they were merged."""

    def names(self) -> set[str]:
        """List the files that the manifest names, provided that it is read after this."""
        return {p.name for p in self.path.glob("shard-*") if is_shard_name(p.name)}

    def check(self, shard: Shard) -> Path:
        """Return the path of a shard that is there, no link, and of its size."""
        path = self.path / shard.name
        if path.is_symlink():
            raise ValueError(f"Shard {path} must be a file of its own, and is a link.")
        if not path.is_file():
            path = self._draft(shard.name)  # after a crash behind the line of the manifest
        try:
            size = path.lstat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(f"Shard {self.path / shard.name} is missing.") from None
        if size != shard.size:
            raise ValueError(
                f"Shard {path} is corrupt: it has {size} bytes instead of {shard.size}."
            )
        return path

    @contextlib.contextmanager
    def adding(self, tensors: Params) -> Iterator[Shard]:
        """Write a stack to a new file, which counts once the manifest names it."""
        with self._new() as name:
            draft = self._draft(name)
            checks = save_tensors(draft, tensors)
            rows = len(next(iter(tensors.values())))
            yield Shard(name, rows, draft.stat().st_size, checks)

    @contextlib.contextmanager
    def copying(self, folder: Path, shard: Shard) -> Iterator[Shard]:
        """Take a file of another bank under a new name, linked where the disk is the same."""
        source = ShardFolder(folder).check(shard)
        with self._new() as name:
            try:
                os.link(source, self._draft(name))
            except OSError:  # another disk
                shutil.copyfile(source, self._draft(name))
            yield replace(shard, name=name)

    @contextlib.contextmanager
    def _new(self) -> Iterator[str]:
        name = f"shard-{uuid.uuid4().hex[:12]}.safetensors"
        try:
            yield name
        except Exception:  # after an interrupt the manifest may name it already: see `tidy`
            self._draft(name).unlink(missing_ok=True)
            raise
        with contextlib.suppress(OSError):  # `check` finds drafts, too
            os.replace(self._draft(name), self.path / name)
            sync_folder(self.path)

    def _draft(self, name: str) -> Path:
        return self.path / f".{name}"

    # -------------------------------------------------------- removal
    def tidy(self, named: Collection[str], replaced: Collection[str]) -> None:
        """Finish or remove what a crash has left, and remove files that have been replaced."""
        for draft in self.path.glob(".shard-*"):
            name = draft.name[1:]
            if name in named and not (self.path / name).exists():
                os.replace(draft, self.path / name)
            elif is_shard_name(name):
                draft.unlink()
        self.remove(replaced)

    def remove(self, names: Collection[str]) -> None:
        """Remove files that do not count any more."""
        for name in names:
            for path in (self.path / name, self._draft(name)):
                path.unlink(missing_ok=True)

    def retire(self, shards: Sequence[Shard]) -> None:
        """Remove files that have been merged, but only after a while.

        A reader that has just read the manifest looks for them; were they gone at once, it would
        have to start again, at every merge of a fast writer.
        """
        self._retired += [(time.monotonic(), shard.name) for shard in shards]
        self.sweep(_GRACE)

    def sweep(self, grace: float = 0.0) -> None:
        """Remove the files that were retired more than some seconds ago."""
        due = time.monotonic() - grace
        self.remove([name for since, name in self._retired if since <= due])
        self._retired = [(since, name) for since, name in self._retired if since > due]


def mergeable(shards: Sequence[Shard]) -> Sequence[Shard]:
    """Return the last small files of about equal size, once there are enough of them."""
    last = shards[-_MERGE_SHARDS:]
    are_alike = len({_tier(shard) for shard in last}) == 1
    are_small = sum(shard.size for shard in last) <= _MERGE_BYTES
    return last if len(last) == _MERGE_SHARDS and are_alike and are_small else ()


def _tier(shard: Shard) -> int:
    """Estimate how many times its networks have been merged."""
    return int(math.log(max(1, shard.rows), _MERGE_SHARDS) + 1e-9)
