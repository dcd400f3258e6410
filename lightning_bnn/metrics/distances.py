"""L1 and squared L2 distances between rows of millions of features, streamed in chunks.

Both are sums over features, so that only matrices of the size rows x rows live in memory. Large
problems run as compiled tiles: differences are taken in the given precision (nothing cancels, no
TF32), a few hundred of them are summed, and those sums are added up in float64. Small ones, and
machines without a compiler, use ``torch.cdist`` and a centred float64 Gram matrix.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import subprocess
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Blocks", "Distances", "distance_blocks"]

TILE = {"cpu": (1024, 128), "cuda": (4096, 256)}
"""Features and rows of a compiled tile, see ``benchmarks/metrics.py``."""
COMPILE_FROM = {"cpu": 5e9, "cuda": 1e12}
"""Differences from which compiling pays; a hundredth of it once that is done."""
_PLAIN_COLUMNS = 256
_COMPILED: dict[tuple[str, torch.dtype], bool] = {}
_log = logging.getLogger(__name__)


class Distances(NamedTuple):
    """L1 distances and squared L2 distances of the same pairs, in float64."""

    l1: Tensor
    l2: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Distances:
        """Apply a function to both."""
        return Distances(function(self.l1), function(self.l2))


class Blocks(NamedTuple):
    """Distances within the first set, across, and within the second, as matrices."""

    xx: Distances
    xy: Distances
    yy: Distances


def distance_blocks(
    chunks: Iterable[tuple[Tensor, Tensor]],
    rows: tuple[int, int],
    features: int,
    within_first: Distances | None = None,
) -> Blocks:
    """Distances of all pairs out of two sets, from chunks of their features.

    Args:
        chunks: the same features of both sets, ``(rows, columns)``, on one device.
        rows: sizes of the sets.
        features: how many there are in total; decides whether compiling pays.
        within_first: the distances within the first set, if they have been computed before.

    >>> x, y = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[3.0, 0.0]])
    >>> blocks = distance_blocks([(x, y)], (2, 1), 2)
    >>> blocks.xx.l2, blocks.xy.l1
    (tensor([[ 0., 25.],
            [25.,  0.]], dtype=torch.float64), tensor([[3.],
            [4.]], dtype=torch.float64))
    """
    m, n = rows
    sums: _TileSums | _PlainSums | None = None
    for x, y in chunks:
        x, y = _computable(x), _computable(y)
        if sums is None:
            work = (n * (m + n) + (within_first is None) * m * m) * features / 2
            sums = _sums(rows, within_first is None, x, work)
        sums.add(x, y)
    if sums is None:
        raise ValueError("A layer without features has no distances.")
    full = sums.matrices()
    return Blocks(
        full.map(lambda d: d[:m, :m]) if within_first is None else within_first,
        full.map(lambda d: d[:m, m:]),
        full.map(lambda d: d[m:, m:]),
    )


def _computable(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _sums(
    rows: tuple[int, int], within_first: bool, like: Tensor, work: float
) -> _TileSums | _PlainSums:
    device = like.device.type
    needed = COMPILE_FROM.get(device, math.inf) / (100 if _COMPILED else 1)
    if work >= needed and _compiles(device, like.dtype):
        return _TileSums(rows, within_first, like)
    return _PlainSums(rows, within_first, like)


# ------------------------------------------------------------ compiled
class _TileSums:
    """Square tiles of pairs. A tile below the diagonal is never computed."""

    def __init__(self, rows: tuple[int, int], within_first: bool, like: Tensor) -> None:
        columns, size = TILE[like.device.type]
        self._rows, self._size = rows, size
        self._counts = first, second = [-(-r // size) for r in rows]
        self._pairs = _tile_pairs(first, second, within_first)
        shape = (len(self._pairs), 2, size, size)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=like.device)
        self._buffer = like.new_zeros(sum(self._counts), size, columns)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the distances over some features."""
        add_tile = _compiled_tile()
        columns = self._buffer.shape[2]
        for start in range(0, x.shape[1], columns):
            self._fill(x[:, start : start + columns], y[:, start : start + columns])
            for k, (i, j) in enumerate(self._pairs):
                add_tile(self._buffer[i], self._buffer[j], self._sums[k, 0], self._sums[k, 1])

    def _fill(self, x: Tensor, y: Tensor) -> None:
        """Lay rows out tile by tile. What is missing stays zero on both sides."""
        if x.shape[1] < self._buffer.shape[2]:
            self._buffer.zero_()
        tiles = iter(self._buffer)
        for values in (x, y):
            for rows_of_tile in values.split(self._size):
                next(tiles)[: len(rows_of_tile), : rows_of_tile.shape[1]] = rows_of_tile

    def matrices(self) -> Distances:
        """Distances of the pooled rows, as far as they were asked for."""
        tiles, size = sum(self._counts), self._size
        grid = self._sums.new_zeros(2, tiles, tiles, size, size)
        for k, (i, j) in enumerate(self._pairs):
            grid[:, j, i], grid[:, i, j] = self._sums[k].mT, self._sums[k]
        full = grid.permute(0, 1, 3, 2, 4).reshape(2, tiles * size, tiles * size)
        m, n = self._rows
        start = self._counts[0] * size
        index = torch.tensor([*range(m), *range(start, start + n)], device=full.device)
        return Distances(*full[:, index][:, :, index])


