"""Find the channels that may be mixed by matrices: rows of equals that only linear maps touch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.classes import ChannelClasses, Ints, name_of
from lightning_bnn.symmetry.linear_groups import LinearGroup, LinearKind
from lightning_bnn.symmetry.placements import Placement
from lightning_bnn.symmetry.rules.constraints import Mark
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["Factors", "limits_that_matter", "linear_groups"]


@dataclass(frozen=True)
class Factors:
    """Per channel its variables of scale and sign (-1: fixed); on axes the powers of its scale."""

    scale: Ints
    sign: Ints
    powers: Sequence[Ints]


@dataclass(frozen=True)
class _Space:
    """Channels that one matrix mixes: per axis and power, ``(size, repeats)`` positions."""

    kind: LinearKind
    places: tuple[tuple[int, int, Ints], ...]

    def signature(self) -> tuple[object, ...]:
        return self.kind, tuple((axis, power, at.shape) for axis, power, at in self.places)


def linear_groups(
    channels: ChannelClasses, factors: Factors, copies: Sequence[Sequence[Ints]]
) -> tuple[LinearGroup, ...]:
    """Spaces of channels, those that act on the same axes in the same way in one group."""
    marks = _Marks(channels)
    spaces = [*_rows(channels, factors, marks, copies), *_planes(channels, factors, marks)]
    similar: dict[tuple[object, ...], list[_Space]] = defaultdict(list)
    for space in spaces:
        similar[space.signature()].append(space)
    groups = [_group(channels, parts) for parts in similar.values()]
    return tuple(sorted(groups, key=lambda g: (g.placements[0].axis, _first_position(g))))


def limits_that_matter(channels: ChannelClasses) -> list[int]:
    """Which limits of the system hold channels that nothing else does, by number.

    Of two channels there is not always a matrix that a sum of them leaves alone.
    """
    marks = _Marks(channels, with_limits=False)
    held = [
        marks.unmarked(channels.roots[limit.labels[limit.labels > FROZEN]], limit.mark)
        for limit in channels.system.limits
    ]
    if not any(roots.size for roots in held):
        return []
    rows = [row for row in channels.classes() if len(row) > 2]
    lost = np.concatenate([np.zeros(0, np.int64), *rows, *channels.roots[_pairs(channels)]])
    return [
        k
        for k, (limit, roots) in enumerate(zip(channels.system.limits, held, strict=True))
        if np.isin(roots, lost).any() or (limit.mark is None and roots.size)
    ]


def _first_position(group: LinearGroup) -> int:
    return int(group.placements[0].positions.min())


def _group(channels: ChannelClasses, spaces: Sequence[_Space]) -> LinearGroup:
    first = spaces[0]
    columns = zip(*(space.places for space in spaces), strict=True)
    places = tuple(
        Placement(column[0][0], torch.from_numpy(np.stack([at for *_, at in column])), column[0][1])
        for column in columns
    )
    size = first.places[0][2].shape[0]
    return LinearGroup(first.kind, len(spaces), size, name_of(channels.axes, places), places)


class _Marks:
    """What keeps the channels of a class from mixing."""

    def __init__(self, channels: ChannelClasses, with_limits: bool = True) -> None:
        self.channels = channels
        limits = channels.system.limits if with_limits else []
        self._marked = {
            mark: self._classes([*labels, *(x.labels for x in limits if x.mark == mark)])
            for mark, labels in channels.system.marks.items()
        }

    def _classes(self, labels: Sequence[Ints]) -> NDArray[np.bool_]:
        marked = np.zeros(int(self.channels.roots.max()) + 1, np.bool_)
        for part in labels:
            marked[self.channels.roots[part[part >= 0]]] = True
        return marked

    def any(self, mark: Mark, roots: Ints) -> bool:
        return bool(self._marked[mark][roots].any())

    def unmarked(self, roots: Ints, mark: Mark | None) -> Ints:
        """Those classes that could do more than such a mark would leave, or that move at all."""
        if mark is None:
            return roots[roots != self.channels.frozen]
        less = [m for m in self._marked if m == "diagonal" or mark != "diagonal"]
        return roots[~np.any([self._marked[m][roots] for m in less], 0)]

    def linear(self, roots: Ints) -> Ints:
        """Those classes that nothing keeps from mixing, or norms of rows only."""
        free = ~self._marked["diagonal"] & ~self._marked["centred"]
        return roots[free[roots] & (roots != self.channels.frozen)]


# ------------------------------------------------------------ rows of equal channels
def _rows(
    channels: ChannelClasses, factors: Factors, marks: _Marks, copies: Sequence[Sequence[Ints]]
) -> Iterator[_Space]:
    """Rows of exchangeable channels; those that share signs are one space."""
    alike = [[row] for row in channels.classes()] + [list(rows) for rows in copies]
    mixed = (rows for rows in alike if not any(marks.any("diagonal", row) for row in rows))
    rows = [row for rows in mixed for row in rows if len(row) > 1]
    seen = _Occurrences(channels, factors)
    by_sign: dict[tuple[int, ...], list[Ints]] = defaultdict(list)
    for row in rows:
        signs = seen.signs.only_of(row)
        if (signs < 0).any():
            continue
        if marks.any("centred", row):
            if (signs == signs[0]).all() and seen.signs.are_of(signs[:1], row):
                yield from _space(channels, factors, "centred", [row])
        elif len(np.unique(signs)) == len(signs):
            order = np.argsort(signs)
            by_sign[tuple(signs[order].tolist())].append(row[order])
    for variables, parts in by_sign.items():
        together = np.concatenate(parts)
        if seen.signs.are_of(np.array(variables), together):
            rotates = marks.any("orthogonal", together)
            general = not rotates and seen.has_free_scales(parts)
            yield from _space(channels, factors, "general" if general else "orthogonal", parts)


class _Variables:
    """Which classes of channels have which variables of one kind (-1: none)."""

    def __init__(self, roots: Ints, variables: Ints) -> None:
        span = int(variables.max(initial=-1)) + 2
        pairs = np.unique(roots * span + variables + 1)
        roots, variables = pairs // span, pairs % span - 1
        several = np.flatnonzero(np.diff(roots) == 0)
        self._only = np.full(int(roots.max(initial=0)) + 1, -1)
        self._only[roots] = variables
        self._only[roots[several]] = -1
        order = np.argsort(variables, kind="stable")
        self._classes, self._sorted = roots[order], variables[order]

    def only_of(self, classes: Ints) -> Ints:
        """The variable of every class; -1 where it has none or several."""
        known = classes < len(self._only)
        return np.where(known, self._only[np.where(known, classes, 0)], -1)

    def classes_with(self, variables: Ints) -> Ints:
        """All classes that have one of some variables, each of which is given once."""
        first = np.searchsorted(self._sorted, variables)
        count = np.searchsorted(self._sorted, variables, side="right") - first
        before = np.repeat(np.cumsum(count) - count, count)
        found: Ints = self._classes[np.repeat(first, count) + np.arange(count.sum()) - before]
        return found

    def are_of(self, variables: Ints, classes: Ints) -> bool:
        """Whether nothing but some classes has some variables."""
        return bool(np.isin(self.classes_with(variables), classes).all())


class _Occurrences:
    """Which classes of channels on the axes of tensors have which variables."""

    def __init__(self, channels: ChannelClasses, factors: Factors) -> None:
        labels = np.unique(np.concatenate([np.zeros(0, np.int64), *channels.labels]))
        labels = labels[labels > FROZEN]
        self.signs, self.scales = (
            _Variables(channels.roots[labels], variable[labels])
            for variable in (factors.sign, factors.scale)
        )

    def has_free_scales(self, parts: Sequence[Ints]) -> bool:
        """Whether every channel of a space has one scale of its own, the same in all parts."""
        columns = np.stack(parts, 1)
        found = self.scales.only_of(columns)
        if (found < 0).any() or (found != found[:, :1]).any():
            return False
        variables = np.unique(found[:, 0])
        return len(variables) == len(found) and self.scales.are_of(variables, columns)


def _space(
    channels: ChannelClasses, factors: Factors, kind: LinearKind, parts: Sequence[Ints]
) -> Iterator[_Space]:
    """The places of a space, unless its channels lie on an axis in ways that differ."""
    columns: dict[tuple[int, int], list[Ints]] = defaultdict(list)
    for row in parts:
        for place in channels.placements(row[:, None]):
            positions = place.positions.numpy()
            powers = factors.powers[place.axis][positions]
            if kind in ("orthogonal", "centred"):
                powers = np.ones_like(powers)
            if (powers != powers[:1]).any() or (powers == 0).any():
                return
            for power in np.unique(powers[0]).tolist():
                columns[place.axis, power].append(positions[:, powers[0] == power])
    places = tuple((a, p, np.concatenate(at, 1)) for (a, p), at in sorted(columns.items()))
    if places:
        yield _Space(kind, places)


# ------------------------------------------------------------ planes turned by constants
def _planes(channels: ChannelClasses, factors: Factors, marks: _Marks) -> Iterator[_Space]:
    """Pairs of channels that rotary positions turn: complex numbers commute with them."""
    pairs = _pairs(channels)
    if not pairs.size:
        return
    partner = np.full(channels.system.nodes, -1)
    partner[pairs[0]], partner[pairs[1]] = pairs[1], pairs[0]
    is_second = np.zeros(channels.system.nodes, np.bool_)
    is_second[pairs[1]] = True
    seen = _Occurrences(channels, factors)
    candidates = marks.linear(np.unique(channels.roots[pairs]))
    for roots in _with_one_sign(candidates, seen):
        scales = seen.scales.only_of(roots)
        free = bool((scales == scales[0]).all()) and scales[0] >= 0
        if marks.any("orthogonal", roots) or not free:
            kind: LinearKind = "unit complex"
        else:
            kind = "complex"
        parts = [
            _plane_places(channels, factors, r, partner, is_second, kind) for r in roots.tolist()
        ]
        if all(parts):
            yield _Space(kind, _joined([place for part in parts for place in part]))


def _with_one_sign(roots: Ints, seen: _Occurrences) -> list[Ints]:
    """Sets of classes that have one sign in common, and nothing else has it."""
    signs = seen.signs.only_of(roots)
    sets = (roots[signs == sign] for sign in dict.fromkeys(signs[signs >= 0].tolist()))
    return [found for found in sets if seen.signs.are_of(seen.signs.only_of(found[:1]), found)]


def _joined(places: Sequence[tuple[int, int, Ints]]) -> tuple[tuple[int, int, Ints], ...]:
    columns: dict[tuple[int, int], list[Ints]] = defaultdict(list)
    for axis, power, at in places:
        columns[axis, power].append(at)
    return tuple((a, p, np.concatenate(at, 1)) for (a, p), at in sorted(columns.items()))


def _pairs(channels: ChannelClasses) -> Ints:
    """Pairs that a constant turns both ways, each channel in one pair."""
    found = np.concatenate([np.zeros((2, 0), np.int64), *channels.system.planes], 1)
    pairs, count = np.unique(found, axis=1, return_counts=True)
    pairs = pairs[:, (count > 1) & (pairs[0] != pairs[1])]
    channel, uses = np.unique(pairs, return_counts=True)
    once = np.isin(pairs, channel[uses == 1]).all(0)
    return pairs[:, once]


def _plane_places(
    channels: ChannelClasses,
    factors: Factors,
    root: int,
    partner: Ints,
    is_second: NDArray[np.bool_],
    kind: LinearKind,
) -> tuple[tuple[int, int, Ints], ...]:
    """Where the two sides of a plane live; nothing where a channel of it has no partner."""
    places = []
    for place in channels.placements(np.array([[root]])):
        at = np.sort(place.positions.numpy()[0])
        labels = channels.labels[place.axis][at]
        second = is_second[labels]
        first = at[~second]
        by_label = dict(zip(labels.tolist(), at.tolist(), strict=True))
        others = [by_label.get(int(p), -1) for p in partner[labels[~second]]]
        powers = factors.powers[place.axis][at]
        if kind == "unit complex":
            powers = np.ones_like(powers)
        fits = len(by_label) == len(at) == 2 * len(first) and -1 not in others
        if not fits or (powers == 0).any():
            return ()
        for power in np.unique(powers).tolist():
            here = powers[~second] == power
            places.append((place.axis, power, np.stack([first[here], np.array(others)[here]])))
    return tuple(places)
