"""The channels along every axis of every tensor, as all uses of the tensor together say them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.classes import Ints
from lightning_bnn.symmetry.rules.constraints import Constraints, Entry, Labels
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["axis_entries"]


def axis_entries(
    system: Constraints, shapes: Mapping[str, torch.Size], systems: Sequence[Ints]
) -> list[Entry]:
    """One entry for every axis: the row ranges of one (packed projections) joined as blocks."""
    parts: dict[tuple[str, int | None, int], list[Entry]] = defaultdict(list)
    for (name, dim, slot, _), entry in system.entries.items():
        parts[name, dim, slot].append(entry)
    return [_simplify(_join(ranges, shapes, systems), shapes, systems) for ranges in parts.values()]


def _join(
    parts: Sequence[Entry], shapes: Mapping[str, torch.Size], systems: Sequence[Ints]
) -> Entry:
    """One entry of blocks; rows that the example does not reach follow the others, if these agree.

    Rows beyond the example write channels that were not seen: those have no label.
    """
    first = parts[0]
    if len(parts) == 1 and first.rows is None:
        return first
    total = shapes[first.name][0]
    step = int(np.gcd.reduce([x for p in parts for x in (*(p.rows or (0, total)), total)]))
    labels = np.full((total // step, first.labels.shape[-1]), -1)
    for part in parts:
        start, stop = part.rows or (0, total)
        labels[start // step : stop // step] = part.labels
    if first.dim != 0:
        unread = (labels < 0).all(1)
        known = labels[~unread]
        if all(_same(system, known, known[:1]) for system in systems):
            labels[unread] = known[0]
    last = max(p.last_read for p in parts)
    return Entry(first.name, first.dim, labels, first.role, first.scale, first.sign, last_read=last)


def _simplify(entry: Entry, shapes: Mapping[str, torch.Size], systems: Sequence[Ints]) -> Entry:
    """A tensor followed element by element often changes along one dimension only.

    Elements that were not read (positions beyond the example) follow those that were: along the
    dimension that was read as a whole, or all alike where those read are all alike. Otherwise they
    are held fixed.
    """
    labels = np.atleast_2d(entry.labels)
    shape = shapes.get(entry.name)
    if entry.read is None or shape is None:
        return replace(entry, labels=labels, rows=None)
    read = entry.read.reshape(shape or (1,))
    table = labels.reshape(shape or (1,))
    rows = [_along_one_dimension(table, read, dim, systems) for dim in range(len(shape))]
    unread = [(int((row < 0).sum()), dim) for dim, row in enumerate(rows) if row is not None]
    if not unread:
        return replace(entry, labels=np.where(read, table, FROZEN).reshape(1, -1), rows=None)
    dim = min(unread)[1]
    row = rows[dim]
    known = row[row >= 0]
    alike = all(_same(system, known, known[:1]) for system in systems)
    row = np.where(row < 0, known[0] if alike else FROZEN, row)
    return replace(entry, dim=dim, labels=row[None], rows=None)


def _along_one_dimension(
    table: Labels, read: NDArray[np.bool_], dim: int, systems: Sequence[Ints]
) -> Any:
    """Labels per index of a dimension, -1 where none was read; None if those of one disagree."""
    table = np.moveaxis(table, dim, 0).reshape(table.shape[dim], -1)
    read = np.moveaxis(read, dim, 0).reshape(table.shape)
    first = read.argmax(1)
    row = table[np.arange(len(table)), first]
    for system in systems:
        if (system[table] != system[row][:, None])[read].any():
            return None
    return np.where(read.any(1), row, -1)


def _same(system: Ints, labels: Labels, others: Labels) -> bool:
    return bool((system[labels] == system[others]).all())
