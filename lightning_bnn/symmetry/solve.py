"""From ties between channels to groups: components, then classes of equal channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from lightning_bnn.symmetry.constraints import Constraints, Entry, Product
from lightning_bnn.symmetry.groups import (
    Axis,
    Group,
    PermutationGroup,
    Placement,
    ScalingGroup,
    SignGroup,
    Symmetries,
)
from lightning_bnn.symmetry.labels import FROZEN

__all__ = ["solve"]

Ints = NDArray[np.integer]


def solve(system: Constraints, shapes: Mapping[str, torch.Size]) -> Symmetries:
    """Solve the three systems and describe their free motions as groups."""
    roots = _components(system.ties["permutation"], system.nodes)
    scale_id, scale_sign = _solve_scales(system)
    sign_id = _solve_signs(system)
    entries = [_simplify(e, shapes, (roots, scale_id, sign_id)) for e in _assemble(system, shapes)]
    axes = tuple(
        Axis(e.name, e.dim, e.labels.shape[-1], e.role, e.labels.shape[0], e.last_read)
        for e in entries
    )
    labels = [np.where(e.labels < 0, FROZEN, e.labels).ravel() for e in entries]
    channels = _Channels(system, roots, axes, labels)
    return Symmetries(
        axes=axes,
        permutations=_permutation_groups(channels),
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
def _assemble(system: Constraints, shapes: Mapping[str, torch.Size]) -> list[Entry]:
    """Join the row ranges of one axis (packed projections) into one entry with blocks."""
    parts: dict[tuple[str, int | None, int], list[Entry]] = defaultdict(list)
    for (name, dim, slot, _), entry in system.entries.items():
        parts[name, dim, slot].append(entry)
    return [
        found[0] if len(found) == 1 and found[0].rows is None else _join(found, shapes)
        for found in parts.values()
    ]


def _join(parts: Sequence[Entry], shapes: Mapping[str, torch.Size]) -> Entry:
    first = parts[0]
    total = shapes[first.name][0]
    step = int(np.gcd.reduce([x for p in parts for x in (*(p.rows or (0, total)), total)]))
    labels = np.full((total // step, first.labels.shape[-1]), -1)
    for part in parts:
        start, stop = part.rows or (0, total)
        labels[start // step : stop // step] = part.labels
    last = max(p.last_read for p in parts)
    return Entry(first.name, first.dim, labels, first.role, first.scale, first.sign, last_read=last)


def _simplify(entry: Entry, shapes: Mapping[str, torch.Size], systems: Sequence[Ints]) -> Entry:
    """A tensor followed element by element often changes along one dimension only."""
    labels = np.atleast_2d(entry.labels)
    shape = shapes.get(entry.name)
    if entry.dim is None and shape is not None:
        table = labels.reshape(shape)
        for dim in range(len(shape)):
            row = table[tuple(slice(None) if d == dim else slice(0, 1) for d in range(len(shape)))]
            if all((s[table] == s[row]).all() for s in systems):
                return Entry(
                    entry.name, dim, row.reshape(1, -1), entry.role, entry.scale, entry.sign
                )
    return replace(entry, labels=labels, rows=None)


# ------------------------------------------------------------ permutations
def _hash(values: Any, salt: int) -> NDArray[np.uint64] | np.uint64:
    """Mix integers into 64 bits, so that sets can be compared by their sums."""
    x = np.asarray(values).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(salt + 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


@dataclass
class _Channels:
    """Classes of channels: where each lives, which operations it met, in which blocks it lies."""

    system: Constraints
    roots: Ints
    axes: Sequence[Axis]
    labels: Sequence[Ints]

    def __post_init__(self) -> None:
        """Sum up the signature of every class."""
        count = int(self.roots.max()) + 1
        self.frozen = int(self.roots[FROZEN])
        node = np.zeros(self.system.nodes, np.uint64)
        with np.errstate(over="ignore"):
            for op, seen in enumerate(self.system.seen):
                node[seen] += _hash(op, 1)
            for axis, labels in enumerate(self.labels):
                np.add.at(node, labels, _hash(axis, 2))
            self.node_hash = node
            self.where = np.zeros(count, np.uint64)
            np.add.at(self.where, self.roots, _hash(node, 3))
        self.first = np.full(count, np.iinfo(np.int64).max)
        self._place()
        self._tag(count)

    def _place(self) -> None:
        """Per axis: the positions of every class, those of equal rank side by side."""
        self.order, self.start, self.found = [], [], []
        offset = 0
        for labels in self.labels:
            roots = self.roots[labels]
            order = np.lexsort((np.arange(labels.size), self.node_hash[labels], roots))
            found, start = np.unique(roots[order], return_index=True)
            self.order.append(order)
            self.found.append(found)
            self.start.append(np.append(start, labels.size))
            lowest = np.minimum.reduceat(order, start) if labels.size else start
            np.minimum.at(self.first, found, lowest + offset)
            offset += labels.size

    def _tag(self, count: int) -> None:
        self.tags: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.pinned: set[tuple[int, int]] = set()
        self.tag_hash = np.zeros(count, np.uint64)
        for tag, rows in enumerate(self.system.blocks):
            if len(rows) < 2:
                continue
            roots = self.roots[np.where(rows < 0, FROZEN, rows)]
            for block, row in enumerate(roots):
                members = np.unique(row)
                if (members == self.frozen).any():
                    self.pinned.add((tag, block))
                members = members[members != self.frozen]
                with np.errstate(over="ignore"):
                    self.tag_hash[members] += _hash(tag * 1_000_003 + block, 4)
                for root in members.tolist():
                    self.tags[root].append((tag, block))

    def classes(self) -> list[Ints]:
        """Channels with equal signature, in the order of their first place."""
        placed = np.unique(np.concatenate([*self.found, np.array(list(self.tags), np.int64)]))
        placed = placed[placed != self.frozen]
        if not placed.size:
            return []
        key = np.stack([self.where[placed], self.tag_hash[placed]], 1)
        _, index = np.unique(key, axis=0, return_inverse=True)
        order = np.lexsort((self.first[placed], index.reshape(-1)))
        groups = np.split(placed[order], np.flatnonzero(np.diff(index.reshape(-1)[order])) + 1)
        return sorted(groups, key=lambda g: (self.first[g[0]], int(g[0])))

    def placements(self, units: Ints) -> tuple[Placement, ...]:
        """Where units, given as rows of classes, live."""
        result = []
        for axis in range(len(self.axes)):
            found, start, order = self.found[axis], self.start[axis], self.order[axis]
            at = np.searchsorted(found, units)
            here = (
                (at < len(found)) & (found[np.minimum(at, len(found) - 1)] == units)
                if len(found)
                else at < 0
            )
            columns = []
            for column in np.flatnonzero(here.any(0)):
                index = at[:, column]
                width = int(start[index[0] + 1] - start[index[0]])
                columns.append(order[start[index][:, None] + np.arange(width)])
            if columns:
                result.append(Placement(axis, torch.from_numpy(np.concatenate(columns, 1))))
        return tuple(result)


def _permutation_groups(channels: _Channels) -> tuple[PermutationGroup, ...]:
    classes = channels.classes()
    groups: list[PermutationGroup] = []
    group_of: dict[int, int] = {}
    used = [np.zeros(0)] if not channels.found else channels.found
    placed = set(np.concatenate(used).tolist())
    for index, members in enumerate(classes):
        if len(members) > 1 and int(members[0]) in placed:
            places = _once_per_dimension(channels.axes, channels.placements(members[:, None]))
            group_of[index] = len(groups)
            groups.append(PermutationGroup(len(members), _name(channels.axes, places), places))
    return (*groups, *_block_groups(channels, classes, group_of))


def _block_groups(
    channels: _Channels, classes: Sequence[Ints], group_of: Mapping[int, int]
) -> list[PermutationGroup]:
    """Blocks with the same inside are exchangeable as wholes."""
    tagged = [i for i, members in enumerate(classes) if int(members[0]) in channels.tags]
    if not tagged:
        return []
    similar: dict[Any, list[list[int]]] = defaultdict(list)
    for component in _linked(channels, classes, tagged):
        tags = [t for i in component for t in channels.tags[int(classes[i][0])]]
        if not channels.pinned.intersection(tags):
            walk = _walk(channels, classes, component)
            similar[tuple(_block_key(channels, classes[i]) for i in walk)].append(walk)
    result = []
    for blocks in similar.values():
        if len(blocks) < 2:
            continue
        blocks.sort(key=lambda b: min(channels.first[classes[i][0]] for i in b))
        units = np.stack([np.concatenate([classes[i] for i in block]) for block in blocks])
        places = _once_per_dimension(channels.axes, channels.placements(units))
        inner = tuple(
            tuple(group_of[block[k]] for block in blocks)
            for k in range(len(blocks[0]))
            if blocks[0][k] in group_of
        )
        if places:
            result.append(
                PermutationGroup(len(blocks), _name(channels.axes, places), places, "block", inner)
            )
    return sorted(
        result, key=lambda g: (g.placements[0].axis, int(g.placements[0].positions.min()))
    )


def _block_key(channels: _Channels, members: Ints) -> tuple[int, tuple[int, ...], int]:
    root = int(members[0])
    return int(channels.where[root]), tuple(sorted(t for t, _ in channels.tags[root])), len(members)


def _walk(channels: _Channels, classes: Sequence[Ints], component: Sequence[int]) -> list[int]:
    """The classes of a block, each reached from one before it: blocks pair up link by link."""
    sharing: dict[tuple[int, int], list[int]] = defaultdict(list)
    rank = {i: (_block_key(channels, classes[i]), channels.first[classes[i][0]]) for i in component}
    for i in sorted(component, key=rank.__getitem__):
        for tag in channels.tags[int(classes[i][0])]:
            sharing[tag].append(i)
    walk = [min(component, key=rank.__getitem__)]
    seen = set(walk)
    for i in walk:
        for tag in sorted(channels.tags[int(classes[i][0])]):
            new = [j for j in sharing[tag] if j not in seen]
            walk += new
            seen.update(new)
    return walk


def _linked(channels: _Channels, classes: Sequence[Ints], tagged: Sequence[int]) -> list[list[int]]:
    ids: dict[tuple[int, int], int] = {}
    rows, columns = [], []
    for k, i in enumerate(tagged):
        for tag in channels.tags[int(classes[i][0])]:
            rows.append(k)
            columns.append(len(tagged) + ids.setdefault(tag, len(ids)))
    size = len(tagged) + len(ids)
    graph = coo_matrix((np.ones(len(rows), bool), (rows, columns)), (size, size))
    component = connected_components(graph, directed=False)[1][: len(tagged)]
    members: dict[int, list[int]] = defaultdict(list)
    for k, c in enumerate(component):
        members[int(c)].append(tagged[k])
    return list(members.values())


def _once_per_dimension(axes: Sequence[Axis], places: Sequence[Placement]) -> tuple[Placement, ...]:
    """A gain has incoming and outgoing channels on one dimension: it is moved once."""
    seen: set[tuple[str, int | None]] = set()
    kept = []
    for place in places:
        key = axes[place.axis].tensor, axes[place.axis].dim
        if key not in seen:
            seen.add(key)
            kept.append(place)
    return tuple(kept)


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
        np.add.at(signature, variables, _hash(axis_ids * 4 + powers + 1, 5))
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
            (int(first[members].min()), kind(len(members), _name(axes, places), tuple(places)))
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


def _name(axes: Sequence[Axis], places: Sequence[Placement]) -> str:
    writers = [axes[p.axis] for p in places if axes[p.axis].role in ("out", "raw", "gain")]
    return (writers or [axes[p.axis] for p in places])[0].tensor
