"""Groups of positive scales and of signs, from the variables of the channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from weightsym.discovery.dimensions.hashing import mix
from weightsym.discovery.dimensions.values import Ints
from weightsym.groups.symmetries import Axis, Group, Placement
from weightsym.groups.units import WRITES


class Actions(NamedTuple):
    """Variables, the positions on which they act, and powers, as four columns of equal length."""

    variables: Ints
    positions: Ints
    axes: Ints
    powers: Ints


def unit_groups(group_type: type[Group], axes: Sequence[Axis], acts: Actions) -> tuple[Any, ...]:
    """Group the variables that act on the same axes in the same way.

    Args:
        group_type: what the groups are.
        axes: where they act.
        acts: all that the variables do.
    """
    variables, positions, axis_ids, powers = acts
    if not variables.size:
        return ()
    count = int(variables.max()) + 1
    signature, first = np.zeros(count, np.uint64), np.full(count, np.iinfo(np.int64).max)
    offsets = np.cumsum([0, *(x.blocks * x.size for x in axes)])
    entry = positions + offsets[axis_ids]
    np.minimum.at(first, variables, entry)
    reads = np.array([x.role not in WRITES for x in axes])[axis_ids]
    rank, best = entry + reads * offsets[-1], np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(best, variables, rank)
    orientation = np.ones(count, np.int64)
    leading = rank == best[variables]
    orientation[variables[leading]] = np.sign(powers[leading])
    powers = powers * orientation[variables]
    with np.errstate(over="ignore"):
        np.add.at(signature, variables, mix(axis_ids, powers))
    present = np.flatnonzero(first < np.iinfo(np.int64).max)
    order = np.lexsort((positions, axis_ids, -powers, variables))
    variables, positions, axis_ids, powers = (
        x[order] for x in (variables, positions, axis_ids, powers)
    )
    span = np.searchsorted(variables, np.arange(count + 1))
    groups = []
    for members in _split_by(present[np.lexsort((first[present], signature[present]))], signature):
        rows = span[members][:, None] + np.arange(span[members[0] + 1] - span[members[0]])
        places = _placements(axis_ids, powers, positions, rows)
        group = group_type(len(members), writer_of(axes, places), places)
        groups.append((int(first[members].min()), group))
    return tuple(group for _, group in sorted(groups, key=lambda pair: pair[0]))


def _placements(axis_ids: Ints, powers: Ints, positions: Ints, rows: Ints) -> tuple[Placement, ...]:
    """Return the placements of units that all act on the same axes, one table row per unit."""
    actions = np.stack([axis_ids[rows[0]], powers[rows[0]]], 1)
    places = []
    for axis, power in dict.fromkeys(map(tuple, actions.tolist())):
        columns = (actions == (axis, power)).all(1)
        places.append(Placement(axis, torch.from_numpy(positions[rows[:, columns]]), power))
    return tuple(sorted(places, key=lambda p: p.axis))


def writer_of(axes: Sequence[Axis], places: Sequence[Placement]) -> str:
    """Return the tensor that writes the units of a group."""
    writers = [axes[p.axis] for p in places if axes[p.axis].role in WRITES]
    return (writers or [axes[p.axis] for p in places])[0].tensor


def _split_by(members: Ints, signature: NDArray[np.uint64]) -> list[Ints]:
    return (
        np.split(members, np.flatnonzero(np.diff(signature[members])) + 1) if members.size else []
    )
