"""Find the shifts: biases that other biases can take up, and those that nothing sees."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.classes import ChannelClasses, Ints, connected
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
    axes_of = _Where(channels, parts)
    groups = []
    for axis, described in enumerate(channels.axes):
        if axes_of.writes(described) and described.blocks == 1:
            groups += list(_of_bias(channels, axis, parts, stopped, axes_of, shifts.biases))
    return (*groups, *_between_tables(channels, shifts))


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
        found = [_table_of(channels, tables, core(side).numpy()) for side in sides]
        pair = tuple(k for k in found if k is not None)
        if len(set(pair)) == 2 and (pair[0], pair[1]) not in seen:
            seen.add((pair[0], pair[1]))
            yield from _trade(channels, pair[0], pair[1])


def _table_of(channels: ChannelClasses, tables: Sequence[int], labels: Ints) -> int | None:
    """The table whose columns are the channels of one side of a sum."""
    inside = np.unique(labels)
    return next((k for k in tables if np.isin(channels.labels[k], inside).all()), None)


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


class _Where:
    """The positions of every connected part of channels, axis by axis."""

    def __init__(self, channels: ChannelClasses, parts: Ints) -> None:
        self.writers: dict[int, int] = defaultdict(int)
        self.readers: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.others: set[int] = set()
        self._tables = channels.system.shifts.tables
        for axis, (described, labels) in enumerate(
            zip(channels.axes, channels.labels, strict=True)
        ):
            found = [(int(p), at) for at, p in enumerate(parts[labels]) if labels[at] > FROZEN]
            for part, at in found:
                if self.writes(described):
                    self.writers[part] += 1
                elif described.role == "in":
                    self.readers[part][axis].append(at)
                elif described.role not in ("out", "gain"):
                    self.others.add(part)

    def writes(self, axis: Axis) -> bool:
        """Whether a number can be added to the channels of a bias, or of all rows of a table."""
        return axis.role == "bias" or (axis.role == "out" and axis.tensor in self._tables)


def _of_bias(
    channels: ChannelClasses,
    axis: int,
    parts: Ints,
    stopped: NDArray[np.bool_],
    where: _Where,
    biases: Mapping[str, str | None],
) -> Iterator[ShiftGroup]:
    labels = channels.labels[axis]
    alike: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for at in np.flatnonzero((labels > FROZEN) & ~stopped[parts[labels]]).tolist():
        part = int(parts[labels[at]])
        if where.writers[part] == 1 and part not in where.others:
            found = sorted(where.readers.get(part, {}).items())
            alike[tuple((a, len(places)) for a, places in found)].append(at)
    for signature, positions in alike.items():
        names = [biases.get(channels.axes[a].tensor) for a, _ in signature]
        if any(name is None for name in names):
            continue
        rows = [where.readers[int(parts[labels[at]])] for at in positions]
        readers = tuple(
            Reader(Placement(a, torch.tensor([row[a] for row in rows])), str(name))
            for (a, _), name in zip(signature, names, strict=True)
        )
        place = Placement(axis, torch.tensor(positions)[:, None])
        yield ShiftGroup(len(positions), channels.axes[axis].tensor, (place,), readers)
