"""Classes of exchangeable channels: where each lives, and in which blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lightning_bnn.symmetry.discovery.block_rows import BlockRows
from lightning_bnn.symmetry.discovery.hashing import mix
from lightning_bnn.symmetry.discovery.twin_channels import TwinChannels
from lightning_bnn.symmetry.discovery.twin_rows import TwinRows
from lightning_bnn.symmetry.groups import Axis, Placement
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["ChannelClasses", "Ints", "connected", "name_of", "once_per_dimension"]

Ints = NDArray[np.integer]


def connected(ties: Sequence[Ints], nodes: int) -> Ints:
    """The component of every node of a graph, whose edges are the columns of the ties."""
    pairs = np.concatenate([np.zeros((2, 0), np.int64), *ties], 1)
    graph = coo_matrix((np.ones(pairs.shape[1], bool), tuple(pairs)), (nodes, nodes))
    return connected_components(graph, directed=False)[1].astype(np.int64)


@dataclass
class ChannelClasses:
    """Classes of channels: where each lives, which operations use it, in which blocks it lies.

    A row of channels that holds a fixed one stays in place as a whole, whatever moves inside it: it
    is a colour of its channels. All others are ``in_rows``.
    """

    system: Constraints
    roots: Ints
    axes: Sequence[Axis]
    labels: Sequence[Ints]
    branches: Sequence[TwinChannels] = ()

    def __post_init__(self) -> None:
        """Sum up the signature of every class."""
        count = int(self.roots.max()) + 1
        self.frozen = int(self.roots[FROZEN])
        self.twins = twins = TwinRows(
            self.system, self.roots, self.axes, self.labels, self.branches
        )
        node = np.zeros(self.system.nodes, np.uint64)
        with np.errstate(over="ignore"):
            for op, seen in enumerate(self.system.seen):
                node[seen] += mix(twins.seen(op, self.roots[seen]), 1)
            for axis, labels in enumerate(self.labels):
                np.add.at(node, labels, mix(twins.axis(axis, self.roots[labels]), 2))
            self.in_rows = BlockRows(self.system.blocks, self.roots, twins.block)
            for nodes, colour in self.in_rows.colours:
                np.add.at(node, nodes, colour)
            self.where = np.zeros(count, np.uint64)
            np.add.at(self.where, self.roots, mix(node, 3))
            for number, labels in enumerate(self.system.colours):
                at = np.flatnonzero(labels > FROZEN)
                roots = self.roots[labels[at]]
                np.add.at(self.where, roots, mix(at + (twins.colour(number, roots) << 32), 6))
        self.first = np.full(count, np.iinfo(np.int64).max)
        self._place(node)

    def _place(self, node_hash: NDArray[np.uint64]) -> None:
        """Per axis: the positions of every class, those of equal rank side by side."""
        self.order, self.start, self.present = [], [], []
        offset = 0
        for labels in self.labels:
            roots = self.roots[labels]
            order = np.lexsort((np.arange(labels.size), node_hash[labels], roots))
            present, start = np.unique(roots[order], return_index=True)
            self.order.append(order)
            self.present.append(present)
            self.start.append(np.append(start, labels.size))
            lowest = np.minimum.reduceat(order, start) if labels.size else start
            np.minimum.at(self.first, present, lowest + offset)
            offset += labels.size
        roots = np.concatenate([np.zeros(0, np.int64), *self.present])
        axes = np.repeat(np.arange(len(self.present)), [p.size for p in self.present])
        order = np.argsort(roots, kind="stable")
        self._placed_roots, self._placed_axes = roots[order], axes[order]

    def _axes_with(self, units: Ints) -> list[int]:
        """The axes on which any of these classes lies."""
        roots = np.unique(units)
        first = np.searchsorted(self._placed_roots, roots)
        count = np.searchsorted(self._placed_roots, roots, side="right") - first
        before = np.repeat(np.cumsum(count) - count, count)
        at = np.repeat(first, count) + np.arange(count.sum()) - before
        return [int(axis) for axis in np.unique(self._placed_axes[at])]

    def classes(self) -> list[Ints]:
        """Channels with equal signature, in the order of their first place."""
        placed = np.unique(np.concatenate([*self.present, self.in_rows.roots]))
        placed = placed[placed != self.frozen]
        if not placed.size:
            return []
        key = np.stack([self.where[placed], self.in_rows.hash[placed]], 1)
        _, index = np.unique(key, axis=0, return_inverse=True)
        order = np.lexsort((self.first[placed], index.reshape(-1)))
        groups = np.split(placed[order], np.flatnonzero(np.diff(index.reshape(-1)[order])) + 1)
        return sorted(groups, key=lambda g: (self.first[g[0]], int(g[0])))

    def placements(self, units: Ints, without: Collection[str] = ()) -> tuple[Placement, ...]:
        """Where units, given as rows of classes, live, but for some tensors."""
        result = []
        for axis in self._axes_with(units):
            if self.axes[axis].tensor in without:
                continue
            present, start, order = self.present[axis], self.start[axis], self.order[axis]
            at = np.searchsorted(present, units)
            here = np.append(present, -1)[at] == units
            columns = []
            for column in np.flatnonzero(here.any(0)):
                index = at[:, column]
                width = int(start[index[0] + 1] - start[index[0]])
                columns.append(order[start[index][:, None] + np.arange(width)])
            if columns:
                result.append(Placement(axis, torch.from_numpy(np.concatenate(columns, 1))))
        return tuple(result)


def once_per_dimension(axes: Sequence[Axis], places: Sequence[Placement]) -> tuple[Placement, ...]:
    """A gain has incoming and outgoing channels at the same positions: these are moved once."""
    seen: dict[tuple[str, int | None], list[Tensor]] = defaultdict(list)
    kept = []
    for place in places:
        at = place.positions.sort(1).values
        before = seen[axes[place.axis].tensor, axes[place.axis].dim]
        if not any(torch.equal(at, other) for other in before):
            before.append(at)
            kept.append(place)
    return tuple(kept)


def name_of(axes: Sequence[Axis], places: Sequence[Placement]) -> str:
    """The tensor that writes the units of a group."""
    writers = [axes[p.axis] for p in places if axes[p.axis].role in ("out", "raw", "gain")]
    return (writers or [axes[p.axis] for p in places])[0].tensor
