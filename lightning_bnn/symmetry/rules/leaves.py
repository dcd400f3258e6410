"""Weights that others are computed from: one row of channels for each of their dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightning_bnn.symmetry.rules.constraints import Constraints, Key, Record
from lightning_bnn.symmetry.rules.labels import Weight, core, moving_dims

__all__ = ["leaf", "note_readers"]


def leaf(system: Constraints, weight: Weight) -> list[Tensor]:
    """The parts of a weight, the same in each of its uses."""
    if len(weight.full_shape) < 2:
        labels = system.raw(weight).labels
        if moving_dims(labels):
            return [core(labels)]
        system.freeze(labels, ("scale", "sign"))
        return []
    rows = system.leaves.get(weight.name)
    if rows is None:
        rows = [system.fresh(n) for n in weight.full_shape]
        whole = Weight.whole(weight.name, weight.full_shape, weight.is_buffer)
        system.consume(whole, *(Record(d, row, "out") for d, row in enumerate(rows)))
        system.leaves[weight.name] = rows
    for row in rows:  # the size of a single row is that of the whole
        if row.numel() == 1:
            system.freeze(row, ("scale", "sign"))
    return [row[core(c)] for row, c in zip(rows, weight.coords, strict=True) if row.numel() > 1]


def note_readers(
    system: Constraints,
    operands: Sequence[Sequence[Tensor]],
    letters: Sequence[str],
    result: str,
    readers: Sequence[int],
) -> None:
    """Note which weights of an einsum read, along summed letters, what the operands after write."""
    for k in readers:
        for part in operands[k]:
            summed = {letters[k][d] for d in moving_dims(part)} - set(result)
            for j in range(k + 1, len(operands)):
                for other in operands[j]:
                    if summed & {letters[j][d] for d in moving_dims(other)}:
                        _put_after(system, part, other)
            if summed:
                _read(system, part)


def _read(system: Constraints, part: Tensor) -> None:
    for key in _axes(system, part):
        entry = system.entries.pop(key)
        system.uses += 1
        entry.role, entry.last_read = "in", system.uses
        system.entries[key] = entry


def _put_after(system: Constraints, part: Tensor, written: Tensor) -> None:
    """A weight that reads what another writes comes after it in graph order."""
    readers = {key.name for key in _axes(system, part)}
    writers = {key.name for key in _axes(system, written)} - readers
    order = list(system.entries)
    first = next((k for k, key in enumerate(order) if key.name in readers), len(order))
    early = [key for key in order[first:] if key.name in writers]
    order = [*order[:first], *early, *(key for key in order[first:] if key not in early)]
    system.entries = {key: system.entries[key] for key in order}


def _axes(system: Constraints, part: Tensor) -> list[Key]:
    nodes = np.unique(core(part).numpy())
    return [
        Key(name, dim)
        for name, rows in system.leaves.items()
        for dim, row in enumerate(rows)
        if row.numel() > 1 and np.isin(row.numpy(), nodes).any()
    ]
