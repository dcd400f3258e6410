"""Classes of exchangeable channels, and blocks of them, from what tracing collected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from lightning_bnn.symmetry.discovery.block_rows import BlockRows
from lightning_bnn.symmetry.discovery.hashing import mix
from lightning_bnn.symmetry.groups import Axis, PermutationGroup, Placement
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["ChannelClasses", "Ints", "connected", "name_of", "permutation_groups"]

Ints = NDArray[np.integer]


def connected(ties: Sequence[Ints], nodes: int) -> Ints:
    """The component of every node of a graph, whose edges are the columns of the ties."""
    pairs = np.concatenate([np.zeros((2, 0), np.int64), *ties], 1)
    graph = coo_matrix((np.ones(pairs.shape[1], bool), tuple(pairs)), (nodes, nodes))
    return connected_components(graph, directed=False)[1].astype(np.int64)


@dataclass
class ChannelClasses:
    """Classes of channels: where each lives, which operations use it, in which blocks it lies."""

    system: Constraints
    roots: Ints
    axes: Sequence[Axis]
    labels: Sequence[Ints]

    def __post_init__(self) -> None:
        """Sum up the signature of every class."""
        count = int(self.roots.max()) + 1
        self.frozen = int(self.roots[FROZEN])
        node = np.zeros(self.system.nodes, np.uint64)
        with np.errstate(over="ignore"):
            for op, seen in enumerate(self.system.seen):
                node[seen] += mix(op, 1)
            for axis, labels in enumerate(self.labels):
                np.add.at(node, labels, mix(axis, 2))
            self.where = np.zeros(count, np.uint64)
            np.add.at(self.where, self.roots, mix(node, 3))
            for colour, labels in enumerate(self.system.colours):
                at = np.flatnonzero(labels > FROZEN)
                np.add.at(self.where, self.roots[labels[at]], mix(at + (colour << 32), 6))
        self.first = np.full(count, np.iinfo(np.int64).max)
        self._place(node)
        self.in_rows = BlockRows(self.system.blocks, self.roots)

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

    def placements(self, units: Ints) -> tuple[Placement, ...]:
        """Where units, given as rows of classes, live."""
        result = []
        for axis in self._axes_with(units):
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


def permutation_groups(channels: ChannelClasses) -> tuple[PermutationGroup, ...]:
    """Groups of channels in graph order, then those of the blocks that contain them."""
    classes = channels.classes()
    groups: list[PermutationGroup] = []
    group_of: dict[int, int] = {}
    placed = set(np.concatenate([np.zeros(0, np.int64), *channels.present]).tolist())
    for index, members in enumerate(classes):
        if len(members) > 1 and int(members[0]) in placed:
            places = _once_per_dimension(channels.axes, channels.placements(members[:, None]))
            group_of[index] = len(groups)
            groups.append(PermutationGroup(len(members), name_of(channels.axes, places), places))
    return (*groups, *_block_groups(channels, classes, group_of))


def _block_groups(
    channels: ChannelClasses, classes: Sequence[Ints], group_of: Mapping[int, int]
) -> list[PermutationGroup]:
    """Blocks with the same inside are exchangeable as wholes."""
    similar: dict[Any, list[list[int]]] = defaultdict(list)
    for component in _free_components(channels, classes):
        walk = _walk(channels, classes, component)
        similar[tuple(_block_key(channels, classes[i]) for i in walk)].append(walk)
    result = []
    for blocks in similar.values():
        if len(blocks) < 2:
            continue
        blocks.sort(key=lambda b: min(channels.first[classes[i][0]] for i in b))
        units = np.stack([np.concatenate([classes[i] for i in block]) for block in blocks])
        places = _once_per_dimension(channels.axes, channels.placements(units))
        inner = tuple(
            tuple(group_of[block[k]] for block in blocks)
            for k in range(len(blocks[0]))
            if blocks[0][k] in group_of
        )
        if places:
            result.append(
                PermutationGroup(
                    len(blocks), name_of(channels.axes, places), places, "block", inner
                )
            )
    return sorted(
        result, key=lambda g: (g.placements[0].axis, int(g.placements[0].positions.min()))
    )


def _block_key(channels: ChannelClasses, members: Ints) -> tuple[int, tuple[int, ...], int]:
    root = int(members[0])
    operations = channels.in_rows.operation[channels.in_rows.of(root)]
    return int(channels.where[root]), tuple(operations.tolist()), len(members)


def _walk(channels: ChannelClasses, classes: Sequence[Ints], component: Sequence[int]) -> list[int]:
    """The classes of a block, each reached from one before it: blocks pair up link by link."""
    rows = {i: channels.in_rows.of(int(classes[i][0])) for i in component}
    sharing: dict[int, list[int]] = defaultdict(list)
    rank = {i: (_block_key(channels, classes[i]), channels.first[classes[i][0]]) for i in component}
    for i in sorted(component, key=rank.__getitem__):
        for row in rows[i]:
            sharing[row].append(i)
    walk = [min(component, key=rank.__getitem__)]
    seen = set(walk)
    for i in walk:
        for row in rows[i]:
            new = [j for j in sharing[row] if j not in seen]
            walk += new
            seen.update(new)
    return walk


def _free_components(channels: ChannelClasses, classes: Sequence[Ints]) -> list[list[int]]:
    """Classes that lie in the same rows, directly or by others, and in none that is pinned."""
    firsts = np.array([members[0] for members in classes], np.int64)
    members, rows = channels.in_rows.of_all(firsts)
    count = len(channels.in_rows.operation)
    links = np.stack([members, len(firsts) + rows])
    component = connected([links], len(firsts) + count)[: len(firsts)]
    pinned = component[members[channels.in_rows.pinned[rows]]]
    tagged = np.unique(members)
    tagged = tagged[~np.isin(component[tagged], pinned)]
    order = tagged[np.argsort(component[tagged], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(component[order])) + 1)
    return [part.tolist() for part in parts if part.size]


def _once_per_dimension(axes: Sequence[Axis], places: Sequence[Placement]) -> tuple[Placement, ...]:
    """A gain has incoming and outgoing channels on one dimension: it is moved once."""
    seen: set[tuple[str, int | None]] = set()
    kept = []
    for place in places:
        key = axes[place.axis].tensor, axes[place.axis].dim
        if key not in seen:
            seen.add(key)
            kept.append(place)
    return tuple(kept)


def name_of(axes: Sequence[Axis], places: Sequence[Placement]) -> str:
    """The tensor that writes the units of a group."""
    writers = [axes[p.axis] for p in places if axes[p.axis].role in ("out", "raw", "gain")]
    return (writers or [axes[p.axis] for p in places])[0].tensor
