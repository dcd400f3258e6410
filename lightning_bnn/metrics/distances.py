"""L1 and squared L2 distances between rows of millions of features, streamed in chunks.

Both are sums over features, so that memory holds matrices of size rows x rows only. A few hundred
absolute differences are summed in the given precision, and those sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_COLUMNS = 256
_SHORTEST_PIECE = 16
_BANDS = 4
"""Distances of a symmetric matrix, computed to the right of its diagonal only."""


class Distances(NamedTuple):
    """L1 distances and squared L2 distances of the same pairs, in float64."""

    l1: Tensor
    l2: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Distances:
        """Apply a function to both distances."""
        return Distances(function(self.l1), function(self.l2))


class Blocks(NamedTuple):
    """Distances within the first set, across, and within the second, as matrices."""

    xx: Distances
    xy: Distances
    yy: Distances


def distance_blocks(
    chunks: Iterable[tuple[Tensor, Tensor]],
    rows: tuple[int, int],
    within_first: Distances | None = None,
) -> Blocks:
    """Compute distances of all pairs of rows from two sets, from chunks of their features.

    Args:
        chunks: the same features of both sets, ``(rows, columns)``, on one device.
        rows: sizes of the sets.
        within_first: distances within the first set, if already computed.

    >>> x, y = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[3.0, 0.0]])
    >>> blocks = distance_blocks([(x, y)], (2, 1))
    >>> blocks.xx.l2, blocks.xy.l1
    (tensor([[ 0., 25.],
            [25.,  0.]], dtype=torch.float64), tensor([[3.],
            [4.]], dtype=torch.float64))
    """
    sums = None
    for x, y in chunks:
        x, y = _computable(x), _computable(y)
        sums = sums or _Sums(rows, within_first is None, x)
        sums.add(x, y)
    if sums is None:
        raise ValueError("A layer without features has no distances.")
    xx, xy, yy = sums.matrices()
    return Blocks(xx if within_first is None else within_first, xy, yy)


def _computable(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


class _Sums:
    """Sums over features for pairs: L1 by ``pdist``, L2 by a centred Gram matrix in float64.

    If the distances within the first set are known, it is cut into pieces as long as the second
    one, and each piece is joined with that: half of their pairs are new. ``cdist`` takes five times
    as long per pair.
    """

    def __init__(self, rows: tuple[int, int], within_first: bool, like: Tensor) -> None:
        m, n = rows
        self._n, self._length = n, max(m, 1) if within_first else max(n, _SHORTEST_PIECE)
        sizes = [min(self._length, m - k) + n for k in range(0, max(m, 1), self._length)]
        zeros = partial(torch.zeros, dtype=torch.float64, device=like.device)
        self._l1 = [zeros(size * (size - 1) // 2) for size in sizes]
        self._first = 0 if within_first else m
        self._l2, self._norms = zeros(m + n, m + n - self._first), zeros(m + n)
        height = -(-(m + n) // (1 if self._first else _BANDS))
        starts = range(0, m + n, height)
        self._bands = [(slice(k, k + height), slice(k, None)) for k in starts]

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the distances over some features."""
        for a, b in zip(x.split(_COLUMNS, 1), y.split(_COLUMNS, 1), strict=True):
            for sums, piece in zip(self._l1, a.split(self._length), strict=True):
                sums += functional.pdist(torch.cat([piece, b]), p=1)
            centred = torch.cat([a, b]).double()
            centred -= centred.mean(0)
            self._norms += centred.square().sum(1)
            columns = centred[self._first :].T
            for rows, later in self._bands:
                self._l2[rows, later].addmm_(centred[rows], columns[:, later], alpha=-2)

    def matrices(self) -> tuple[Distances, Distances, Distances]:
        """Return distances within the first set (or its pieces), across, and within the second."""
        squares = [_square(sums) for sums in self._l1]
        lengths = [len(square) - self._n for square in squares]
        across = torch.cat([d[:k, k:] for d, k in zip(squares, lengths, strict=True)])
        within = squares[0][lengths[0] :, lengths[0] :]
        norms = self._norms[:, None] + self._norms[self._first :]
        products = self._l2 if self._first else self._l2.triu() + self._l2.triu(1).T
        m, l2 = len(across), products.add_(norms).clamp_min_(0)
        first = squares[0][:m, :m] if self._first == 0 else across[:, :0]
        blocks = (l2[:m, : m - self._first], l2[:m, m - self._first :], l2[m:, m - self._first :])
        powers = (
            Distances(row, two.masked_fill(row == 0, 0))  # equal rows, up to rounding
            for row, two in zip((first, across, within), blocks, strict=True)
        )
        return next(powers), next(powers), next(powers)


def _square(pairs: Tensor) -> Tensor:
    """Arrange distances of pairs from ``pdist`` as a symmetric matrix."""
    size = int((1 + math.isqrt(1 + 8 * len(pairs))) // 2)
    matrix = pairs.new_zeros(size, size)
    matrix[tuple(torch.triu_indices(size, size, 1, device=pairs.device))] = pairs
    return matrix + matrix.T
