"""Shards: safetensors files of stacks, written whole, checked, and merged when there are many."""

from __future__ import annotations

import contextlib
import hashlib
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
from safetensors.torch import save_file
from torch import Tensor

from lightning_bnn.bank.journal import sync_folder
from lightning_bnn.params import Params

__all__ = [
    "Layout",
    "OpenShards",
    "Shard",
    "ShardFolder",
    "check_hash",
    "check_shard",
    "checksum",
    "is_shard_name",
    "mergeable",
    "new_shard_name",
    "overlapping",
    "sha256",
    "write_shard",
]


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


_MERGE_SHARDS, _MERGE_BYTES = 32, 2**28
_GRACE = 10.0
_UNCLAIMED = "unclaimed"


class ShardFolder:
    """Adds and removes the files of one folder; the manifest decides which of them count.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._retired: list[tuple[float, str]] = []
        """Merged files, and when they were merged."""

    @contextlib.contextmanager
    def adding(self, tensors: Params) -> Iterator[Shard]:
        """A stack in a new file, which is taken back if the manifest cannot name it."""
        with self._unfinished() as name:
            draft = self._sign(name) / "draft"
            yield write_shard(draft, self.path / name, tensors)

    @contextlib.contextmanager
    def copying(self, folder: Path, shard: Shard) -> Iterator[Shard]:
        """A file of another bank under a new name, linked where the disk is the same."""
        check_shard(folder, shard)
        with self._unfinished() as name:
            try:
                os.link(folder / shard.name, self.path / name)
            except OSError:  # another disk
                shutil.copyfile(folder / shard.name, self.path / name)
            duplicate = replace(shard, name=name)
            check_hash(self.path, duplicate)
            yield duplicate

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[str]:
        """The name of a new file, with the sign that it is not in the manifest yet."""
        name = new_shard_name()
        try:
            self._sign(name).mkdir()
            yield name
        except Exception:  # after an interrupt the manifest may name it already: see `tidy`
            self.remove([name])
            self._erase_sign(name)
            raise
        self._erase_sign(name)

    def _sign(self, name: str) -> Path:
        return self.path / f".{name}.writing"

    def _erase_sign(self, name: str) -> None:
        """If this fails no harm is done: beside a file that the manifest names it means nothing."""
        shutil.rmtree(self._sign(name), ignore_errors=True)

    # -------------------------------------------------------- what is not in the manifest
    def finished(self) -> set[str]:
        """Files of a bank that are not being written just now.

        The manifest names all of them, provided that it is read after this.
        """
        names = {path.name for path in self.path.glob("shard-*")}
        return {n for n in names if is_shard_name(n) and not self._sign(n).exists()}

    def tidy(self, named: Collection[str], replaced: Collection[str]) -> None:
        """Remove what a crash has left: unfinished files, and files that have been replaced."""
        for sign in self.path.glob(".shard-*.writing"):
            name = sign.name[1 : -len(".writing")]
            if is_shard_name(name) and name not in named:
                self.remove([name])
            self._erase_sign(name)
        self.remove(replaced)

    def set_aside(self, names: Collection[str]) -> Path:
        """Move files to a folder where they are in nobody's way, and return it."""
        aside = self.path / _UNCLAIMED
        aside.mkdir(exist_ok=True)
        for name in names:
            os.replace(self.path / name, aside / name)
        return aside

    # -------------------------------------------------------- removal
    def remove(self, names: Collection[str]) -> None:
        """Remove files that do not count any more."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

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
    """The last small files of about equal size, once there are enough of them."""
    last = shards[-_MERGE_SHARDS:]
    are_alike = len({_tier(shard) for shard in last}) == 1
    are_small = sum(shard.size for shard in last) <= _MERGE_BYTES
    return last if len(last) == _MERGE_SHARDS and are_alike and are_small else ()


def _tier(shard: Shard) -> int:
    """How many times its networks have been merged, about."""
    return int(math.log(max(1, shard.rows), _MERGE_SHARDS) + 1e-9)
