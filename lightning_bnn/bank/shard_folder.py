"""The files of a bank: written whole, merged when there are many, removed when nobody looks.

Thousands of networks that are appended one by one would make as many files: ten thousand take ten
times the disk and hundreds of times as long to read as the fifty that merging leaves.

While a file is written, and until the manifest names it, a folder ``.<name>.writing`` exists. It
identifies what a crash has left behind: such files are removed, since nobody was told that their
networks had been kept. A file without this folder that the manifest does not name is one that the
manifest has lost: it is never removed.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_bnn.bank.shards import (
    Shard,
    check_hash,
    check_shard,
    is_shard_name,
    new_shard_name,
    write_shard,
)
from lightning_bnn.params import Params

__all__ = ["ShardFolder", "mergeable"]

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
