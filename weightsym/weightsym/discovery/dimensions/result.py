"""From labels to `Symmetries`: tensor axes, and the positions of groups' units on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from weightsym.discovery.dimensions.exchanges import Exchange, exchanges, signatures
from weightsym.discovery.dimensions.matrices import Space, spaces
from weightsym.discovery.dimensions.reading import Reading
from weightsym.discovery.dimensions.roles import Roles
from weightsym.discovery.dimensions.scales import (
    Field,
    Row,
    Units,
    connected,
    ratio,
    units_at_entries,
)
from weightsym.discovery.dimensions.unit_groups import Actions, unit_groups, writer_of
from weightsym.discovery.dimensions.values import Factor, Ints, distinct
from weightsym.groups.placements import LinearKind
from weightsym.groups.symmetries import (
    Axis,
    Frozen,
    LinearGroup,
    PermutationGroup,
    Placement,
    ScalingGroup,
    SignGroup,
)

_Places: TypeAlias = dict[tuple[int, int], Ints]
"""Positions of a space by axis and power, ``(size, repeats)``."""


def groups_of(reading: Reading) -> dict[str, Any]:
    """Return the fields of `Symmetries`: the groups, and tensors that were not searched in full."""
    layout = GroupLayout(reading)
    scales = _actions(layout, layout.scales, "rational")
    signs = _actions(layout, layout.signs, "two")
    permutations = _permutations(layout)
    return {
        "axes": tuple(layout.axes),
        "permutations": permutations,
        "scalings": unit_groups(ScalingGroup, layout.axes, scales),
        "signs": unit_groups(SignGroup, layout.axes, signs),
        "linear": _linear(layout),
        "frozen": tuple(_unsearched(layout)),
    }


class GroupLayout:
    """The axes of all tensors, their labels, the classes of labels, and their positions.

    Attributes:
        axes: one for each factor of each tensor.
        labels: by axis, the label at every position.
        powers: by axis, with which power scales act there; 0 where nothing but movement does.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading, self.exchanges = reading, exchanges(reading)
        parameters = reading.parameters
        factors, system = [p.factors for p in parameters.values()], reading.system
        self.scales = Units(system.scales, system.count, "rational", factors)
        self.signs = Units(system.signs, system.count, "two", factors)
        self.axes: list[Axis] = []
        self.labels: list[Ints] = []
        self.powers: list[Fraction] = []
        self.parities: list[int] = []
        self._roles = Roles(reading)
        self.families = np.arange(self.exchanges.class_count)
        for group in self.exchanges.groups:
            if not group.is_block:
                family = [x for unit in group.units for x in unit if x < len(self.families)]
                self.families[family] = family[0]
        self._shape = {n: p.shape for n, p in reading.parameters.items()}
        uses = {
            n: self._roles.first_use(x.labels.numpy() for x in p.factors)
            for n, p in parameters.items()
        }
        for name in sorted(parameters, key=uses.__getitem__):
            for factor in _by_dimension(parameters[name].factors):
                self._add(name, parameters[name].shape, factor)
        self._rows: dict[str, int] = {}
        classes = self.exchanges.classes
        sizes = [labels.size for labels in self.labels]
        self._class_at = classes[np.concatenate([np.zeros(0, np.int64), *self.labels])]
        self._order = np.argsort(self._class_at, kind="stable")
        self._classes = self._class_at[self._order]
        self._axis_at = np.repeat(np.arange(len(sizes)), sizes)
        self._first_at = np.cumsum([0, *sizes])

    def _add(self, name: str, shape: tuple[int, ...], factor: Factor) -> None:
        families = self.families[self.exchanges.classes]
        dim, blocks, labels = _laid_out(shape, factor, families)
        role, last = self._roles.of(labels)
        size = labels.size // blocks
        self.axes.append(Axis(name, dim, size, role, blocks, last))
        self.labels.append(labels)
        self.powers.append(factor.power)
        self.parities.append(factor.parity)

    def placements(
        self, units: Sequence[Sequence[int]], without: frozenset[str] = frozenset()
    ) -> tuple[Placement, ...]:
        """Return the placements of units that are given as corresponding classes."""
        rows = np.array(units, np.int64).T
        entries, sizes = self._entries(rows.ravel())
        row_at = np.repeat(np.arange(rows.size) // max(1, len(units)), sizes)
        tables: dict[int, Ints] = {}
        for axis in distinct(self._axis_at[entries]).tolist():
            if self.axes[axis].tensor not in without:
                inside = self._axis_at[entries] == axis
                positions = entries[inside] - self._first_at[axis]
                tables[axis] = self._positions(axis, positions, row_at[inside], len(units))
        tables |= self._moving_rows(tables)
        return tuple(Placement(axis, torch.from_numpy(tables[axis])) for axis in sorted(tables))

    def _entries(self, classes: Ints) -> tuple[Ints, Ints]:
        """Return the positions of classes, concatenated over axes, and the number per class."""
        first, last = (np.searchsorted(self._classes, classes, side) for side in ("left", "right"))
        sizes = last - first
        starts = first + sizes - np.cumsum(sizes)
        return self._order[np.arange(sizes.sum()) + np.repeat(starts, sizes)], sizes

    def positions_of(self, classes: Iterable[int]) -> Iterator[tuple[int, Ints]]:
        """Yield the axes on which some classes occur, with their positions in ascending order."""
        entries = np.sort(self._entries(np.array([*classes], np.int64))[0])
        axes = self._axis_at[entries]
        for axis in distinct(axes).tolist():
            yield axis, entries[axes == axis] - self._first_at[axis]

    def _positions(self, axis: int, positions: Ints, row_at: Ints, units: int) -> Ints:
        """Arrange the positions on an axis so that each column holds corresponding classes."""
        rows, sizes = np.unique(row_at, return_counts=True)
        repeats = sizes // units
        factors = []
        for times in distinct(repeats).tolist():
            factor = positions[np.repeat(repeats == times, sizes)].reshape(-1, units, times)
            factors.append(self._in_roles(axis, factor).transpose(1, 0, 2).reshape(units, -1))
        order = [np.repeat(rows[repeats == times], times) for times in distinct(repeats).tolist()]
        return np.concatenate(factors, 1)[:, np.argsort(np.concatenate(order), kind="stable")]

    @cached_property
    def sides(self) -> Ints:
        """Classes of labels without the ties within planes: one class for each side."""
        system = self.reading.system

        def code(pairs: Ints) -> Ints:
            low, high = np.sort(pairs, 1).T
            return low * system.count + high

        planes = distinct(np.concatenate([*map(code, system.planes)]))
        ties = [t.pairs[~np.isin(code(t.pairs), planes)] for t in system.ties]
        return connected(ties, system.count)

    def signed_power(self, axis: int, position: int) -> int:
        """Return the power of the scale at a position, or 0 for no scale or several."""
        row = tuple(self.scales.of(int(self.labels[axis][position])).values())
        return int(row[0]) if row in ((1,), (-1,)) else 0

    @cached_property
    def _signatures(self) -> NDArray[np.uint64]:
        return signatures(self.reading.system)

    def _in_roles(self, axis: int, tables: Ints) -> Ints:
        """Sort the positions of corresponding classes so that equal roles align."""
        if tables.shape[2] == 1:
            return tables
        signatures = self._signatures[self.labels[axis][tables]]
        order = np.argsort(signatures, 2, kind="stable")
        signatures = np.take_along_axis(signatures, order, 2)
        is_alike = (signatures == signatures[:, :1]).all((1, 2))[:, None, None]
        return np.where(is_alike, np.take_along_axis(tables, order, 2), tables)

    def _moving_rows(self, tables: Mapping[int, Ints]) -> dict[int, Ints]:
        """Return rows of stacks that move as wholes, where only the entries inside have labels."""
        moving: dict[int, Ints] = {}
        tensors = {self.axes[a].tensor for a in tables if self.axes[a].dim == 0}
        for axis, positions in tables.items():
            moved_axis = self.axes[axis]
            block = positions // moved_axis.size
            is_whole = (
                moved_axis.blocks > 1 and moved_axis.blocks == self._shape[moved_axis.tensor][0]
            )
            is_one = (block == block[:, :1]).all() and len(distinct(block[:, 0])) == len(block)
            if is_whole and moved_axis.tensor not in tensors and is_one:
                moving[self._rows_of(moved_axis)] = block[:, :1]
        return moving

    def _rows_of(self, axis: Axis) -> int:
        """Return the axis along the matrices of a stack."""
        if axis.tensor not in self._rows:
            self._rows[axis.tensor] = len(self.axes)
            self.axes.append(Axis(axis.tensor, 0, axis.blocks, "expert"))
        return self._rows[axis.tensor]


def _by_dimension(factors: Sequence[Factor]) -> list[Factor]:
    """Sort factors by the last dimension along which they vary."""
    return sorted(factors, key=lambda x: max(x.dims, default=-1))


def _laid_out(
    shape: tuple[int, ...], factor: Factor, families: Ints
) -> tuple[int | None, int, Ints]:
    """Return the dimension of an axis, its number of row blocks, and the label at every position.

    Labels of one family may change places, which they do within a block, or among all entries.
    """
    dims = sorted(factor.dims)
    if not dims:
        dim = next((d for d, n in enumerate(shape) if n == 1), None)
        return dim, 1, factor.labels.reshape(-1).numpy()
    if len(dims) == 1:
        return dims[0], 1, factor.labels.reshape(-1).numpy()
    if len(dims) == 2 and dims[0] == 0:
        table = factor.labels.reshape(shape[0], shape[dims[1]]).numpy()
        cuts = np.flatnonzero((table[1:] != table[:-1]).any(1)) + 1
        step = int(np.gcd.reduce([shape[0], *cuts.tolist()]))
        blocks = np.ascontiguousarray(table[::step])
        inside = [distinct(families[row]) for row in blocks]
        if sum(map(len, inside)) == len(distinct(np.concatenate(inside))):
            return dims[1], len(blocks), blocks.reshape(-1)
    return None, 1, factor.labels.expand(shape).reshape(-1).numpy()


def _unsearched(layout: GroupLayout) -> Iterator[Frozen]:
    """Report the tensors whose exchanges may be incomplete because the search was too large."""
    for label, reason in layout.exchanges.unsearched.items():
        named = (
            axis.tensor
            for axis, labels in zip(layout.axes, layout.labels, strict=False)
            if (layout.exchanges.classes[labels] == label).any()
        )
        yield Frozen("permutation", next(named, ""), "", reason)


# ------------------------------------------------------------ permutations
def _permutations(layout: GroupLayout) -> tuple[PermutationGroup, ...]:
    """Return groups of channels in graph order, then those of the blocks that contain them."""
    exchanges = layout.exchanges
    channels = [g for g in exchanges.groups if not g.is_block]
    groups: list[PermutationGroup] = []
    index: dict[frozenset[int], int] = {}
    placed = [(layout.placements(g.units), g) for g in channels]
    for places, group in sorted(((p, g) for p, g in placed if p), key=lambda x: _first(x[0])):
        index[frozenset(x for u in group.units for x in u)] = len(groups)
        groups.append(PermutationGroup(len(group.units), writer_of(layout.axes, places), places))
    names = _tensor_names(layout)
    blocks = [_Block(g, exchanges.class_count, names) for g in exchanges.groups if g.is_block]
    located = [(b, layout.placements(b.classes, b.moved)) for b in blocks]
    located = [(b, p) for b, p in located if p or b.tensors]
    located.sort(key=lambda x: (len(x[0].units[0]), _first(x[1])))
    for block, places in located:
        inner = block.inside(index)
        unit = "block" if inner or block.tensors or _is_block(places) else "channel"
        name = writer_of(layout.axes, places) if places else block.tensors[0][0]
        index[block.support] = len(groups)
        groups.append(PermutationGroup(len(block.units), name, places, unit, inner, block.tensors))
    return tuple(groups)


def _is_block(places: Sequence[Placement]) -> bool:
    """Return whether the units comprise several channels on every axis."""
    return all(p.positions.shape[1] > 1 for p in places)


def _first(places: Sequence[Placement]) -> tuple[int, int]:
    return (places[0].axis, int(places[0].positions.min())) if places else (0, 0)


def _tensor_names(layout: GroupLayout) -> dict[int, str]:
    """Return tensor names by vertex."""
    reading = layout.reading
    first = layout.exchanges.class_count + len(reading.operations)
    return {first + k: name for k, name in enumerate(reading.parameters)}


class _Block:
    """An exchange of blocks: their classes, and the tensors that are exchanged as wholes."""

    def __init__(self, group: Exchange, class_count: int, names: Mapping[int, str]) -> None:
        self.units = group.units
        self.classes = [[x for x in unit if x < class_count] for unit in group.units]
        rows = zip(*([x for x in unit if x in names] for unit in group.units), strict=True)
        self.tensors = tuple(tuple(names[x] for x in row) for row in rows)
        self.moved = frozenset(name for row in self.tensors for name in row)
        self.support = frozenset(x for unit in self.classes for x in unit)

    def inside(self, index: Mapping[frozenset[int], int]) -> tuple[tuple[int, ...], ...]:
        """Return the groups inside the blocks, one row per block, without those nested deeper."""
        first, rows = self.classes[0], []
        labels = frozenset(first)
        nested = [support for support in index if support <= labels]
        for support in nested:
            if any(support < outer for outer in nested):
                continue
            images = [
                frozenset(y for x, y in zip(first, unit, strict=True) if x in support)
                for unit in self.classes
            ]
            if all(image in index for image in images):
                rows.append(tuple(index[image] for image in images))
        return tuple(rows)


# ------------------------------------------------------------ scales and signs
def _actions(layout: GroupLayout, units: Units, field: Field) -> Actions:
    """Return the powers with which independent free variables act at every position."""
    parameters = [p.factors for p in layout.reading.parameters.values()]
    free, acting = independent_variables(parameters, units, field)
    every = np.concatenate([np.zeros(0, np.int64), *layout.labels])
    labels, first, index = np.unique(every, return_index=True, return_inverse=True)
    roots, signs = units.representatives(labels)
    is_plain, is_free = ~units.is_solved(roots), np.isin(roots, np.array([*free], np.int64))
    rows = {
        k: {v: c for v, c in units.of(int(labels[k])).items() if v in free or v not in acting}
        for k in np.flatnonzero(~is_plain).tolist()
    }
    shared = {v for row in rows.values() if len(row) > 1 for v in row}
    beside = is_plain & np.isin(roots, np.array([*shared], np.int64))
    rows |= {k: {int(roots[k]): int(signs[k])} for k in np.flatnonzero(beside).tolist()}
    axes = np.repeat(np.arange(len(layout.labels)), [table.size for table in layout.labels])[first]
    families = layout.families[layout.exchanges.classes[labels]]
    alike = [*zip(axes.tolist(), families.tolist(), strict=True)]
    _thin_out(rows, units, alike, free)
    exponents = layout.powers if field == "rational" else list(map(Fraction, layout.parities))
    alone = np.flatnonzero(is_plain & is_free & ~beside)
    terms = [(k, v, c) for k, row in rows.items() for v, c in row.items() if v in free]
    return Actions(
        *_columns(
            terms,
            (alone, roots[alone], signs[alone]),
            index,
            exponents,
            [table.size for table in layout.labels],
        )
    )


def _columns(
    terms: Sequence[tuple[int, int, Any]], plain: tuple[Ints, Ints, Ints], index: Ints,
    exponents: Sequence[Fraction], sizes: Sequence[int],
) -> Ints:  # fmt: skip
    """Return variable, position, axis and power of all actions, with integer powers.

    Args:
        terms: label, variable and coefficient of what acts on labels.
        plain: more of them, in three columns, with whole coefficients.
        index: the label at every position of every axis, one axis behind the other.
        exponents: by axis, with which power what acts on a label acts there.
        sizes: the numbers of positions.
    """
    shared = lcm(*{c.denominator for _, _, c in terms})
    whole = [(k, v, c.numerator * (shared // c.denominator)) for k, v, c in terms]
    table = np.array(whole, np.int64).reshape(-1, 3).T
    columns = plain[0], plain[1], shared * plain[2]
    acted, variables, coefficients = np.concatenate([table, np.stack(columns)], 1)
    order = np.argsort(acted, kind="stable")
    variables, coefficients = variables[order], coefficients[order]
    per_label = np.bincount(acted, minlength=int(index.max(initial=-1)) + 1)
    ends = np.cumsum(per_label)
    denominator = lcm(*{x.denominator for x in exponents})
    factors = np.repeat(np.array([int(x * denominator) for x in exponents], np.int64), sizes)
    axes = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)])
    counts = per_label[index] * (factors != 0)
    columns_of = np.repeat(np.arange(len(index)), counts)
    term = np.arange(len(columns_of)) + np.repeat(ends[index] - np.cumsum(counts), counts)
    powers = coefficients[term] * factors[columns_of]
    _, variable = np.unique(variables[term], return_inverse=True)
    multiple = np.ones(int(variable.max(initial=-1)) + 1, np.int64)
    np.lcm.at(multiple, variable, shared * denominator // np.gcd(powers, shared * denominator))
    powers = powers * multiple[variable] // (shared * denominator)
    return np.stack([variable, positions[columns_of], axes[columns_of], powers])


def _thin_out(
    rows: dict[int, Row], units: Units, families: Sequence[object], free: Collection[int]
) -> None:
    """Make the variables sparse: combine them so that each acts on as few labels as possible.

    What acts on a label is a combination of variables. Any basis of them says the same, and one
    whose members act in few places is easier to read, and to set by norms. Of equally many labels,
    those of few families are chosen, so that channels that change places are treated alike. What
    acts on labels, but on no entry, as all rows and all columns of a table may flip, is only added.
    """
    acts: dict[int, Row] = {v: {} for row in rows.values() if len(row) > 1 for v in row}
    for label, row in rows.items():
        for v, c in row.items():
            if v in acts:
                acts[v][label] = c
    for v in sorted(acts.keys() & free, reverse=True):
        while (best := _best_saving(v, rows, acts, families)) is not None:
            w, factor = best
            for label, c in acts[w].items():
                total = units.added([{v: rows[label].pop(v, 0)}, {v: factor * c}])
                acts[v].pop(label, None)
                if total:
                    rows[label][v] = acts[v][label] = total[v]


def _best_saving(
    v: int, rows: Mapping[int, Row], acts: Mapping[int, Row], families: Sequence[object]
) -> tuple[int, Any] | None:
    """Return the variable, and the multiple of ``v`` to add to it, with the largest saving."""
    meets: dict[int, int] = {}
    for label in acts[v]:
        for w in rows[label]:
            meets[w] = meets.get(w, 0) + 1
    choices = []
    for w in (w for w, times in meets.items() if w != v and 2 * times >= len(acts[w])):
        fewer, factor = _saving(acts[v], acts[w])
        alike = _alike(acts[v], acts[w], factor, families) if not fewer else 0
        if (fewer, alike) > (0, 0):
            choices.append((-fewer, -alike, w, factor))
    if not choices or -min(choices)[0] >= len(acts[v]):
        return None
    return min(choices)[2:]


def _saving(row: Row, added: Row) -> tuple[int, Any]:
    """Return how many fewer labels a variable acts on with a multiple of another, and that."""
    few, many = sorted((row, added), key=len)
    counts = Counter(ratio(-row[label], added[label]) for label in few if label in many)
    factor = max(set(counts), key=counts.__getitem__, default=0)
    return counts[factor] + counts.total() - len(added), factor


def _alike(row: Row, added: Row, factor: Any, families: Sequence[object]) -> int:
    """Score how far an addition would concentrate a variable on labels of one family."""
    counts, change = Counter(families[x] for x in row), Counter[object]()
    for x, c in added.items():
        gone = x in row and row[x] + factor * c == 0
        change[families[x]] += (x not in row) - gone
    return sum((counts[f] + n) ** 2 - counts[f] ** 2 for f, n in change.items())


def independent_variables(
    parameters: Iterable[Sequence[Factor]], units: Units, field: Field
) -> tuple[set[int], set[int]]:
    """Return free variables that act on the entries of the parameters, each in a distinct way.

    And all that act on any entry.
    """
    tables, others = units.of_rows(units_at_entries(factors, field) for factors in parameters)
    used = np.concatenate([np.zeros(0, np.int64), *(t.ravel() for t, _ in tables)])
    count = np.bincount(used, minlength=units.count).tolist()
    for v in (v for row in others for v in row):
        count[v] += 1  # what acts everywhere acts on no entry

    def leading(row: Row) -> int:
        return min(row, key=lambda v: (count[v], v))

    pinned = _pinned([t for t, _ in tables], others, units.count)
    others += [row for table in tables for row in units.rows(_without(table, pinned))]
    open_rows = ({v: c for v, c in row.items() if not pinned[v]} for row in others)
    left = {frozenset(row.items()) for row in open_rows if row}
    pivots: dict[int, Row] = {}
    for start in sorted(left, key=lambda r: (len(r), sorted(r))):
        row = dict(start)
        while row and leading(row) in pivots:
            pivot = pivots[leading(row)]
            factor = ratio(row[leading(row)], pivot[leading(row)])
            row = units.added([row, {w: -factor * k for w, k in pivot.items()}])
        if row:
            pivots[leading(row)] = row
    free = {*np.flatnonzero(pinned).tolist(), *pivots} - {0}
    return free, {v for v, times in enumerate(count) if times}


def _pinned(tables: Sequence[Ints], others: Sequence[Row], count: int) -> NDArray[np.bool_]:
    """Mask the variables that act on an entry alone, or together with such variables only."""
    pinned = np.zeros(count, bool)
    pinned[0] = True  # stands for nothing
    by_width: dict[int, list[Row]] = defaultdict(list)
    for row in others:
        by_width[len(row)].append(row)
    rows = [
        *tables,
        *(np.array([[*row] for row in equation], np.int64) for equation in by_width.values()),
    ]
    while rows:
        left = [(table, ~pinned[table]) for table in rows]
        alone = [table[free & (free.sum(1) == 1)[:, None]] for table, free in left]
        if not any(map(len, alone)):
            break
        pinned[np.concatenate(alone)] = True
        rows = [table[free.sum(1) > 1] for table, free in left]
    return pinned


def _without(terms: tuple[Ints, Ints], pinned: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return the rows of a table with at least one variable that is not pinned."""
    rows = ~pinned[terms[0]].all(1)
    return terms[0][rows], terms[1][rows]


# ------------------------------------------------------------ matrices
def _linear(layout: GroupLayout) -> tuple[LinearGroup, ...]:
    """Return spaces of channels, grouped by the axes on which they act in the same way."""
    similar: dict[tuple[LinearKind, object], list[_Places]] = defaultdict(list)
    for space in spaces(layout.reading, layout.exchanges, layout.scales, layout.signs):
        places = _planes(layout, space) if space.pairs else _rows(layout, space)
        if places:
            shapes = tuple((key, positions.shape) for key, positions in sorted(places.items()))
            similar[space.kind, shapes].append(places)
    groups = [_linear_group(layout, law, spaces) for (law, _), spaces in similar.items()]
    return tuple(
        sorted(groups, key=lambda g: (g.placements[0].axis, int(g.placements[0].positions.min())))
    )


def _linear_group(layout: GroupLayout, law: LinearKind, spaces: Sequence[_Places]) -> LinearGroup:
    spaces = sorted(spaces, key=lambda s: int(s[min(s)].min()))
    placements = tuple(
        Placement(axis, torch.from_numpy(np.stack([s[axis, power] for s in spaces])), power)
        for axis, power in sorted(spaces[0])
    )
    size = placements[0].positions.shape[1]
    return LinearGroup(law, len(spaces), size, writer_of(layout.axes, placements), placements)


def _rows(layout: GroupLayout, space: Space) -> _Places:
    """Return the positions of a space ``(size, repeats)`` by axis and power, if repeats agree.

    Scales are those of the first place, or their inverse, but for a factor of all of them.
    """
    first: Ints | None = None
    columns: dict[tuple[int, int], list[Ints]] = defaultdict(list)
    for units in space.rows:
        for placement in layout.placements(units):
            if placement.axis >= len(layout.labels):  # of whole matrices, inside which it lies
                return {}
            positions = placement.positions.numpy()
            for column, labels in zip(
                positions.T, layout.labels[placement.axis][positions].T, strict=True
            ):
                first = labels if first is None else first
                power = layout.scales.power_between(labels, first)
                if not power:
                    return {}
                columns[placement.axis, power].append(column[:, None])
    tables = {key: np.concatenate(positions, 1) for key, positions in columns.items()}
    return {key: positions[:, np.argsort(positions[0])] for key, positions in tables.items()}


def _planes(layout: GroupLayout, space: Space) -> _Places:
    """Return the two sides of the planes by axis, or nothing if a channel has no partner."""
    sides = layout.sides
    partner = {int(sides[a]): int(sides[b]) for a, b in space.pairs}
    inside = {int(layout.exchanges.classes[a]) for a, _ in space.pairs}
    columns: dict[tuple[int, int], list[Ints]] = defaultdict(list)
    for axis, entries in layout.positions_of(inside):
        where: dict[int, list[int]] = defaultdict(list)
        for k, label in zip(entries.tolist(), layout.labels[axis][entries].tolist(), strict=True):
            where[int(sides[label])].append(k)
        halves = [(where.get(a, []), where.get(b, [])) for a, b in partner.items()]
        pairs = [p for a, b in halves for p in zip(a, b, strict=False)]
        if 2 * len(pairs) != entries.size or any(len(a) != len(b) for a, b in halves):
            return {}
        for first, second in pairs:
            power = 1 if space.kind == "unit complex" else layout.signed_power(axis, first)
            if not power:
                return {}
            columns[axis, power].append(np.array([[first], [second]]))
    return {key: np.concatenate(entries, 1) for key, entries in columns.items()}
