"""Which rows of which operations the classes of channels lie in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.hashing import mix
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["BlockRows"]

Ints = NDArray[np.integer]


class BlockRows:
    """Rows of channels that stay together, numbered over all operations.

    Attributes:
        roots: the classes of channels in rows without a fixed one, once for each row, in order.
        rows: the rows, aligned with them.
        operation: by row, the operation that it belongs to.
        hash: by class, a number for the set of its rows.
        colours: channels in rows with a fixed channel, which stay in place, and a number for each.
    """

    def __init__(
        self, blocks: Sequence[Ints], roots: Ints, operation_of: Callable[[int, Ints], int]
    ) -> None:
        count, frozen = int(roots.max()) + 1, int(roots[FROZEN])
        self.hash = np.zeros(count, np.uint64)
        self.colours: list[tuple[Ints, NDArray[np.uint64]]] = []
        found: list[tuple[Ints, Ints]] = []
        operation: list[Ints] = [np.zeros(0, np.int64)]
        total = 0
        for number, block in enumerate(blocks):
            if len(block) < 2:
                continue
            nodes = np.where(block < 0, FROZEN, block)
            pinned = (roots[nodes] == frozen).any(1)
            names = np.asarray(mix(number * 1_000_003 + np.arange(len(block)), 4))
            held = nodes[pinned]
            self.colours.append((held.ravel(), np.repeat(names[pinned], held.shape[1])))
            row, root = _members(roots[nodes[~pinned]], count)
            row = np.flatnonzero(~pinned)[row]
            operation.append(np.full(len(block), operation_of(number, roots[nodes])))
            with np.errstate(over="ignore"):
                np.add.at(self.hash, root, names[row])
            found.append((root, row + total))
            total += len(block)
        self.operation = np.concatenate(operation)
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


def _members(table: Ints, count: int) -> tuple[Ints, Ints]:
    """The row and the class of everything in a table, each pair once."""
    rows = np.arange(len(table))[:, None]
    pairs = np.unique(rows * count + table)
    return pairs // count, pairs % count
