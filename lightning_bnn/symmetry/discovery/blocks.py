"""Groups of channels, and of blocks of channels, one inside the other.

Channels in the same rows of all blocks may be exchanged. Blocks are looked for from outside: the
largest, which no row links to anything else, and inside of one of them (what is inside the others
follows) those that may be exchanged while the rows of as many tags as possible stay in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_bnn.symmetry.discovery.classes import (
    ChannelClasses,
    Ints,
    name_of,
    once_per_dimension,
)
from lightning_bnn.symmetry.discovery.incidence import Block, Incidence, Units
from lightning_bnn.symmetry.groups import PermutationGroup, Placement
from lightning_bnn.symmetry.rules.constraints import Constraints

__all__ = ["Family", "block_families", "permutation_groups"]

LARGEST_SEARCH = 2_000_000


def permutation_groups(
    channels: ChannelClasses, families: Sequence[Family]
) -> tuple[PermutationGroup, ...]:
    """Groups of channels in graph order, then those of the blocks that contain them."""
    classes = channels.classes()
    groups: list[PermutationGroup] = []
    group_of: dict[int, int] = {}
    placed = set(np.concatenate([np.zeros(0, np.int64), *channels.present]).tolist())
    for index, members in enumerate(classes):
        if len(members) > 1 and int(members[0]) in placed:
            places = once_per_dimension(channels.axes, channels.placements(members[:, None]))
            group_of[index] = len(groups)
            groups.append(PermutationGroup(len(members), name_of(channels.axes, places), places))
    placed_families = _placed(channels, classes, families)
    number = {id(f): len(groups) + k for k, (f, *_) in enumerate(placed_families)}
    for family, places, tensors in placed_families:
        inner = []
        for row in family.rows:
            found = [group_of.get(x) if isinstance(x, int) else number.get(id(x)) for x in row]
            known = tuple(g for g in found if g is not None)
            inner += [known] if len(known) == len(found) else []
        kind = "channel" if family.copies and not inner else "block"
        name = name_of(channels.axes, places) if places else tensors[0][0]
        units = len(family.units)
        groups.append(PermutationGroup(units, name, places, kind, tuple(inner), tensors))
    return tuple(groups)


@dataclass(eq=False)
class Family:
    """Exchangeable blocks of classes.

    Attributes:
        units: the classes of every block, by their index.
        copies: whether a block is one channel and its copies.
        mixes: whether blocks may be mixed like channels, where no mark forbids it.
        rows: the classes and families inside the blocks, one per block.
    """

    units: Units
    copies: bool = False
    mixes: bool = False
    rows: list[list[int | Family]] = field(default_factory=list)

    @property
    def support(self) -> frozenset[int]:
        """All classes that it moves."""
        return frozenset(i for unit in self.units for i in unit)

    @property
    def height(self) -> int:
        """How many families lie inside each other."""
        inside = (f.height for row in self.rows for f in row if isinstance(f, Family))
        return 1 + max(inside, default=0)


def _placed(
    channels: ChannelClasses, classes: Sequence[Ints], families: Sequence[Family]
) -> list[tuple[Family, tuple[Placement, ...], tuple[tuple[str, ...], ...]]]:
    """Families that move any weight, with the tensors that they exchange, inner ones first."""
    result = []
    for family in families:
        units = np.stack([np.concatenate([classes[i] for i in unit]) for unit in family.units])
        tensors = channels.twins.tensors_of(units)
        if tensors is None:
            continue
        without = {name for row in tensors for name in row}
        places = once_per_dimension(channels.axes, channels.placements(units, without))
        if places or tensors:
            result.append((family, places, tensors))
    return sorted(result, key=lambda f: (f[0].height, *_first_place(channels, *f[1:])))


def _first_place(
    channels: ChannelClasses, places: Sequence[Placement], tensors: Sequence[Sequence[str]]
) -> tuple[int, int]:
    if places:
        return places[0].axis, int(places[0].positions.min())
    moved = {name for row in tensors for name in row}
    return next((k for k, axis in enumerate(channels.axes) if axis.tensor in moved), 0), 0


def block_families(channels: ChannelClasses) -> list[Family]:
    """All families of blocks, with what is inside them."""
    classes = channels.classes()
    incidence = Incidence(channels, classes)
    result = []
    for units in incidence.exchangeable(incidence.rows, incidence.tags):
        inside = _Inside(_search(incidence, units[0], channels.system))
        copies = [[_image(f, units[0], unit) for f in inside.families] for unit in units]
        for families in copies:
            for k, family in enumerate(families):
                nested, free = inside.content(inside.families[k].units)
                family.rows = [[families[m] for m in row] for row in nested]
                family.rows += [[unit[p] for unit in family.units] for p in free]
            result += families
        if len(units) > 1:
            nested, free = inside.content(units[:1])
            rows: list[list[int | Family]] = [[row[m] for row in copies] for (m,) in nested]
            rows += [[unit[p] for unit in units] for p in free]
            result.append(Family(units, rows=rows))
    return result


def _search(incidence: Incidence, members: Block, system: Constraints) -> list[Family]:
    """Blocks among some classes, each found from a tag: with the fewest others that must move."""
    found: dict[frozenset[frozenset[int]], Family] = {}
    seeds = incidence.seeds(members)
    if len(seeds) ** 2 * len(members) > LARGEST_SEARCH:
        return []
    for seed in seeds:
        moving, new = {seed}, {seed}
        blocks: list[Units] = []
        while new and not blocks:
            moving |= new
            blocks = [b for b in incidence.exchangeable(members, moving) if len(b) > 1]
            new = incidence.obstacles(members, moving) if not blocks else set()
        for units in blocks:
            family = Family(units, moving <= system.copies, moving <= system.mixing)
            found.setdefault(frozenset(frozenset(unit) for unit in units), family)
    return list(found.values())


def _image(family: Family, old: Block, new: Block) -> Family:
    """The family that a block has in the place of one of another block."""
    at = dict(zip(old, new, strict=True))
    return replace(family, units=[[at[i] for i in unit] for unit in family.units])


class _Inside:
    """The families inside one block, and which of them lie in units of which others."""

    def __init__(self, families: Sequence[Family]) -> None:
        self.families = list(families)
        self.at = {family.support: k for k, family in enumerate(families)}
        self._pair_up()

    def _pair_up(self) -> None:
        """The units of families that are each other's images stand in the same order."""
        for outer in sorted(self.families, key=lambda f: -len(f.units[0])):
            first, *others = outer.units
            for k in self._within(first):
                for unit in others:
                    image = _image(self.families[k], first, unit)
                    same = self.at.get(image.support)
                    if same is not None and len(self.families[same].units) == len(image.units):
                        self.families[same].units = image.units

    def content(self, units: Units) -> tuple[list[list[int]], list[int]]:
        """Families inside blocks, one index for each of these, and the places of other classes."""
        nested, covered = [], set[int]()
        for k in self._within(units[0]):
            images = [_image(self.families[k], units[0], unit).support for unit in units]
            if all(support in self.at for support in images):
                nested.append([self.at[support] for support in images])
                covered |= self.families[k].support
        return nested, [p for p, i in enumerate(units[0]) if i not in covered]

    def _within(self, unit: Block) -> list[int]:
        """The families that lie in a block, but not in a unit of another one that does."""
        inside = [k for k, f in enumerate(self.families) if f.support <= set(unit)]
        return [
            k
            for k in inside
            if not any(
                self.families[k].support <= set(block)
                for other in inside
                if other != k
                for block in self.families[other].units
            )
        ]
