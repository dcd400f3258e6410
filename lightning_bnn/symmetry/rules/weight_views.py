"""How a view of a weight lies in the weight: which dimensions it walks, which rows it covers."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.symmetry.rules.labels import Unsupported, Weight, core, moving_dims

__all__ = ["RowRange", "parameter_dims", "positions"]

RowRange: TypeAlias = tuple[int, int] | None
"""First row and the one after the last; None for all of them."""


def positions(
    weight: Weight, dim: int | None, view_dim: int | None, count: int
) -> NDArray[np.int64]:
    """Indices along a dimension of the parameter that the dimension of a view walks."""
    if dim is None or view_dim is None:
        return np.arange(count)
    row = weight.coords[dim]
    for d in reversed(range(row.ndim)):
        if d != view_dim:
            row = row.select(d, 0)
    return row.numpy()


def parameter_dims(weight: Weight) -> tuple[dict[int, int], RowRange]:
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
    return mapping, _covered_rows(weight)


def _covered_rows(weight: Weight) -> RowRange:
    rows = None
    for p, full in enumerate(weight.full_shape):
        seen = torch.unique(core(weight.coords[p]))
        if len(seen) == full:
            continue
        start, stop = int(seen[0]), int(seen[-1]) + 1
        if p != 0 or stop - start != len(seen):
            raise Unsupported("a weight used through a slice that is not a range of rows")
        rows = (start, stop)
    return rows
