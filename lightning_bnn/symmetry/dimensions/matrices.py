"""Matrices: rows that only move, are summed with themselves and contracted with their duals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_bnn.symmetry.dimensions.exchanges import Exchanges
from lightning_bnn.symmetry.dimensions.reading import Reading
from lightning_bnn.symmetry.dimensions.scales import Units
from lightning_bnn.symmetry.dimensions.values import Ints

__all__ = ["Mixing", "mixings"]


class Mixing(NamedTuple):
    """Channels that a group of matrices mixes."""

    kind: str
    size: int
    groups: int = 1


def mixings(reading: Reading, exchanges: Exchanges, scales: Units, signs: Units) -> list[Mixing]:
    """The groups of matrices, equal ones counted together."""
    marked = {
        name: _marked(reading.system.marks.get(name, []), exchanges)
        for name in ("apart", "ones", "numbers")
    }
    label_of = _labels_by_class(reading, exchanges)
    kinds: dict[tuple[str, int], int] = {}
    for kind in _planes(reading, exchanges, marked, label_of, scales, signs):
        kinds[kind, 2] = kinds.get((kind, 2), 0) + 1
    apart = marked["apart"] | marked["numbers"]
    rows: dict[object, tuple[str, int]] = {}
    for group in exchanges.groups:
        units = [[x for x in unit if x < exchanges.class_count] for unit in group.units]
        found = _row(units, group.units, apart, marked["ones"], label_of, scales, signs)
        if found is not None:
            rows[found[0]] = found[1]
    for row in rows.values():
        kinds[row] = kinds.get(row, 0) + 1
    return sorted(Mixing(kind, size, count) for (kind, size), count in kinds.items())


def _marked(labels: Iterable[Ints], exchanges: Exchanges) -> NDArray[np.bool_]:
    marked = np.zeros(exchanges.class_count, bool)
    for own in labels:
        marked[exchanges.classes[own[own > 0]]] = True
    return marked


def _labels_by_class(reading: Reading, exchanges: Exchanges) -> dict[int, int]:
    label_of: dict[int, int] = {}
    for parameter in reading.parameters.values():
        for part in parameter.parts:
            for label in np.unique(part.labels.numpy()).tolist():
                label_of.setdefault(int(exchanges.classes[label]), label)
    return label_of


def _planes(
    reading: Reading, exchanges: Exchanges, marked: dict[str, NDArray[np.bool_]],
    label_of: dict[int, int], scales: Units, signs: Units,
) -> list[str]:  # fmt: skip
    """Channels that a shuffle of themselves is added to: complex numbers."""
    if not reading.system.planes:
        return []
    pairs = exchanges.classes[np.concatenate(reading.system.planes)]
    inside = np.unique(pairs[pairs[:, 0] == pairs[:, 1]]).tolist()
    free = [c for c in inside if c in label_of and not marked["apart"][c] and not marked["ones"][c]]
    by_sign = {frozenset(signs.of(label_of[c]).items()): c for c in free}
    return ["complex" if scales.of(label_of[c]) else "unit complex" for c in by_sign.values()]


def _row(
    units: Sequence[Sequence[int]], every: Sequence[Sequence[int]], apart: NDArray[np.bool_],
    ones: NDArray[np.bool_], label_of: dict[int, int], scales: Units, signs: Units,
) -> tuple[object, tuple[str, int]] | None:  # fmt: skip
    """The kind and size of the matrices that mix some units, and what tells them from others."""
    flat = [x for unit in units for x in unit]
    is_plain = all(units) and len(flat) == sum(map(len, every)) and len(units) > 1
    if not is_plain or apart[flat].any():
        return None
    factors = []
    for unit in units:
        labels = [label_of[x] for x in unit if x in label_of]
        sign = {frozenset(signs.of(x).items()) for x in labels}
        scale = {_up_to_sign(scales.of(x)) for x in labels}
        if len(sign) != 1 or len(scale) != 1:
            return None
        factors.append((sign.pop(), scale.pop()))
    signs_of, scales_of = zip(*factors, strict=True)
    if ones[flat].any():
        key = (frozenset(flat), ("centred", len(units)))
        return key if len(set(signs_of)) == 1 else None
    if not _all_free(signs_of):
        return None
    kind = "general" if _all_free(scales_of) else "orthogonal"
    return (frozenset(signs_of), kind), (kind, len(units))


def _up_to_sign(row: dict[int, Fraction]) -> frozenset[tuple[int, Fraction]]:
    return frozenset((v, abs(c)) for v, c in row.items())


def _all_free(units: Sequence[frozenset[object]]) -> bool:
    return len(set(units)) == len(units) and frozenset() not in units
