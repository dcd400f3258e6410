"""Find the shifts: biases that other biases can take up, and those that nothing sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.symmetry.discovery.classes import ChannelClasses, Ints, connected
from lightning_bnn.symmetry.discovery.hashing import mix
from lightning_bnn.symmetry.placements import Axis, Placement
from lightning_bnn.symmetry.rules.labels import FROZEN, core
from lightning_bnn.symmetry.rules.shifts import Shifts
from lightning_bnn.symmetry.shift_groups import Reader, ShiftGroup

__all__ = ["shift_groups"]


def shift_groups(channels: ChannelClasses) -> tuple[ShiftGroup, ...]:
    """The channels of every bias that may be shifted, those with the same readers in one group."""
    shifts: Shifts = channels.system.shifts
    parts = connected(list(shifts.same), channels.system.nodes)
    stopped = np.zeros(parts.max() + 1, np.bool_)
    for labels in (*shifts.stops, *_read_by_tables(channels), np.array([FROZEN])):
        stopped[parts[labels[labels >= 0]]] = True
    uses = _Uses(channels, parts)
    _stop_what_is_seen(shifts, parts, stopped, uses)
    groups = []
    for axis, described in enumerate(channels.axes):
        if uses.writes(described) and described.blocks == 1:
            groups += list(_of_bias(channels, axis, parts, stopped, uses, shifts))
    return (*groups, *_between_tables(channels, shifts))


def _stop_what_is_seen(
    shifts: Shifts, parts: Ints, stopped: NDArray[np.bool_], uses: _Uses
) -> None:
    """A weight without a bias lets a shift pass only if nothing sees what it writes, as of keys."""
    reads = [(parts[x.numpy().ravel()], parts[y.numpy().ravel()]) for _, x, y in shifts.silent]
    is_new = True
    while is_new:
        is_new = False
        for incoming, out in reads:
            seen = bool((stopped[out] | uses.is_read(out)).any())
            if seen and not bool(stopped[incoming].all()):
                stopped[incoming] = is_new = True


def _read_by_tables(channels: ChannelClasses) -> list[Ints]:
    """What a weight reads that does something else, too, along this axis, such as a tied table."""
    readers = {axis.tensor for axis in channels.axes if axis.role == "in"}
    reads = channels.system.shifts.reads.items()
    return [labels.numpy().ravel() for (name, _), labels in reads if name not in readers]


def _between_tables(channels: ChannelClasses, shifts: Shifts) -> Iterator[ShiftGroup]:
    """What is added to all rows of one table may be taken from all rows of another."""
    uses = Counter(axis.tensor for axis in channels.axes)
    tables = [
        k
        for k, axis in enumerate(channels.axes)
        if uses[axis.tensor] == 1 and axis.blocks == 1 and axis.dim is not None and axis.size > 1
        if axis.role == "raw" or (axis.role == "out" and axis.tensor in shifts.tables)
    ]
    seen: set[tuple[int, int]] = set()
    for sides in shifts.trades:
        found = [_table_of(channels, tables, side) for side in sides]
        pair = tuple(k for k in found if k is not None)
        if len(set(pair)) == 2 and (pair[0], pair[1]) not in seen:
            seen.add((pair[0], pair[1]))
            yield from _trade(channels, pair[0], pair[1])


def _table_of(
    channels: ChannelClasses, tables: Sequence[int], summands: Sequence[Tensor]
) -> int | None:
    """The first table whose columns are the channels of one of the summands."""
    for summand in summands:
        inside = np.unique(core(summand).numpy())
        for k in tables:
            if np.isin(channels.labels[k], inside).all():
                return k
    return None


def _trade(channels: ChannelClasses, first: int, second: int) -> Iterator[ShiftGroup]:
    left, right = (channels.roots[channels.labels[k]] for k in (first, second))
    same = left.size == right.size == np.unique(left).size == np.unique(right).size
    if same and np.array_equal(np.sort(left), np.sort(right)):
        at = np.argsort(right)[np.argsort(np.argsort(left))]
        places = (
            Placement(first, torch.arange(left.size)[:, None]),
            Placement(second, torch.from_numpy(at)[:, None], -1),
        )
        yield ShiftGroup(left.size, channels.axes[first].tensor, places)


class _Uses:
    """How often every connected part of channels is written to, and where it is read."""

    def __init__(self, channels: ChannelClasses, parts: Ints) -> None:
        count = int(parts.max(initial=0)) + 1
        self.writers, self.others = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        read = {name for name, _ in channels.system.shifts.reads}
        self._tables = channels.system.shifts.tables - read  # a tied table writes logits, too
        shifts: Shifts = channels.system.shifts
        self._vectors = {n for n, k in shifts.vectors.items() if shifts.raw[n] == k}
        reads = [np.zeros((3, 0), np.int64)]
        for axis, labels in enumerate(channels.labels):
            role, at = channels.axes[axis].role, np.flatnonzero(labels > FROZEN)
            found = parts[labels[at]]
            if self.writes(channels.axes[axis]):
                np.add.at(self.writers, found, 1)
            elif role == "in":
                reads.append(np.stack([found, np.full_like(at, axis), at]))
            elif role not in ("out", "gain"):
                self.others[found] = True
        table = np.concatenate(reads, 1)
        part, self.axes, self.positions = table[:, np.argsort(table[0], kind="stable")]
        self.start = np.searchsorted(part, np.arange(count + 1))
        self.signature = np.zeros(count, np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(self.signature, part, mix(self.axes, 7))

    def writes(self, axis: Axis) -> bool:
        """Whether a number can be added to the channels of a bias, or of all rows of a table."""
        return (
            axis.role == "bias"
            or (axis.role == "out" and axis.tensor in self._tables)
            or (axis.role == "raw" and axis.tensor in self._vectors)
        )

    def is_read(self, parts: Ints) -> NDArray[np.bool_]:
        """Whether a layer reads the channels, or something else sees them."""
        return (self.start[parts + 1] > self.start[parts]) | self.others[parts]

    def readers(self, parts: Ints) -> dict[int, Ints]:
        """By axis, where parts with equal signatures are read: one row for each of them."""
        width = int(self.start[parts[0] + 1] - self.start[parts[0]])
        rows = self.start[parts][:, None] + np.arange(width)
        axes, positions = self.axes[rows[0]], self.positions[rows]
        return {int(axis): positions[:, axes == axis] for axis in np.unique(axes)}


def _of_bias(
    channels: ChannelClasses,
    axis: int,
    parts: Ints,
    stopped: NDArray[np.bool_],
    uses: _Uses,
    shifts: Shifts,
) -> Iterator[ShiftGroup]:
    labels, silent = channels.labels[axis], {name for name, _, _ in shifts.silent} - shifts.clashing
    at = np.flatnonzero((labels > FROZEN) & ~stopped[parts[labels]])
    part = parts[labels[at]]
    free = (uses.writers[part] == 1) & ~uses.others[part]
    at, part = at[free], part[free]
    _, first, kind = np.unique(uses.signature[part], return_index=True, return_inverse=True)
    for number in np.argsort(first):
        alike = kind.reshape(-1) == number
        readers = {
            a: rows
            for a, rows in uses.readers(part[alike]).items()
            if channels.axes[a].tensor not in silent
        }
        names = [shifts.biases.get(channels.axes[a].tensor) for a in readers]
        if any(name is None for name in names):
            continue
        places = tuple(
            Reader(Placement(a, torch.from_numpy(rows)), str(name))
            for (a, rows), name in zip(readers.items(), names, strict=True)
        )
        place = Placement(axis, torch.from_numpy(at[alike])[:, None])
        yield ShiftGroup(int(alike.sum()), channels.axes[axis].tensor, (place,), places)
