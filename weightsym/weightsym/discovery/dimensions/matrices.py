"""Matrix symmetries: rows that only move, are summed and are contracted with their duals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightsym.discovery.dimensions.exchanges import Exchanges
from weightsym.discovery.dimensions.reading import Reading
from weightsym.discovery.dimensions.scales import Row, Units
from weightsym.discovery.dimensions.values import Ints, distinct
from weightsym.groups.placements import LinearKind


class Space(NamedTuple):
    """Channels that one invertible matrix mixes.

    Attributes:
        kind: the group of matrices.
        rows: units in corresponding order, for every row of channels that the matrix acts on.
        pairs: the labels of both sides of planes.
    """

    kind: LinearKind
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    pairs: tuple[tuple[int, int], ...] = ()


def spaces(reading: Reading, exchanges: Exchanges, scales: Units, signs: Units) -> list[Space]:
    """Find the spaces of channels that matrices mix. Rows with the same signs form one space."""
    marked = {
        name: _marked(reading.system.marks.get(name, []), exchanges)
        for name in ("apart", "ones", "numbers")
    }
    label_of = _labels_by_class(reading, exchanges)
    planes = _planes(reading, exchanges, marked, label_of, scales, signs)
    apart = marked["apart"] | marked["numbers"]
    rows: dict[tuple[LinearKind, object], list[tuple[tuple[int, ...], ...]]] = {}
    for group in exchanges.groups:
        units = [[x for x in unit if x < exchanges.class_count] for unit in group.units]
        key = _row(units, group.units, apart, marked["ones"], label_of, scales, signs)
        if key is not None:
            group_type, order = key
            ordered = tuple(tuple(units[k]) for k in order[1])
            rows.setdefault((group_type, order[0]), []).append(ordered)
    return planes + [Space(group_type, tuple(labels)) for (group_type, _), labels in rows.items()]


def _marked(labels: Iterable[Ints], exchanges: Exchanges) -> NDArray[np.bool_]:
    marked = np.zeros(exchanges.class_count, bool)
    for row in labels:
        marked[exchanges.classes[row[row > 0]]] = True
    return marked


def _labels_by_class(reading: Reading, exchanges: Exchanges) -> dict[int, int]:
    factors = (f for parameter in reading.parameters.values() for f in parameter.factors)
    labels = np.concatenate([np.zeros(0, np.int64), *(distinct(p.labels.numpy()) for p in factors)])
    classes, first = np.unique(exchanges.classes[labels], return_index=True)
    return dict(zip(classes.tolist(), labels[first].tolist(), strict=True))


def _planes(
    reading: Reading, exchanges: Exchanges, marked: dict[str, NDArray[np.bool_]],
    label_of: dict[int, int], scales: Units, signs: Units,
) -> list[Space]:  # fmt: skip
    """Find the channels that are added to a permutation of themselves, as complex numbers are."""
    if not reading.system.planes:
        return []
    labels = np.unique(np.concatenate(reading.system.planes), axis=0)
    pairs = exchanges.classes[labels]
    by_class: dict[int, list[tuple[int, int]]] = {}
    for (a, b), (p, q) in zip(labels.tolist(), pairs.tolist(), strict=True):
        if p == q and p in label_of and not marked["apart"][p] and not marked["ones"][p]:
            by_class.setdefault(p, []).append((a, b))
    by_sign: dict[object, list[int]] = {}
    for c in by_class:
        by_sign.setdefault(frozenset(signs.of(label_of[c]).items()), []).append(c)
    return [
        Space(
            "complex" if scales.of(label_of[members[-1]]) else "unit complex", (),
            tuple(pair for c in members for pair in by_class[c]),
        )
        for members in by_sign.values()
    ]  # fmt: skip


def _row(
    units: Sequence[Sequence[int]], every: Sequence[Sequence[int]], apart: NDArray[np.bool_],
    ones: NDArray[np.bool_], label_of: dict[int, int], scales: Units, signs: Units,
) -> tuple[LinearKind, tuple[object, list[int]]] | None:  # fmt: skip
    """Return the kind of matrices that mix some units, a key of their space, and their order.

    Units of several rows correspond where they share a sign.
    """
    flat = [x for unit in units for x in unit]
    is_plain = all(units) and len(flat) == sum(map(len, every)) and len(units) > 1
    if not is_plain or apart[flat].any():
        return None
    labels = [[label_of[x] for x in unit if x in label_of] for unit in units]
    if not labels[0] or len(set(map(len, labels))) > 1:
        return None
    first, *others = np.array(labels).T
    if not all(g.power_between(label, first) for label in others for g in (scales, signs)):
        return None
    signs_of = [frozenset(signs.of(x).items()) for x in first.tolist()]
    scales_of = [_up_to_sign(scales.of(x)) for x in first.tolist()]
    if ones[flat].any():
        key = frozenset(flat), list(range(len(units)))
        mixes = len(units) > 2 and len(set(signs_of)) == 1  # of two, only their exchange is left
        return ("centred", key) if mixes else None
    if not _all_free(signs_of):
        return None
    group_type: LinearKind = "general" if _all_free(scales_of) else "orthogonal"
    order = sorted(range(len(units)), key=lambda k: sorted(v for v, _ in signs_of[k]))
    return group_type, (frozenset(signs_of), order)


def _up_to_sign(row: Row) -> frozenset[tuple[int, Any]]:
    return frozenset((v, abs(c)) for v, c in row.items())


def _all_free(units: Sequence[frozenset[object]]) -> bool:
    return len(set(units)) == len(units) and frozenset() not in units
