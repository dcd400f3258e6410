"""From ties between channels to groups: components, then classes of equal channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from lightning_bnn.symmetry.discovery.classes import (
    Channels,
    Ints,
    mix,
    name_of,
    permutation_groups,
)
from lightning_bnn.symmetry.groups import (
    Axis,
    Group,
    Placement,
    ScalingGroup,
    SignGroup,
    Symmetries,
)
from lightning_bnn.symmetry.rules.constraints import Constraints, Entry, Labels, Product
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["solve"]


def solve(system: Constraints, shapes: Mapping[str, torch.Size]) -> Symmetries:
    """Solve the three systems and describe their free motions as groups."""
    roots = _components(system.ties["permutation"], system.nodes)
    scale_id, scale_sign = _solve_scales(system)
    sign_id = _solve_signs(system)
    systems = (roots, scale_id, sign_id)
    entries = [_simplify(e, shapes, systems) for e in _assemble(system, shapes, systems)]
    axes = tuple(
        Axis(
            e.name,
            e.dim if shapes[e.name] else None,
            e.labels.shape[-1],
            e.role,
            e.labels.shape[0],
            e.last_read,
        )
        for e in entries
    )
    labels = [np.where(e.labels < 0, FROZEN, e.labels).ravel() for e in entries]
    channels = Channels(system, roots, axes, labels)
    return Symmetries(
        axes=axes,
        permutations=permutation_groups(channels),
        scalings=_factor_groups(
            ScalingGroup, axes, labels, scale_id, [e.scale * scale_sign for e in entries]
        ),
        signs=_factor_groups(
            SignGroup, axes, labels, sign_id, [np.full(system.nodes, e.sign) for e in entries]
        ),
    )


# ------------------------------------------------------------ components
def _components(ties: Sequence[Ints], nodes: int) -> Ints:
    pairs = np.concatenate(ties, 1) if ties else np.zeros((2, 0), np.int64)
    graph = coo_matrix((np.ones(pairs.shape[1], bool), (pairs[0], pairs[1])), (nodes, nodes))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def _solve_scales(system: Constraints) -> tuple[Ints, Ints]:
    """Per channel the variable of its log scale (-1: fixed), and its sign in it.

    Every channel has two copies, plus and minus; a channel whose copies are connected has log scale
    zero.
    """
    n = system.nodes
    equal = [np.concatenate([t, t + n], 1) for t in system.ties["scale"]]
    opposite = [_crossed(t, n) for t in system.ties["inverse scale"]]
    ties = [np.array([[FROZEN], [n]]), *equal, *opposite]

    def resolve(product: Product, fixed: NDArray[np.bool_]) -> list[Ints]:
        found = []
        out, a, b = product.out, product.a, product.b
        for known, pair, crossed in (
            (a, (out, b), product.inverse),
            (b, (out, a), False),
            (out, (a, b), not product.inverse),
        ):
            mask = fixed[known]
            tie = np.stack([pair[0][mask], pair[1][mask]])
            found.append(_crossed(tie, n) if crossed else np.concatenate([tie, tie + n], 1))
        return found

    both = _fixpoint(ties, system.products, (n, 2), lambda c: c[:n] == c[n:], resolve)
    plus, minus = both[:n], both[n:]
    fixed = plus == minus
    names, index = np.unique(np.where(fixed, -1, np.minimum(plus, minus)), return_inverse=True)
    index = index.reshape(-1) - (1 if names[0] == -1 else 0)
    return np.where(fixed, -1, index), np.where(plus <= minus, 1, -1)


def _crossed(tie: Ints, n: int) -> Ints:
    return np.concatenate([np.stack([tie[0], tie[1] + n]), np.stack([tie[0] + n, tie[1]])], 1)


def _solve_signs(system: Constraints) -> Ints:
    """Per channel the variable of its sign, -1 where it is fixed."""

    def resolve(product: Product, fixed: NDArray[np.bool_]) -> list[Ints]:
        trio = (product.out, product.a, product.b)
        return [np.stack([x[fixed[k]] for x in trio if x is not k]) for k in trio]

    roots = _fixpoint(
        list(system.ties["sign"]),
        system.products,
        (system.nodes, 1),
        lambda c: c == c[FROZEN],
        resolve,
    )
    names, index = np.unique(np.where(roots == roots[FROZEN], -1, roots), return_inverse=True)
    return index.reshape(-1) - (1 if names[0] == -1 else 0)


def _fixpoint(
    ties: list[Ints],
    products: Sequence[Product],
    size: tuple[int, int],
    is_fixed: Any,
    resolve: Any,
) -> Ints:
    """Add what products imply until nothing changes; of two free factors the second is fixed."""
    nodes, copies = size
    pending = list(products)
    while True:
        roots = _components(ties, copies * nodes)
        fixed = is_fixed(roots)
        if not pending:
            return roots
        still, progressed = [], False
        for product in pending:
            implied = resolve(product, fixed)
            ties += [t for t in implied if t.size]
            done = fixed[product.a] | fixed[product.b] | fixed[product.out]
            progressed |= bool(done.any())
            if not done.all():
                still.append(
                    Product(product.out[~done], product.a[~done], product.b[~done], product.inverse)
                )
        if not progressed:
            b = still[0].b
            ties += [np.stack([b + k * nodes, np.full_like(b, FROZEN)]) for k in range(copies)]
        pending = still


# ------------------------------------------------------------ axes
def _assemble(
    system: Constraints, shapes: Mapping[str, torch.Size], systems: Sequence[Ints]
) -> list[Entry]:
    """Join the row ranges of one axis (packed projections) into one entry with blocks."""
    parts: dict[tuple[str, int | None, int], list[Entry]] = defaultdict(list)
    for (name, dim, slot, _), entry in system.entries.items():
        parts[name, dim, slot].append(entry)
    return [
        found[0] if len(found) == 1 and found[0].rows is None else _join(found, shapes, systems)
        for found in parts.values()
    ]


def _join(
    parts: Sequence[Entry], shapes: Mapping[str, torch.Size], systems: Sequence[Ints]
) -> Entry:
    """One entry of blocks; rows that the example does not reach follow the others, if these agree.

    Rows beyond the example write channels that were not seen: those have no label.
    """
    first = parts[0]
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
    found = [(int((row < 0).sum()), dim) for dim, row in enumerate(rows) if row is not None]
    if not found:
        return replace(entry, labels=np.where(read, table, FROZEN).reshape(1, -1), rows=None)
    dim = min(found)[1]
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


# ------------------------------------------------------------ scalings and signs
def _factor_groups(
    kind: type[Group],
    axes: Sequence[Axis],
    labels: Sequence[Ints],
    variable: Ints,
    exponents: Sequence[Ints],
) -> tuple[Any, ...]:
    """Variables that act on the same axes in the same way form one group."""
    variables, positions, axis_ids, powers = _actions(labels, variable, exponents)
    if not variables.size:
        return ()
    count = int(variables.max()) + 1
    signature, first = np.zeros(count, np.uint64), np.full(count, np.iinfo(np.int64).max)
    offsets = np.cumsum([0, *(x.size for x in labels)])
    place = positions + offsets[axis_ids]
    np.minimum.at(first, variables, place)
    orientation = np.ones(count, np.int64)
    leading = place == first[variables]
    orientation[variables[leading]] = powers[leading]
    powers = powers * orientation[variables]
    with np.errstate(over="ignore"):
        np.add.at(signature, variables, mix(axis_ids * 4 + powers + 1, 5))
    present = np.flatnonzero(first < np.iinfo(np.int64).max)
    order = np.lexsort((positions, axis_ids, -powers, variables))
    variables, positions, axis_ids, powers = (
        x[order] for x in (variables, positions, axis_ids, powers)
    )
    span = np.searchsorted(variables, np.arange(count + 1))
    groups = []
    for members in _split_by(present[np.lexsort((first[present], signature[present]))], signature):
        rows = span[members][:, None] + np.arange(span[members[0] + 1] - span[members[0]])
        places = []
        for axis, power in dict.fromkeys(
            zip(axis_ids[rows[0]].tolist(), powers[rows[0]].tolist(), strict=True)
        ):
            columns = (axis_ids[rows[0]] == axis) & (powers[rows[0]] == power)
            places.append(Placement(axis, torch.from_numpy(positions[rows[:, columns]]), power))
        places.sort(key=lambda p: p.axis)
        groups.append(
            (int(first[members].min()), kind(len(members), name_of(axes, places), tuple(places)))
        )
    return tuple(g for _, g in sorted(groups, key=lambda x: x[0]))


def _actions(
    labels: Sequence[Ints], variable: Ints, exponents: Sequence[Ints]
) -> tuple[Ints, Ints, Ints, Ints]:
    parts = []
    for axis, (nodes, exponent) in enumerate(zip(labels, exponents, strict=True)):
        at = np.flatnonzero((variable[nodes] >= 0) & (exponent[nodes] != 0))
        parts.append(
            np.stack([variable[nodes[at]], at, np.full_like(at, axis), exponent[nodes[at]]])
        )
    table = np.concatenate(parts, 1) if parts else np.zeros((4, 0), np.int64)
    return table[0], table[1], table[2], table[3]


def _split_by(members: Ints, signature: NDArray[np.uint64]) -> list[Ints]:
    return (
        np.split(members, np.flatnonzero(np.diff(signature[members])) + 1) if members.size else []
    )
