"""Scales that do to the weights what others do together are dropped, so that a basis is left.

An element of a tensor is multiplied by the product of what acts at its indices. A scale of all rows
and the inverse scale of all columns leave a matrix as it is, and so may whole combinations of
scales, although each of them has places of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import lcm

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix, vstack

from lightning_bnn.symmetry.discovery.classes import Ints
from lightning_bnn.symmetry.discovery.factors import Actions
from lightning_bnn.symmetry.integer_kernel import Row, integer_kernel
from lightning_bnn.symmetry.placements import Axis

__all__ = ["element_powers", "independent"]


def independent(
    axes: Sequence[Axis], shapes: Mapping[str, torch.Size], first: Actions, further: Actions
) -> tuple[Actions, Actions]:
    """The actions of as many variables as act independently of each other on the weights.

    Args:
        axes: where they act.
        shapes: those of all tensors, by name.
        first: variables of which every channel has one.
        further: those that are dropped where there is a choice.
    """
    start = int(first.variables.max(initial=-1)) + 1
    both = np.concatenate([first, further._replace(variables=further.variables + start)], 1)
    powers = element_powers(axes, shapes, Actions(*both))
    dropped = _dependent(powers, start)
    kept = (
        np.isin(first.variables, dropped, invert=True),
        np.isin(further.variables + start, dropped, invert=True),
    )
    parts = zip((first, further), kept, strict=True)
    left = [Actions(*(column[here] for column in acts)) for acts, here in parts]
    return left[0], left[1]


def element_powers(
    axes: Sequence[Axis], shapes: Mapping[str, torch.Size], acts: Actions
) -> csr_matrix:
    """By which powers of the variables (columns) elements are multiplied, or quotients of them.

    What is told of a tensor decides the powers at all of its elements.
    """
    offsets = np.cumsum([0, *(a.blocks * a.size for a in axes)])
    count = int(acts.variables.max(initial=-1)) + 1
    at = acts.positions + offsets[acts.axes]
    table = coo_matrix((acts.powers, (at, acts.variables)), (int(offsets[-1]), count)).tocsr()
    of_tensor: dict[str, list[int]] = defaultdict(list)
    for k in np.unique(acts.axes).tolist():
        of_tensor[axes[k].tensor].append(k)
    rows = [csr_matrix((0, count), dtype=np.int64)]
    for name, ks in of_tensor.items():
        own = [(axes[k], table[offsets[k] : offsets[k + 1]]) for k in ks]
        rows += _elements(own, shapes[name])
    found = vstack(rows).tocsr()
    found.eliminate_zeros()
    return found


_Own = Sequence[tuple[Axis, csr_matrix]]


def _elements(own: _Own, shape: torch.Size) -> Iterator[csr_matrix]:
    """The powers at the first element of every row, and how they change along the rows.

    Blocks of rows may see the columns in ways of their own. Beside axes of the flattened tensor
    every element is told.
    """
    if len(own) == 1:
        yield own[0][1]
        return
    if any(axis.dim is None for axis, _ in own):
        yield _at(own, shape, np.indices(shape).reshape(len(shape), -1))
        return
    blocks = lcm(*(axis.blocks for axis, _ in own))
    dims = {axis.dim for axis, _ in own if axis.dim is not None}
    step = 1 if 0 in dims else shape[0] // blocks
    corners = np.zeros((len(shape), shape[0] // step), np.int64)
    corners[0] = np.arange(0, shape[0], step)
    yield _at(own, shape, corners)
    for dim in dims - {0}:
        places = np.zeros((len(shape), blocks * shape[dim]), np.int64)
        places[0] = np.repeat(np.arange(0, shape[0], shape[0] // blocks), shape[dim])
        start = places.copy()
        places[dim] = np.tile(np.arange(shape[dim]), blocks)
        yield _at(own, shape, places) - _at(own, shape, start)


def _at(own: _Own, shape: torch.Size, places: Ints) -> csr_matrix:
    """The powers at some elements, given by one row of indices for every dimension."""
    total = csr_matrix((places.shape[1], own[0][1].shape[1]), dtype=np.int64)
    for axis, powers in own:
        if axis.dim is None:
            here = np.ravel_multi_index(tuple(places), tuple(shape)) if shape else places[:1].sum(0)
        else:
            here = places[0] * axis.blocks // shape[0] * axis.size + places[axis.dim]
            here = here if axis.dim else places[0]
        total = total + powers[here]
    return total


def _dependent(powers: csr_matrix, further: int) -> list[int]:
    """Variables without which all others act independently, of those from ``further`` on if any."""
    free = _not_pinned(powers)
    if not free.size:
        return []
    rows = powers[:, free]
    rows = rows[np.diff(rows.indptr) > 0]
    ends = rows.indptr
    equations: set[tuple[tuple[int, int], ...]] = set()
    for start, stop in zip(ends[:-1], ends[1:], strict=True):
        at = free[rows.indices[start:stop]].tolist()
        equations.add(tuple(sorted(zip(at, rows.data[start:stop].tolist(), strict=True))))
    told: list[Row] = [dict(row) for row in sorted(equations)]
    told += [{v: 0} for v in free.tolist()]
    combinations = integer_kernel(told, [v for v in free.tolist() if v >= further])
    uses = np.zeros(powers.shape[1], np.int64)
    for row in combinations:
        uses[list(row)] += 1
    return [max(v for v in row if uses[v] == 1) for row in combinations]


def _not_pinned(powers: csr_matrix) -> Ints:
    """Variables that may be part of a combination without effect.

    A variable that alone multiplies some element is no part of one; without these, others are alone
    somewhere.
    """
    free = np.diff(powers.tocsc().indptr) >= 0
    row = np.repeat(np.arange(powers.shape[0]), np.diff(powers.indptr))
    while True:
        here = free[powers.indices]
        alone = np.bincount(row[here], minlength=powers.shape[0]) == 1
        pinned = powers.indices[here & alone[row]]
        if not pinned.size:
            return np.flatnonzero(free)
        free[pinned] = False
