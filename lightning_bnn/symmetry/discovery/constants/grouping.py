"""From solved equations to groups of shifts: unknowns that act alike, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array

from lightning_bnn.symmetry.discovery.constants.elimination import solutions
from lightning_bnn.symmetry.discovery.constants.expressions import NOTHING, Expressions, Ints
from lightning_bnn.symmetry.discovery.constants.holding import Owners, hold, rows_of_bias
from lightning_bnn.symmetry.discovery.constants.operands import Followed
from lightning_bnn.symmetry.discovery.hashing import mix
from lightning_bnn.symmetry.placements import Axis, Placement
from lightning_bnn.symmetry.shift_groups import Reader, ShiftGroup

__all__ = ["shift_groups"]


def shift_groups(
    followed: Followed, axes: Sequence[Axis]
) -> tuple[tuple[Axis, ...], tuple[ShiftGroup, ...]]:
    """All axes, with those that only shifts have, and the groups.

    Args:
        followed: what the graphs have stated.
        axes: those of other groups.
    """
    owners = Owners(followed)
    hold(followed, owners)
    solved, places = _solved(followed.system), _Places(list(axes))
    owners = Owners(followed)
    diagonal = solved.diagonal() == 1
    free = diagonal & (np.diff(solved.indptr) == 1) & (owners.of >= 0)
    actions = np.concatenate(
        [_added(solved, owners, places), *_taken_up(followed, solved, owners, places)], 1
    )
    groups = tuple(_grouped(actions[:, free[actions[0]]], owners, places))
    return tuple(places.axes), groups


def _solved(system: Expressions) -> csr_array:
    stops = np.concatenate([np.zeros(0, np.int64), *system.stops])
    terms = system.every_term(stops)
    size = len(stops), system.count
    return solutions(csr_array((terms.coefficients, (terms.rows, terms.unknowns)), size))


class _Taker(NamedTuple):
    """A bias that takes up what is added along an axis, and the rows of its elements."""

    axis: int
    bias: str
    rows: tuple[int, ...] | None


@dataclass
class _Places:
    """Axes of tensors, and biases that take up what is added along some of them, by number."""

    axes: list[Axis]
    takers: dict[_Taker, int] = field(default_factory=dict)

    def axis(self, tensor: str, dim: int | None, size: int, role: str, blocks: int = 1) -> int:
        """The number of an axis, which is added where there is none like it."""
        for k, axis in enumerate(self.axes):
            if (axis.tensor, axis.dim, axis.size, axis.blocks) == (tensor, dim, size, blocks):
                return k
        self.axes.append(Axis(tensor, dim, size, role, blocks))
        return len(self.axes) - 1

    def taker(self, axis: int, bias: str, rows: Ints | None) -> int:
        """The number of a bias that takes something up."""
        key = _Taker(axis, bias, None if rows is None else tuple(rows.tolist()))
        return self.takers.setdefault(key, len(self.takers))


# ------------------------------------------------------------ what a free unknown does
_PLACE, _READER = 0, 1
"""Actions are columns: the free unknown, what is done, where, how many times, the position."""


def _added(solved: csr_array, owners: Owners, places: _Places) -> Ints:
    """What is added to tensors."""
    entries = solved.tocoo()
    unknowns, free = entries.coords
    mine = owners.of[unknowns] >= 0
    unknowns, free, times = unknowns[mine], free[mine], entries.data[mine]
    used = np.unique(owners.of[unknowns])
    axis = np.zeros(len(owners.names), np.int64)
    for k in used:
        role = "bias" if owners.dims[k] == 0 else "raw"
        axis[k] = places.axis(owners.names[k], owners.dims[k], owners.sizes[k], role)
    kind = np.full(len(free), _PLACE)
    return np.stack([free, kind, axis[owners.of[unknowns]], times, owners.at[unknowns]])


def _taken_up(
    followed: Followed, solved: csr_array, owners: Owners, places: _Places
) -> Iterator[Ints]:
    """What biases of layers take up."""
    system = followed.system
    for read, unknowns in followed.reads:
        terms = system.every_term(read.incoming.numpy())
        size = len(read.incoming), system.count
        matrix = csr_array((terms.coefficients, (terms.rows, terms.unknowns)), size) @ solved
        matrix.eliminate_zeros()
        names = np.unique(owners.of[unknowns[unknowns != NOTHING].numpy()])
        if not matrix.nnz or not names.size:
            continue
        entries = csr_array(matrix).tocoo()
        channels, free = entries.coords
        axis = places.axis(read.weight, read.dim, read.size, "in", read.blocks)
        repeats = read.positions.shape[1]
        at, free, times = (
            read.positions[channels].ravel(),
            np.repeat(free, repeats),
            np.repeat(entries.data, repeats),
        )
        for name in names:
            rows = rows_of_bias(read, unknowns.numpy(), owners, int(name))
            taker = places.taker(axis, owners.names[name], rows)
            yield np.unique(
                np.stack([free, np.full_like(free, _READER), np.full_like(free, taker), times, at]),
                axis=1,
            )


# ------------------------------------------------------------ groups
def _grouped(actions: Ints, owners: Owners, places: _Places) -> Iterator[ShiftGroup]:
    """Free unknowns with the same actions, but for positions, in one group."""
    if not actions.shape[1]:
        return
    actions = np.unique(actions, axis=1)
    free, start, count = np.unique(actions[0], return_index=True, return_counts=True)
    signature = np.zeros(len(free), np.uint64)
    with np.errstate(over="ignore"):
        hashed = mix(actions[1], 1) * mix(actions[2], 2) * mix(actions[3], 3)
        np.add.at(signature, np.repeat(np.arange(len(free)), count), mix(hashed, 4))
    _, first, which = np.unique(signature, return_index=True, return_inverse=True)
    for k in np.argsort(first):
        members = np.flatnonzero(which.reshape(-1) == k)
        one = slice(start[members[0]], start[members[0]] + count[members[0]])
        rows = np.stack([actions[4, start[m] : start[m] + count[m]] for m in members])
        yield _group(actions[1:4, one], rows, int(free[members[0]]), owners, places)


def _group(what: Ints, positions: Ints, free: int, owners: Owners, places: _Places) -> ShiftGroup:
    """The group of some free unknowns, whose positions are rows."""
    name = owners.names[owners.of[free]]
    found: dict[tuple[int, int, int], Placement] = {}
    for kind, where, times in dict.fromkeys(zip(*what.tolist(), strict=True)):
        here = (what == np.array([[kind], [where], [times]])).all(0)
        axis = where if kind == _PLACE else [*places.takers][where].axis
        at = torch.from_numpy(np.ascontiguousarray(positions[:, here]))
        found[kind, where, times] = Placement(axis, at, int(times))
    added = [p for (kind, _, _), p in found.items() if kind == _PLACE]
    own = next(
        k for k, p in enumerate(added)
        if places.axes[p.axis].tensor == name and p.exponent == 1
    )  # fmt: skip
    takers = [*places.takers]
    readers = tuple(
        Reader(p, takers[where].bias, _rows(takers[where]))
        for (kind, where, _), p in found.items()
        if kind == _READER
    )
    order = (added[own], *added[:own], *added[own + 1 :])
    return ShiftGroup(len(positions), name, order, readers)


def _rows(taker: _Taker) -> torch.Tensor | None:
    return None if taker.rows is None else torch.tensor(taker.rows)
