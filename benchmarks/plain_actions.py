"""Elements of a group acted out on numpy arrays, from the description of `Symmetries` alone.

Nothing of the package is used but the fields of its result, so that it can be judged by this.
"""

from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]


def permuted(weights: Weights, symmetries: Any, orders: list[np.ndarray]) -> Weights:
    """Unit k of the new network is unit ``orders[g][k]`` of the old; inner groups move first."""
    moved = dict(weights)
    for tensor in _tensors(symmetries, symmetries.permutations):
        moved[tensor] = _moved(weights[tensor], tensor, symmetries, orders)
    for group, order in zip(symmetries.permutations, orders, strict=True):
        for row in group.tensors:  # whole tensors, such as those of experts, change places
            moved |= {name: moved[row[k]] for name, k in zip(row, order.tolist(), strict=True)}
    return _with_aliases(moved, symmetries)


def multiplied(weights: Weights, symmetries: Any, kind: str, values: list[np.ndarray]) -> Weights:
    """Every position of a unit is multiplied by the unit's value to the exponent of its place."""
    groups, result = getattr(symmetries, kind), dict(weights)
    for group, value in zip(groups, values, strict=True):
        for place in group.placements:
            axis = symmetries.axes[place.axis]
            factors = np.ones(axis.blocks * axis.size)
            for unit, positions in enumerate(place.positions.tolist()):
                for position in positions:
                    factors[position] *= value[unit] ** float(place.exponent)
            result[axis.tensor] = _times(result[axis.tensor], axis, factors)
    return _with_aliases(result, symmetries)


def mixed(weights: Weights, symmetries: Any, matrices: list[np.ndarray]) -> Weights:
    """Channels of a space times its matrix; its inverse transpose where the exponent is -1."""
    result = dict(weights)
    for group, own in zip(symmetries.linear, matrices, strict=True):
        for place in group.placements:
            axis = symmetries.axes[place.axis]
            rows = _in_a_row(result[axis.tensor], axis)
            new = rows.copy()
            for space, positions in enumerate(place.positions.numpy()):
                g = own[space] if place.exponent == 1 else np.linalg.inv(own[space]).T
                for repeat in positions.T:
                    new[..., repeat] = rows[..., repeat] @ g.T
            result[axis.tensor] = _from_a_row(new, result[axis.tensor], axis)
    return _with_aliases(result, symmetries)


def shifted(weights: Weights, symmetries: Any, values: list[np.ndarray]) -> Weights:
    """Biases and tables plus a vector, or minus it; the biases of readers lose what it adds."""
    result = dict(weights)
    for group, value in zip(symmetries.shifts, values, strict=True):
        before = dict(result)
        for place in group.placements:
            axis = symmetries.axes[place.axis]
            row = _in_a_row(result[axis.tensor], axis) + place.exponent * _spread(
                place, axis, value
            )
            result[axis.tensor] = _from_a_row(row, result[axis.tensor], axis)
        for reader in group.readers:
            axis = symmetries.axes[reader.channels.axis]
            incoming = np.split(_in_a_row(before[axis.tensor], axis), axis.blocks, -1)
            added = np.split(_spread(reader.channels, axis, value), axis.blocks)
            parts = [
                (w @ c).reshape(len(w), -1).sum(1) for w, c in zip(incoming, added, strict=True)
            ]
            result[reader.bias] = result[reader.bias] - np.concatenate(parts)
    return _with_aliases(result, symmetries)


def _spread(place: Any, axis: Any, value: np.ndarray) -> np.ndarray:
    """A number for every position of an axis, 0 where a place has none."""
    row = np.zeros(axis.blocks * axis.size)
    for number, positions in zip(value, place.positions.numpy(), strict=True):
        row[positions] = number
    return row


def _in_a_row(w: np.ndarray, axis: Any) -> np.ndarray:
    """The positions of an axis along the last dimension."""
    if axis.dim is None:
        return w.reshape(-1)
    parts = np.split(w, axis.blocks, 0) if axis.blocks > 1 else [w]
    return np.concatenate([np.moveaxis(part, axis.dim, -1) for part in parts], -1)


def _from_a_row(row: np.ndarray, like: np.ndarray, axis: Any) -> np.ndarray:
    if axis.dim is None:
        return row.reshape(like.shape)
    parts = [np.moveaxis(part, -1, axis.dim) for part in np.split(row, axis.blocks, -1)]
    return np.concatenate(parts, 0) if axis.blocks > 1 else parts[0]


def _tensors(symmetries: Any, groups: Any) -> list[str]:
    return sorted({symmetries.axes[p.axis].tensor for g in groups for p in g.placements})


def _moved(old: np.ndarray, tensor: str, symmetries: Any, orders: list[np.ndarray]) -> np.ndarray:
    axes = [k for k, axis in enumerate(symmetries.axes) if axis.tensor == tensor]
    for k in sorted(axes, key=lambda k: symmetries.axes[k].blocks):  # rows before their columns
        axis = symmetries.axes[k]
        source = _sources(k, symmetries, orders)
        if axis.dim is None:
            old = old.reshape(-1)[source].reshape(old.shape)
        elif axis.blocks == 1:
            old = np.take(old, source, axis.dim)
        else:
            rows = np.split(old, axis.blocks, 0)
            columns = source.reshape(axis.blocks, axis.size) % axis.size
            parts = [np.take(r, c, axis.dim) for r, c in zip(rows, columns, strict=True)]
            old = np.concatenate(parts, 0)
    return old


def _sources(axis: int, symmetries: Any, orders: list[np.ndarray]) -> np.ndarray:
    """The old position of every new one: the groups act one after the other, inner ones first."""
    sources = list(range(symmetries.axes[axis].blocks * symmetries.axes[axis].size))
    for group, order in zip(symmetries.permutations, orders, strict=True):
        before = list(sources)
        for place in group.placements:
            positions = place.positions.tolist() if place.axis == axis else []
            for unit in range(len(positions)):
                for new, old in zip(positions[unit], positions[order[unit]], strict=True):
                    sources[new] = before[old]
    return np.array(sources)


def _times(w: np.ndarray, axis: Any, factors: np.ndarray) -> np.ndarray:
    if axis.dim is None:
        return w * factors.reshape(w.shape)
    shape = [1] * w.ndim
    shape[axis.dim] = axis.size
    if axis.blocks == 1:
        return w * factors.reshape(shape)
    rows = zip(np.split(w, axis.blocks, 0), factors.reshape(axis.blocks, -1), strict=True)
    return np.concatenate([r * f.reshape(shape) for r, f in rows], 0)


def _with_aliases(weights: Weights, symmetries: Any) -> Weights:
    return {n: weights[symmetries.aliases.get(n, n)] for n in weights}
