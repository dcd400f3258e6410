"""How a view of a weight lies in the weight: where the labels of the view belong in the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.symmetry.rules.labels import Unsupported, Weight, core, moving_dims

__all__ = ["UNSET", "RowRange", "owners_of", "places_of"]

UNSET = -2
LARGEST_TABLE = 4_000_000
RowRange: TypeAlias = tuple[int, int] | None
"""First row and the one after the last; None for all of them."""
Table: TypeAlias = NDArray[np.int64]


def places_of(
    weight: Weight, records: Sequence[Any]
) -> tuple[RowRange, list[tuple[int | None, Table]]]:
    """The rows that a view covers, and for each record a dimension of the parameter and its labels.

    The table of labels is ``(row blocks, size of the dimension)``; dimension None is the flattened
    parameter.
    """
    try:
        mapping, rows = _parameter_dims(weight)
    except Unsupported:
        mapping, rows = {}, _range_of_rows(weight)
    return rows, [
        _by_dimension(weight, record, mapping)
        if record.dim is None or record.dim in mapping
        else _scattered(weight, record)
        for record in records
    ]


# ------------------------------------------------------------ a view with the tensor's dimensions
def _by_dimension(weight: Weight, record: Any, mapping: dict[int, int]) -> tuple[int | None, Table]:
    labels = np.asarray(record.labels)
    if record.dim is None:
        flat = labels.reshape(1, -1)
        table = np.full((1, weight.full_shape.numel()), UNSET)
        table[:, : flat.shape[1]] = flat
        return None, table
    dim, labels = mapping[record.dim], np.atleast_2d(labels)
    if labels.shape[0] > 1 and _range_of_rows(weight) is not None:
        raise Unsupported("groups of channels in a slice of a weight")
    row = weight.coords[dim]
    for d in reversed(range(row.ndim)):
        if d != record.dim:
            row = row.select(d, 0)
    table = np.full((labels.shape[0], weight.full_shape[dim]), UNSET)
    table[:, row.numpy()] = labels
    return dim, table


def _parameter_dims(weight: Weight) -> tuple[dict[int, int], RowRange]:
    """The parameter's dimension that each dimension of a view walks, and the rows it covers."""
    moving = [moving_dims(c) for c in weight.coords]
    mapping: dict[int, int] = {}
    for view_dim, size in enumerate(weight.shape):
        owners = [p for p, dims in enumerate(moving) if view_dim in dims]
        if len(owners) != (size > 1) or set(owners) & set(mapping.values()):
            raise Unsupported("a weight reshaped across its dimensions")
        if owners:
            mapping[view_dim] = owners[0]
    free = [p for p in range(len(weight.full_shape)) if p not in mapping.values()]
    single = [d for d, size in enumerate(weight.shape) if size == 1]
    mapping |= dict(zip(single, free, strict=False))
    return mapping, _range_of_rows(weight)


def _range_of_rows(weight: Weight) -> RowRange:
    """The rows of a slice; None where it has all of them, or not all between its first and last."""
    if not weight.full_shape:
        return None
    seen = torch.unique(core(weight.coords[0]))
    start, stop = int(seen[0]), int(seen[-1]) + 1
    whole = len(seen) == weight.full_shape[0] or stop - start != len(seen)
    return None if whole else (start, stop)


# ------------------------------------------------------------ any view
def owners_of(weight: Weight, dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """The parameter's dimensions that some dimensions of a view walk, and all that walk these."""
    moving = [moving_dims(c) for c in weight.coords]
    owners = [p for p, walked in enumerate(moving) if set(walked) & set(dims)]
    return owners, sorted({d for p in owners for d in moving[p]})


def _scattered(weight: Weight, record: Any) -> tuple[int | None, Table]:
    """Labels in the shape of some dimensions of a view, brought to the places of the parameter.

    Labels along the rows and one other dimension may be columns as blocks of rows see them; else,
    labels along several dimensions are those of the flattened parameter.
    """
    dims = record.dim if isinstance(record.dim, tuple) else (record.dim,)
    owners, walked = owners_of(weight, dims)
    if record.in_blocks and len(owners) > 2 and owners[0] == 0:
        raise Unsupported("experts with channels along several dimensions")
    labels = _in_shape_of(record.labels, dims, weight.shape)
    if not owners:
        raise Unsupported("a single channel in a weight that is reshaped across its dimensions")
    joint = len(owners) > 1 and not (record.in_blocks and len(owners) == 2 and owners[0] == 0)
    if joint:
        owners, walked = list(range(len(weight.full_shape))), list(range(len(weight.shape)))
    shape = [weight.full_shape[p] for p in owners]
    if int(np.prod(shape)) > LARGEST_TABLE:
        raise Unsupported("a very large weight that is reshaped across its dimensions")
    at = tuple(_narrowed(weight.coords[p], walked).numpy() for p in owners)
    table = np.full(shape, UNSET)
    table[at] = _narrowed(labels, walked).numpy()
    if (table[at] != _narrowed(labels, walked).numpy()).any():
        raise Unsupported("a weight that is repeated within one view")
    if joint:
        return None, table.reshape(1, -1)
    return owners[-1], _in_blocks(np.atleast_2d(table))


def _in_shape_of(labels: Tensor, dims: Sequence[int], shape: Sequence[int]) -> Tensor:
    several = labels.numel() > 1  # else one of them stands everywhere, as for zeros
    view = [n if d in dims and several else 1 for d, n in enumerate(shape)]
    return labels.reshape(view).expand(tuple(shape))


def _narrowed(t: Tensor, dims: Sequence[int]) -> Tensor:
    for d in reversed(range(t.ndim)):
        if d not in dims:
            t = t.select(d, 0)
    return t


def _in_blocks(table: Table) -> Table:
    """Equal rows side by side are one block of rows, if all blocks are of one size."""
    n = len(table)
    changes = np.flatnonzero((table[1:] != table[:-1]).any(1)) + 1
    step = int(np.gcd.reduce([*changes.tolist(), n]))
    return table[::step]
