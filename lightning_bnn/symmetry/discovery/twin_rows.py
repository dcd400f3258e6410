"""Branches that pair up, once channels are solved: rows of a block, exchanged with their tensors.

What lies in one branch only moves with it; what several branches share stays where it is. Uses of
what moves are the same where operations and tensors correspond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_bnn.symmetry.discovery.twin_channels import Ints, Renaming, TwinChannels
from lightning_bnn.symmetry.groups import Axis
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["TwinRows"]


@dataclass
class _Family:
    """Branches as rows of one block, and what their channels have in common."""

    twins: TwinChannels
    tensors: list[tuple[str, ...]]
    tag: int
    row_of: Ints
    axes: Renaming
    blocks: Renaming

    @property
    def every_tensor(self) -> frozenset[str]:
        """The tensors of all branches, with those of branches inside them."""
        return frozenset(name for names in self.twins.tensors for name in names)


@dataclass
class TwinRows:
    """Branches that pair up as rows of blocks, and the names that make their channels alike.

    Attributes:
        system: gets one block for every family of branches.
        roots: the class of every channel.
        axes: where channels live.
        twins: the branches, those inside others first.
    """

    system: Constraints
    roots: Ints
    axes: Sequence[Axis]
    labels: Sequence[Ints]
    twins: Sequence[TwinChannels]
    families: list[_Family] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Add rows to the system for all branches whose channels allow it."""
        self._axes_of: dict[str, list[int]] = defaultdict(list)
        for k, axis in enumerate(self.axes):
            self._axes_of[axis.tensor].append(k)
        for twins in self.twins:
            self._add(twins)

    def _add(self, twins: TwinChannels) -> None:
        axes = self._axes(twins)
        inside = [self._inside(names) for names in twins.tensors]
        tensors = [_outside(names, fs) for names, fs in zip(twins.tensors, inside, strict=True)]
        if axes is None or len({tuple(n is None for n in names) for names in tensors}) > 1:
            return
        labels = [
            np.concatenate([own, [place], *(f.twins.places for f in families)])
            for own, place, families in zip(twins.labels, twins.places, inside, strict=True)
        ]
        own = [np.unique(self.roots[x]) for x in labels]
        found, times = np.unique(np.concatenate(own), return_counts=True)
        alone = found[(times == 1) & (found != self.roots[FROZEN])]
        row_of = np.full(int(self.roots.max()) + 1, -1, np.int32)
        rows = []
        for k, x in enumerate(labels):
            roots, at = np.unique(self.roots[x], return_index=True)
            mine = np.isin(roots, alone)
            row_of[roots[mine]] = k
            rows.append(x[at[mine]])
        if len({len(row) for row in rows}) > 1 or not self._stand_apart(twins, row_of):
            return
        blocks = twins.blocks | self._twins_inside(twins, inside)
        outside = [tuple(n for n in names if n is not None) for names in tensors]
        tag = len(self.system.blocks)
        self.families.append(_Family(twins, outside, tag, row_of, axes, blocks))
        self.system.block(np.stack(rows))
        self._join_blocks(twins.blocks, row_of)

    def _join_blocks(self, renaming: Renaming, row_of: Ints) -> None:
        """Corresponding rows that share what they have outside the branches are one row."""
        together: dict[int, list[int]] = defaultdict(list)
        for number, first in renaming.items():
            together[first].append(number)
        blocks = self.system.blocks
        for first, others in together.items():
            numbers = [first, *others]
            shared = [self._outside(blocks[k], row_of) for k in numbers]
            if all(s == shared[0] for s in shared) and shared[0] and all(shared[0]):
                blocks[first] = np.concatenate([blocks[k] for k in numbers], 1)
                for k in others:
                    blocks[k] = blocks[k][:0]

    def _outside(self, block: Ints, row_of: Ints) -> list[frozenset[int]]:
        """The classes of every row that lie in no branch."""
        roots = self.roots[np.where(block < 0, FROZEN, block)]
        return [frozenset(row[row_of[row] < 0].tolist()) for row in roots]

    def _inside(self, names: Sequence[str]) -> list[_Family]:
        """The families of branches that lie in a branch with these tensors."""
        return [f for f in self.families if f.every_tensor <= set(names)]

    def _stand_apart(self, twins: TwinChannels, row_of: Ints) -> bool:
        """Whether the ports of every branch are channels of its own."""
        return len({own.size for own in twins.ports}) == 1 and all(
            bool((row_of[self.roots[own]] == k).all()) for k, own in enumerate(twins.ports)
        )

    def _axes(self, twins: TwinChannels) -> Renaming | None:
        """By axis of a later branch that of the first; None if they are not alike."""
        result: Renaming = {}
        first = twins.tensors[0]
        for names in twins.tensors[1:]:
            for one, other in zip(first, names, strict=True):
                pairs = list(zip(self._axes_of[one], self._axes_of[other], strict=False))
                if len(self._axes_of[one]) != len(self._axes_of[other]):
                    return None
                if any(_kind(self.axes[a]) != _kind(self.axes[b]) for a, b in pairs):
                    return None
                result |= {b: a for a, b in pairs}
        return result

    def _twins_inside(self, twins: TwinChannels, inside: Sequence[Sequence[_Family]]) -> Renaming:
        """By block of branches inside a later branch that of those inside the first."""
        result: Renaming = {}
        at = {f.every_tensor: f.tag for f in inside[0]}
        for names, families in zip(twins.tensors[1:], inside[1:], strict=True):
            image = dict(zip(names, twins.tensors[0], strict=True))
            for f in families:
                tag = at.get(frozenset(image[n] for n in f.every_tensor))
                result |= {} if tag is None else {f.tag: tag}
        return result

    # -------------------------------------------------------- names
    def seen(self, number: int, roots: Ints) -> int | Ints:
        """The operation as which each of these classes counts it."""
        return self._name(number, roots, [(f.twins.seen, f.row_of) for f in self.families])

    def axis(self, number: int, roots: Ints) -> int | Ints:
        """The axis as which each of these classes counts it."""
        return self._name(number, roots, [(f.axes, f.row_of) for f in self.families])

    def colour(self, number: int, roots: Ints) -> int | Ints:
        """The colours as which each of these classes counts them."""
        return self._name(number, roots, [(f.twins.colours, f.row_of) for f in self.families])

    def block(self, number: int, roots: Ints) -> int:
        """The block as which one counts whose rows lie in branches altogether."""
        for f in self.families:
            if number in f.blocks and bool((f.row_of[roots] >= 0).all()):
                number = f.blocks[number]
        return number

    def _name(
        self, number: int, roots: Ints, tables: Sequence[tuple[Renaming, Ints]]
    ) -> int | Ints:
        if not any(number in renaming for renaming, _ in tables):
            return number
        names = np.full(roots.shape, number)
        for renaming, row_of in tables:
            mine = row_of[roots] >= 0
            for name in np.unique(names[mine]).tolist():
                names[mine & (names == name)] = renaming.get(name, name)
        return names

    # -------------------------------------------------------- tensors
    def tensors_of(self, units: Ints) -> tuple[tuple[str, ...], ...] | None:
        """The tensors that move when classes, given as rows, are exchanged: one of each unit.

        None where the channels do not stand at the same places in all of them.
        """
        found: dict[tuple[str, ...], None] = {}
        for family in self.families:
            places = self.roots[family.twins.places]
            for column in units.T[np.isin(units, places).any(0)]:
                at = self._branches(column)
                if at is None:
                    return None
                found |= dict.fromkeys(zip(*(f.tensors[k] for f, k in at), strict=True))
        rows = tuple(found)
        return rows if all(self._is_aligned(units, row) for row in rows) else None

    def _branches(self, column: Ints) -> list[tuple[_Family, int]] | None:
        """The branches that some classes stand for."""
        of = {
            int(self.roots[place]): (f, k)
            for f in self.families
            for k, place in enumerate(f.twins.places)
        }
        found = [of.get(int(root)) for root in column]
        known = [x for x in found if x is not None]
        same = len({len(f.tensors[k]) for f, k in known}) == 1
        return known if len(known) == len(found) and same else None

    def _is_aligned(self, units: Ints, row: Sequence[str]) -> bool:
        """Whether every channel of one tensor has its image at its place in the others."""
        for unit, name in zip(units[1:], row[1:], strict=True):
            image = np.arange(int(self.roots.max()) + 1)
            image[units[0]] = unit
            for a, b in zip(self._axes_of[row[0]], self._axes_of[name], strict=True):
                there, here = self.roots[self.labels[b]], image[self.roots[self.labels[a]]]
                if not np.array_equal(here, there):
                    return False
        return True


def _outside(names: Sequence[str], families: Sequence[_Family]) -> list[str | None]:
    """The tensors of a branch, None in the place of those that belong to branches inside it."""
    inside = {name for f in families for name in f.every_tensor}
    return [None if name in inside else name for name in names]


def _kind(axis: Axis) -> tuple[Any, ...]:
    return axis.dim, axis.size, axis.role, axis.blocks
