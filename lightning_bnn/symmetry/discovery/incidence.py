"""Which classes of channels lie in which rows of which blocks, and what that leaves exchangeable.

Rows of some tags may move, as wholes; those of all others stay where they are, whatever moves
inside them. Two blocks, sets of classes that the moving rows link, are exchangeable where their
classes pair up with equal uses, in rows that correspond (moving) or are the same (all others).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np

from lightning_bnn.symmetry.discovery.classes import ChannelClasses, Ints, connected

__all__ = ["Block", "Incidence", "Units"]

Block: TypeAlias = list[int]
"""Classes, in the order in which they pair up with those of other blocks."""
Units: TypeAlias = list[Block]
"""Exchangeable blocks."""


class Incidence:
    """Classes that lie in rows, by their index.

    Attributes:
        rows: of every class, as pairs of a tag and a row of it.
    """

    def __init__(self, channels: ChannelClasses, classes: Sequence[Ints]) -> None:
        roots = [int(members[0]) for members in classes]
        of, operation = channels.in_rows.of, channels.in_rows.operation
        rows = {i: [(int(operation[row]), row) for row in of(r)] for i, r in enumerate(roots)}
        self.rows = {i: found for i, found in rows.items() if found}
        self._uses = {i: (int(channels.where[roots[i]]), len(classes[i])) for i in self.rows}
        self._first = {i: int(channels.first[roots[i]]) for i in self.rows}
        self._tags_and_rows = {i: np.array(found).T for i, found in self.rows.items()}
        self.tags = {tag for rows in self.rows.values() for tag, _ in rows}

    def first(self, block: Block) -> int:
        """The first place of any channel of a block."""
        return min(self._first[i] for i in block)

    def exchangeable(self, members: Collection[int], moving: Collection[int]) -> list[Units]:
        """Blocks that the rows of moving tags link, put together where they pair up."""
        similar: dict[Any, Units] = defaultdict(list)
        for block in self._linked(members, moving):
            walk, form = self._walk(block, moving)
            similar[form].append(walk)
        return [sorted(units, key=self.first) for units in similar.values()]

    def obstacles(self, members: Collection[int], moving: Collection[int]) -> set[int]:
        """Tags whose rows tell most of the blocks apart that are alike without them."""
        alike: dict[Any, Units] = defaultdict(list)
        for block in self._linked(members, moving):
            alike[tuple(sorted(self._key(i, moving, ()) for i in block))].append(block)
        others = {tag for i in members for tag, _ in self.rows[i]} - set(moving)
        count = dict.fromkeys(sorted(others), 0)
        for blocks in alike.values():
            for tag in others if len(blocks) > 1 else ():
                seen = {tuple(sorted(self._key(i, moving, (tag,)) for i in b)) for b in blocks}
                count[tag] = max(count[tag], len(seen))
        most = max(count.values(), default=0)
        return {tag for tag, n in count.items() if n == most > 1}

    def seeds(self, members: Collection[int]) -> list[int]:
        """Tags of which these classes lie in several rows."""
        rows = {row for i in members for row in self.rows[i]}
        tags = [tag for tag, _ in rows]
        return sorted(tag for tag in set(tags) if tags.count(tag) > 1)

    def _key(self, i: int, moving: Collection[int], fixed: Collection[int]) -> tuple[Any, ...]:
        """What stays of a class when rows of moving tags have moved."""
        of_moving = tuple(sorted(tag for tag, _ in self.rows[i] if tag in moving))
        return self._uses[i], of_moving, tuple(sorted(r for r in self.rows[i] if r[0] in fixed))

    def _linked(self, members: Collection[int], moving: Collection[int]) -> Units:
        """Classes that lie in the same moving rows, directly or by others."""
        moves = np.zeros(max(self.tags, default=0) + 1, np.bool_)
        moves[list(moving)] = True
        found = {i: row[moves[tag]] for i in members for tag, row in [self._tags_and_rows[i]]}
        tagged = [i for i, rows in found.items() if rows.size]
        sizes = [found[i].size for i in tagged]
        rows = np.concatenate([np.zeros(0, np.int64), *(found[i] for i in tagged)])
        _, ids = np.unique(rows, return_inverse=True)
        ties = [np.stack([np.repeat(np.arange(len(tagged)), sizes), len(tagged) + ids])]
        blocks: dict[int, Block] = defaultdict(list)
        for i, c in zip(tagged, connected(ties, len(tagged) + rows.size), strict=False):
            blocks[int(c)].append(i)
        return list(blocks.values())

    def _walk(self, block: Block, moving: Collection[int]) -> tuple[Block, tuple[Any, ...]]:
        """The classes, each reached from one before it, and all that must agree to pair them up."""
        fixed = {tag for i in block for tag, _ in self.rows[i]}.difference(moving)
        key = {i: self._key(i, moving, fixed) for i in block}
        sharing: dict[tuple[int, int], Block] = defaultdict(list)
        ranked = sorted(block, key=lambda i: (key[i], self._first[i]))
        for i in ranked:
            for row in self.rows[i]:
                if row[0] in moving:
                    sharing[row].append(i)
        walk, seen, number = ranked[:1], set(ranked[:1]), dict[tuple[int, int], int]()
        form, reached = [], set[tuple[int, int]]()
        for i in walk:
            mine = sorted(row for row in self.rows[i] if row in sharing)
            numbered = ((row[0], number.setdefault(row, len(number))) for row in mine)
            form.append((key[i], tuple(numbered)))
            for row in mine:
                if row not in reached:
                    reached.add(row)
                    new = [j for j in sharing[row] if j not in seen]
                    walk += new
                    seen.update(new)
        return walk, tuple(form)
