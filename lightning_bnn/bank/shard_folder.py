"""The files of a bank: written whole, merged when there are many, removed when nobody looks."""

from __future__ import annotations

import math
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from lightning_bnn.bank.shards import Shard, check_shard, write_shard
from lightning_bnn.params import Params

__all__ = ["ShardFolder", "mergeable"]

_MERGE_SHARDS, _MERGE_BYTES = 32, 2**28
_GRACE = 10.0


class ShardFolder:
    """Adds and removes the files of one folder; which of them count is the manifest's business.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._retired: list[tuple[float, Path]] = []

    def write(self, tensors: Params) -> Shard:
        """A stack in a new file."""
        return write_shard(self.path, _new_name(), tensors)

    def copy(self, folder: Path, shard: Shard) -> Shard:
        """A file of another bank under a new name, linked where the disk is the same."""
        check_shard(folder, shard)
        name = _new_name()
        try:
            os.link(folder / shard.name, self.path / name)
        except OSError:  # another disk
            shutil.copyfile(folder / shard.name, self.path / name)
        return Shard(name, shard.rows, shard.size, shard.sha256)

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

    def remove_all_but(self, shards: Sequence[Shard]) -> None:
        """Remove files of writes that a crash cut off, and those that nothing refers to."""
        known = {shard.name for shard in shards}
        for path in [*self.path.glob(".shard-*.tmp"), *self.path.glob("shard-*.safetensors")]:
            if path.name not in known:
                path.unlink()


def mergeable(shards: Sequence[Shard]) -> Sequence[Shard]:
    """The last small files of about equal size, once there are enough of them."""
    last = shards[-_MERGE_SHARDS:]
    alike = len({_tier(shard) for shard in last}) == 1
    small = sum(shard.size for shard in last) <= _MERGE_BYTES
    return last if len(last) == _MERGE_SHARDS and alike and small else ()


def _tier(shard: Shard) -> int:
    return int(math.log(max(1, shard.rows), _MERGE_SHARDS) + 1e-9)


def _new_name() -> str:
    return f"shard-{uuid.uuid4().hex[:12]}.safetensors"