def _tile_pairs(first: int, second: int, within_first: bool) -> list[tuple[int, int]]:
    total = first + second
    pairs = [(i, j) for i in range(total) for j in range(i, total)]
    return [(i, j) for i, j in pairs if within_first or j >= first]


def _add_tile(a: Tensor, b: Tensor, l1: Tensor, l2: Tensor) -> None:
    difference = a[:, None, :] - b[None, :, :]
    l1.add_(difference.abs().sum(-1))
    l2.add_((difference * difference).sum(-1))


@functools.lru_cache(maxsize=1)
def _compiled_tile() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    return torch.compile(_add_tile, dynamic=False)


def _compiles(device: str, dtype: torch.dtype) -> bool:
    """Tell whether this machine can compile the tile, which is tried once."""
    if (device, dtype) not in _COMPILED:
        _COMPILED[device, dtype] = _try_to_compile(device, dtype)
    return _COMPILED[device, dtype]


def _try_to_compile(device: str, dtype: torch.dtype) -> bool:
    if any(os.environ.get(n) == "1" for n in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")):
        return False
    columns, size = TILE[device]
    a = torch.zeros(size, columns, dtype=dtype, device=device)
    sums = torch.zeros(2, size, size, dtype=torch.float64, device=device)
    try:
        _compiled_tile()(a, a, sums[0], sums[1])
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _log.warning("Distances run without a compiler, several times slower (%s).", reason[:200])
        return False
    return True


# ------------------------------------------------------------ plain
class _PlainSums:
    """No compiler: L1 by ``cdist``, L2 by a Gram matrix of centred features in float64."""

    def __init__(self, rows: tuple[int, int], within_first: bool, like: Tensor) -> None:
        self._first = 0 if within_first else rows[0]
        shape = (sum(rows), sum(rows) - self._first)
        self._l1, self._l2 = torch.zeros(2, *shape, dtype=torch.float64, device=like.device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the distances over some features."""
        for start in range(0, x.shape[1], _PLAIN_COLUMNS):
            columns = slice(start, start + _PLAIN_COLUMNS)
            chunk = torch.cat([x[:, columns], y[:, columns]])
            self._l1 += torch.cdist(chunk, chunk[self._first :], p=1)
            centred = chunk.double()
            centred -= centred.mean(0)
            norms = centred.square().sum(1)
            self._l2.addmm_(centred, centred[self._first :].T, alpha=-2)
            self._l2 += norms[:, None]
            self._l2 += norms[self._first :]

    def matrices(self) -> Distances:
        """Distances of the pooled rows, as far as they were asked for."""
        l1, l2 = self._l1, self._l2.clamp_min_(0)
        l2[l1 == 0] = 0  # equal rows, up to rounding
        if self._first:
            padding = l1.new_zeros(len(l1), self._first)
            l1, l2 = torch.cat([padding, l1], 1), torch.cat([padding, l2], 1)
        return Distances(l1, l2)
