"""The files of a bank: written whole, merged when there are many, removed when nobody looks.

While a file is written, and until the manifest names it, a folder ``.<name>.writing`` is there. So
what a crash has left is known: it is removed, since nobody was told that it had been kept. A file
that the manifest does not name and that has no such folder is one that the manifest has lost: it is
never removed.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
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
    """Adds and removes the files of one folder; which of them count is the manifest's business.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._retired: list[tuple[float, Path]] = []

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
            copy = Shard(name, shard.rows, shard.size, shard.sha256, shard.checks)
            check_hash(self.path, copy)
            yield copy

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[str]:
        """The name of a new file, with the sign that it is not in the manifest yet."""
        name = new_shard_name()
        try:
            self._sign(name).mkdir()
            yield name
        except Exception:  # an interrupt may come when the manifest names it already: later
            (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self._sign(name), ignore_errors=True)
            raise
        shutil.rmtree(
            self._sign(name), ignore_errors=True
        )  # of a file that is named it says nothing

    def _sign(self, name: str) -> Path:
        return self.path / f".{name}.writing"

    # -------------------------------------------------------- what is not in the manifest
    def strangers(self) -> set[str]:
        """Files of a bank, now, that are not just being written; to be held against the manifest.

        Ask before the manifest is read: all that was finished then is named in it.
        """
        names = {path.name for path in self.path.glob("shard-*")}
        return {n for n in names if is_shard_name(n) and not self._sign(n).exists()}

    def tidy(self, named: Collection[str], replaced: Collection[str]) -> None:
        """Remove what a crash has left: files being written, and those that are replaced."""
        for sign in self.path.glob(".shard-*.writing"):
            name = sign.name[1 : -len(".writing")]
            if is_shard_name(name) and name not in named:
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(sign, ignore_errors=True)
        for left in self.path.glob(".shard-*.safetensors.tmp"):  # of versions before
            left.unlink()
        self.remove(replaced)

    def set_aside(self, names: Collection[str]) -> Path:
        """Move files where they are in nobody's way; where that is."""
        aside = self.path / _UNCLAIMED
        aside.mkdir(exist_ok=True)
        for name in names:
            os.replace(self.path / name, aside / name)
        return aside

    # -------------------------------------------------------- removal
    def remove(self, names: Collection[str]) -> None:
        """Remove files that the manifest has replaced."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def retire(self, shards: Sequence[Shard]) -> None:
        """Files that have been merged: readers may look for them a little longer."""
        self._retired += [(time.monotonic(), self.path / shard.name) for shard in shards]
        self.sweep(_GRACE)

    def sweep(self, grace: float = 0.0) -> None:
        """Remove what was retired more than some seconds ago."""
        due = time.monotonic() - grace
        for _, path in (old for old in self._retired if old[0] <= due):
            path.unlink(missing_ok=True)
        self._retired = [old for old in self._retired if old[0] > due]


def mergeable(shards: Sequence[Shard]) -> Sequence[Shard]:
    """The last small files of about equal size, once there are enough of them."""
    last = shards[-_MERGE_SHARDS:]
    alike = len({_tier(shard) for shard in last}) == 1
    small = sum(shard.size for shard in last) <= _MERGE_BYTES
    return last if len(last) == _MERGE_SHARDS and alike and small else ()


def _tier(shard: Shard) -> int:
    return int(math.log(max(1, shard.rows), _MERGE_SHARDS) + 1e-9)
