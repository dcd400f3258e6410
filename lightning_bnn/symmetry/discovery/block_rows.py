"""Which rows of which operations the classes of channels lie in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.hashing import mix
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["BlockRows"]

Ints = NDArray[np.integer]


class BlockRows:
    """Rows of channels that stay together, numbered over all operations.

    Attributes:
        roots: the classes of channels that lie in rows, once for each of their rows, in order.
        rows: the rows, aligned with them.
        operation: by row, the operation that it belongs to.
        pinned: by row, whether a fixed channel lies in it, so that it cannot change places.
        hash: by class, a number for the set of its rows.
    """

    def __init__(self, blocks: Sequence[Ints], roots: Ints) -> None:
        count, frozen = int(roots.max()) + 1, int(roots[FROZEN])
        self.hash = np.zeros(count, np.uint64)
        found: list[tuple[Ints, Ints]] = []
        operation: list[Ints] = [np.zeros(0, np.int64)]
        pinned: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
        total = 0
        for number, block in enumerate(blocks):
            if len(block) < 2:
                continue
            row, root = _members(roots[np.where(block < 0, FROZEN, block)], count)
            pinned.append(np.isin(np.arange(len(block)), row[root == frozen]))
            operation.append(np.full(len(block), number))
            row, root = row[root != frozen], root[root != frozen]
            with np.errstate(over="ignore"):
                np.add.at(self.hash, root, mix(number * 1_000_003 + row, 4))
            found.append((root, row + total))
            total += len(block)
        self.operation, self.pinned = np.concatenate(operation), np.concatenate(pinned)
        empty = np.zeros(0, np.int64)
        every = np.concatenate([empty, *(root for root, _ in found)])
        order = np.argsort(every, kind="stable")
        self.roots = every[order]
        self.rows = np.concatenate([empty, *(row for _, row in found)])[order]

    def of(self, root: int) -> list[int]:
        """The rows of one class, in order."""
        first, last = np.searchsorted(self.roots, [root, root + 1])
        rows: list[int] = self.rows[first:last].tolist()
        return rows

    def of_all(self, roots: Ints) -> tuple[Ints, Ints]:
        """Pairs of an index into ``roots`` and a row of that class."""
        first = np.searchsorted(self.roots, roots)
        size = np.searchsorted(self.roots, roots, side="right") - first
        before = np.repeat(np.cumsum(size) - size, size)
        at = np.repeat(first, size) + np.arange(size.sum()) - before
        return np.repeat(np.arange(len(roots)), size), self.rows[at]


def _members(table: Ints, count: int) -> tuple[Ints, Ints]:
    """The row and the class of everything in a table, each pair once."""
    rows = np.arange(len(table))[:, None]
    pairs = np.unique(rows * count + table)
    return pairs // count, pairs % count
