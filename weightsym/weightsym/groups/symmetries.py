"""The result of `discover`: permutations, scalings and signs of units on axes of tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csc_matrix, csr_matrix, hstack
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from weightsym.groups.placements import Axis, LinearGroup, Placement, Reader, ShiftGroup


@dataclass(frozen=True, eq=False)
class Group:
    """Units that can be exchanged, rescaled or flipped, and the places where they act."""

    units: int
    name: str
    placements: tuple[Placement, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class PermutationGroup(Group):
    """The symmetric group on its units: channels, or blocks such as heads and experts.

    ``inner`` lists, for every class of interchangeable channels or of smaller blocks inside the
    blocks, the indices of the groups that permute them, one per block. Blocks may have tensors of
    their own, such as experts that are modules: each row of ``tensors`` names one per block, which
    change places as wholes.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(sym.axes[p.axis].tensor, sym.axes[p.axis].dim) for p in sym.permutations[0].placements]
    [('0.weight', 0), ('0.bias', 0), ('2.weight', 1)]
    """

    kind: str = "channel"
    inner: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    tensors: tuple[tuple[str, ...], ...] = field(default=(), repr=False)


class ScalingGroup(Group):
    """Units that can each be multiplied by a positive factor.

    A product of two factors has further scales: several groups then act at one position, and the
    exponents of their placements are integers.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(sym.axes[p.axis].tensor, p.exponent) for p in sym.scalings[0].placements]
    [('0.weight', 1), ('0.bias', 1), ('2.weight', -1)]
    """


class SignGroup(Group):
    """Units that can each be flipped.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(group.name, group.units) for group in sym.signs], sym.scalings
    ([('0.weight', 3)], ())
    """


@dataclass(frozen=True)
class Frozen:
    """An unsupported operation: its location, and why its operands are fixed.

    >>> from weightsym import discover
    >>> class Running(torch.nn.Sequential):
    ...     def forward(self, x):
    ...         return self[1](self[0](x).cumsum(-1))
    >>> net = Running(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> (item,) = discover(net, torch.randn(8, 2)).frozen
    >>> item.operation, item.reason
    ('cumsum', 'it mixes entries along dimension 1')
    """

    operation: str
    module: str
    line: str
    reason: str

    def __str__(self) -> str:
        """Describe the operation, its location and the reason in one line."""
        where = f" in `{self.module}`" if self.module else ""
        return f"{self.operation}{where}{' at ' + self.line if self.line else ''}: {self.reason}"


@dataclass(frozen=True)
class SoftmaxShift:
    """The last layer, whose logits may all be shifted by one function of the input."""

    weight: str
    bias: str | None
    dim: int


@dataclass(frozen=True, eq=False)
class Symmetries:
    """The weight-space symmetries of a network, for the functions of this package.

    All functions read the same tables. For every axis of a tensor, ``axis.labels(shape)`` is the
    position of each element; ``group.placements`` are the positions of each unit, and the power of
    its factor there.

    - A factor of a unit multiplies all elements that have its positions, as often as the exponent
      says.
    - A permutation p of a group changes ``index``, at first ``arange(axis.length)``, at the
      positions of its placement on the axis: ``index[positions] = index[positions[p]]``, one group
      after the other. Every element of the tensor is then taken from the same place, but for index
      ``index[label] % axis.size`` in dimension ``axis.dim``; the axes act in the order of
      ``axes_of``. At last the tensors in a row of ``group.tensors`` change places.

    Attributes:
        axes: dimensions of tensors along which units lie.
        permutations: groups of interchangeable units, in graph order, channels before the blocks
            that contain them, smaller blocks before larger ones; they act in this order.
        scalings: positive factors that pass through the network.
        signs: flips that pass through the network.
        linear: channels that may be mixed by matrices: those inside heads, adapters, streams.
        shifts: biases that other biases take up, or that nothing sees (those of keys).
        frozen: what was not understood, and is therefore held fixed.
        softmax_shift: the layer whose outputs are the logits, if there is one.
        weights: names of the tensors that count for the mass (all parameters but biases).
        constants: buffers that were read as they are; networks whose values differ are refused.
        aliases: further names of tensors that a module holds more than once, and their first name.
        evaluation_only: why the symmetries hold in evaluation mode only; empty where they hold in
            training, too (for random layers: in law).
        unchecked: why the check could not have seen an error, and the parameters that the example
            does not reach; empty where it could, and there are none.
        log10_permutations, scaling_dof, sign_dof: their numbers.
        error: relative output error of random elements in the check at random weights.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(group.name, group.units) for group in sym.permutations]
    [('0.weight', 5), ('2.weight', 4)]
    >>> round(10**sym.log10_permutations), sym.scaling_dof, sym.sign_dof  # 5! 4!, 5 + 4
    (2880, 9, 0)
    """

    axes: tuple[Axis, ...]
    permutations: tuple[PermutationGroup, ...]
    scalings: tuple[ScalingGroup, ...]
    signs: tuple[SignGroup, ...]
    frozen: tuple[Frozen, ...] = ()
    softmax_shift: SoftmaxShift | None = None
    weights: tuple[str, ...] = ()
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    batch_norm: str = "carrier"
    error: float = math.nan
    constants: dict[str, Tensor] = field(default_factory=dict, repr=False)
    aliases: dict[str, str] = field(default_factory=dict)
    evaluation_only: str = ""
    unchecked: str = ""
    linear: tuple[LinearGroup, ...] = ()
    shifts: tuple[ShiftGroup, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone, without cached values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def log10_permutations(self) -> float:
        """Decimal logarithm of the number of permutations."""
        return sum(math.lgamma(g.units + 1) for g in self.permutations) / math.log(10)

    @property
    def scaling_dof(self) -> int:
        """Number of independent positive factors."""
        return sum(g.units for g in self.scalings)

    @property
    def sign_dof(self) -> int:
        """Number of independent sign flips."""
        return sum(g.units for g in self.signs)

    @property
    def shift_dof(self) -> int:
        """Number of independent shifts of channels."""
        return sum(g.size for g in self.shifts)

    @cached_property
    def dimension(self) -> int:
        """The dimension of an orbit: matrices, shifts, and scales outside matrix groups."""
        idle = sum(_idle_dimensions(self))
        if idle:  # matrices that move nothing, or what shifts move
            from weightsym.groups.tangents import generic_rank  # which reads what is defined here

            rank = generic_rank(self)
            if rank is not None:
                return rank
        return self._dimension - idle

    @cached_property
    def _dimension(self) -> int:
        """The dimension if every matrix moved something."""
        linear = [group for group in self.linear if group.kind in ("general", "complex")]
        matrices = sum(g.dimension for g in self.linear)
        if not linear:
            return self.scaling_dof + matrices + self.shift_dof
        diagonal = incidence(self.axes, linear, [_channels(group) for group in linear])
        covered = self.covered(self.scalings, ("general", "complex"))
        beside = torch.cat([torch.zeros(0, dtype=torch.bool), *covered]).logical_not()
        scales = incidence(self.axes, self.scalings)[:, np.flatnonzero(beside.numpy())]
        powers = _at_entries(self.axes, hstack([diagonal, scales]))
        before = _rank(csr_matrix(powers[:, : diagonal.shape[1]]))
        return _rank(csr_matrix(powers)) - before + matrices + self.shift_dof

    def covered(self, groups: Sequence[Group], kinds: Collection[str]) -> tuple[Tensor, ...]:
        """Return a mask for every group of the units inside spaces of the given kinds.

        Scales do where they are diagonal matrices of these spaces.
        """
        linear = [group for group in self.linear if group.kind in kinds]
        return _units_inside(self.axes, linear, groups, diagonal=groups is self.scalings)

    @cached_property
    def scale_powers(self) -> list[csr_matrix]:
        """For each axis, the power of every scale at every position, ``(positions, scales)``."""
        powers, ends = (
            incidence(self.axes, self.scalings),
            np.cumsum([a.length for a in self.axes]),
        )
        return [powers[end - axis.length : end] for axis, end in zip(self.axes, ends, strict=True)]

    @cached_property
    def shared_axes(self) -> frozenset[int]:
        """Axes with positions where several scales act, or one with a power other than 1 or -1."""
        return frozenset(
            axis
            for axis, powers in enumerate(self.scale_powers)
            if np.diff(powers.indptr).max(initial=0) > 1 or abs(powers.data).max(initial=0) > 1
        )

    @cached_property
    def touched(self) -> frozenset[str]:
        """The tensors that any group moves, without biases that only absorb shifts."""
        channels = *self.permutations, *self.scalings, *self.signs
        names = [self.moved_by(g) for every in (channels, self.linear, self.shifts) for g in every]
        last = self.softmax_shift
        return frozenset({last.weight} if last else ()).union(*names)

    @cached_property
    def compared(self) -> frozenset[str]:
        """The tensors that distinguish networks: all that move except running statistics."""
        statistics = {axis.tensor for axis in self.axes if axis.role in ("mean", "variance")}
        return self.touched - statistics

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The tensors of real numbers: weights and biases."""
        biases = {axis.tensor for axis in self.axes if axis.role == "bias"}
        return tuple(n for n in self.shapes if n in {*self.weights, *biases})

    def moved_by(self, group: Group | LinearGroup | ShiftGroup) -> frozenset[str]:
        """Return the tensors that a group moves."""
        rows = group.tensors if isinstance(group, PermutationGroup) else ()
        return frozenset(self.axes[p.axis].tensor for p in group.placements).union(*rows)

    @cached_property
    def exchangeable_tensors(self) -> dict[str, frozenset[str]]:
        """For each exchangeable tensor, the tensors that it may be exchanged with, and itself."""
        exchangeable: dict[str, frozenset[str]] = {}
        for row in (row for group in self.permutations for row in group.tensors):
            together = frozenset(row).union(*(exchangeable.get(name, ()) for name in row))
            exchangeable |= dict.fromkeys(together, together)
        return exchangeable

    def first_twin(self, name: str) -> str:
        """Return the first of the tensors that are exchangeable with a given one."""
        return min(self.exchangeable_tensors.get(name, {name}))

    def twin(self, axis: int, name: str) -> int:
        """Return the axis of another tensor that corresponds to a given one."""
        source = self.axes[axis]
        if source.tensor == name:
            return axis
        every = ((k, self.axes[k]) for k in self.axes_of[name])
        return next(k for k, a in every if (a.dim, a.blocks) == (source.dim, source.blocks))

    def rows_of_blocks(self, axis: int) -> int | None:
        """Return the axis of rows whose blocks an axis with blocks belongs to, if any."""
        if self.axes[axis].blocks == 1:
            return None
        every = ((k, self.axes[k]) for k in self.axes_of[self.axes[axis].tensor])
        return next((k for k, a in every if a.dim == 0 and a.blocks == 1), None)

    def placements_by_axis(self, group_type: str) -> dict[int, list[tuple[int, Any]]]:
        """Return the (group, placement) pairs of one kind by axis, in their order of action."""
        return self._by_axis[group_type]

    @cached_property
    def _by_axis(self) -> dict[str, dict[int, list[tuple[int, Placement]]]]:
        tables: dict[str, dict[int, list[tuple[int, Placement]]]] = {}
        for group_type in ("permutations", "scalings", "signs", "linear", "shifts"):
            table = tables.setdefault(group_type, {})
            for index, group in enumerate(getattr(self, group_type)):
                for placement in group.placements:
                    table.setdefault(placement.axis, []).append((index, placement))
        return tables

    @cached_property
    def axes_of(self) -> dict[str, list[int]]:
        """The axes of every tensor in their order of action, those without blocks first."""
        tensors: dict[str, list[int]] = {}
        for k in sorted(range(len(self.axes)), key=lambda k: self.axes[k].blocks):
            tensors.setdefault(self.axes[k].tensor, []).append(k)
        return tensors

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """Return a table of groups by kind, the counts, and the frozen operations."""
        return _table(self)


torch.serialization.add_safe_globals(
    [
        *(Axis, Frozen, LinearGroup, PermutationGroup, Placement, Reader, ScalingGroup),
        *(ShiftGroup, SignGroup, SoftmaxShift, Symmetries),
    ]
)


def without_groups(sym: Symmetries, keep: Sequence[int]) -> Symmetries:
    """Return the symmetries with some of the permutations, and only complete rows of blocks."""
    index = {old: new for new, old in enumerate(keep)}
    groups = []
    for k in keep:
        group = sym.permutations[k]
        rows = [row for row in group.inner if all(g in index for g in row)]
        groups.append(replace(group, inner=tuple(tuple(index[g] for g in row) for row in rows)))
    return replace(sym, permutations=tuple(groups))


# ------------------------------------------------------------ the printed table
def _table(sym: Any) -> str:
    """Return a table of groups by kind, the counts, and the frozen operations."""
    rows: dict[tuple[str, int], list[str]] = {}
    counts: dict[tuple[str, int], int] = {}
    for title, units, count, name in _groups(sym):
        rows.setdefault((title, units), []).append(name)
        counts[title, units] = counts.get((title, units), 0) + count
    lines = [f"{'kind':<12}{'units':>7}{'groups':>8}  acts on"]
    for (title, units), names in rows.items():
        lines.append(f"{title:<12}{units:>7}{counts[title, units]:>8}  {_shorten(names)}")
    for title, dead in (("shift", False), ("dead bias", True)):
        shifts = [group for group in sym.shifts if group.is_dead == dead]
        if shifts:
            size, names = sum(group.size for group in shifts), [group.name for group in shifts]
            lines.append(f"{title:<12}{size:>7}{len(shifts):>8}  {_shorten(names)}")
    numbers = sum(shape.numel() for shape in sym.shapes.values())
    percent = 100 * sym.dimension / max(1, numbers)
    share = f" ({percent:.2g} % of all numbers)" if 0 < percent <= 100 else ""
    lines.append(
        f"permutations: 10^{sym.log10_permutations:.1f}   free scales: {sym.scaling_dof}   "
        f"free signs: {sym.sign_dof}   continuous dimension: {sym.dimension}{share}"
    )
    lines += [f"frozen: {item}" for item in sym.frozen]
    if sym.constants:
        lines.append(f"read as constants: {_shorten(list(sym.constants))}")
    if sym.evaluation_only:
        lines.append(f"evaluation only: {sym.evaluation_only}")
    if sym.unchecked:
        lines.append(f"not checked: {sym.unchecked}")
    return "\n".join(lines)


def _groups(sym: Any) -> Iterator[tuple[str, int, int, str]]:
    """Yield the title, units, number and name of every group except shifts."""
    for group in sym.permutations:
        title = "block perm." if group.kind == "block" else "permutation"
        yield title, group.units, 1, group.name
    for title, groups in (("scaling", sym.scalings), ("sign", sym.signs)):
        yield from ((title, group.units, 1, group.name) for group in groups)
    yield from ((group.kind, group.size, group.spaces, group.name) for group in sym.linear)


def _shorten(names: list[str], most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (
        f", ... ({len(distinct)} tensors)" if len(distinct) > most else ""
    )


# ------------------------------------------------------------ units inside of spaces
Ints = NDArray[np.int64]


def _units_inside(
    axes: Sequence[Axis],
    linear: Sequence[LinearGroup],
    groups: Sequence[Any],
    diagonal: bool = False,
) -> tuple[Tensor, ...]:
    r"""Return the units of every group whose positions are all channels of spaces.

    With ``diagonal`` only those scales that are diagonal matrices of these spaces: such a unit has
    a power p at all places where a matrix G acts on its channels, and -p where the inverse
    transpose does. The further scale of a product lies in spaces, too, but only on one side of
    them.

    .. math:: \Big(\sum_i s_i p_i\Big)^2 = n \sum_i p_i^2

    over the n places of a channel, with sides :math:`s_i = \pm 1`.

    Args:
        axes: those of the symmetries.
        linear: the groups of matrices that count.
        groups: of permutations, scalings or signs.
        diagonal: ask for the whole of every channel.
    """
    channels = incidence(axes, linear, [_channels(group) for group in linear])
    powers = incidence(axes, groups)
    free = np.asarray(abs(channels).sum(1)).ravel() == 0
    inside = abs(powers).T @ free == 0
    count = (abs(channels).T @ (powers != 0).astype(np.int64)).tocoo()
    if diagonal and count.nnz:
        indices = count.row, count.col
        total, squares = channels.T @ powers, abs(channels).T @ powers.multiply(powers)
        total, squares = (np.asarray(t.tocsr()[indices]).ravel() for t in (total, squares))
        places = np.asarray(abs(channels).sum(0)).ravel()
        whole = (count.data == places[count.row]) & (total**2 == count.data * squares)
        inside[count.col[~whole]] = False
    return torch.from_numpy(inside).split([g.units for g in groups])


def _idle_dimensions(sym: Symmetries) -> list[int]:
    r"""Count, for every group of matrices, dimensions without effect beyond that of shifts.

    A matrix of n channels moves nothing if it is zero on all that enters them, and reaches nothing
    of what leaves them.

    .. math:: (n - r_{in}) (n - r_{out})

    with the ranks of what enters and leaves at generic weights. What another such space reads or
    writes, too, does not count, unless it has enough of its own.
    """
    shifted = {p.axis for group in sym.shifts for p in group.placements}
    loose = [g for g in sym.linear if g.kind == "general"]
    while True:
        ranks = [_ranks(sym, g, loose, shifted) for g in loose]
        left = [g for g, (a, b) in zip(loose, ranks, strict=True) if max(a, b) < g.size]
        if len(left) == len(loose):
            sides = zip(loose, ranks, strict=True)
            return [g.spaces * (g.size - a) * (g.size - b) for g, (a, b) in sides]
        loose = left


def _ranks(
    sym: Symmetries, group: LinearGroup, loose: Sequence[LinearGroup], shifted: Collection[int]
) -> tuple[int, int]:
    """Return the ranks of the weights before and after a space, without shared tensors."""
    axes, taken = {p.axis for p in group.placements}, set[str]()
    for p in (p for g in loose for p in g.placements if p.axis not in axes):
        taken.add(sym.axes[p.axis].tensor)
    columns = {1: 0, -1: 0}
    for p in group.placements:
        axis = sym.axes[p.axis]
        if p.axis not in shifted and axis.tensor not in taken:
            shares = sym.shapes[axis.tensor].numel() // max(1, axis.length)
            columns[p.exponent] += shares * p.positions.shape[-1]
    return columns[1], columns[-1]


def _channels(group: LinearGroup) -> Ints:
    """Number every channel, ``(spaces, size)``, with one number for both channels of a plane."""
    each = 1 if group.kind == "complex" else group.size
    return each * np.arange(group.spaces)[:, None] + np.arange(group.size) % each


def _at_entries(axes: Sequence[Axis], powers: csr_matrix) -> csc_matrix:
    """Return powers at tensor entries that span the powers at all entries.

    At an entry they are the sum of those at its positions on all axes. So they are given by those
    at the first of each, and by differences.
    """
    lengths = [axis.length for axis in axes]
    starts = np.cumsum([0, *lengths])[:-1]
    first_of: dict[str, int] = {}
    for axis, start in zip(axes, starts.tolist(), strict=True):
        first_of.setdefault(axis.tensor, start)
    every, firsts = np.arange(powers.shape[0]), np.repeat(starts, lengths)
    rows = np.concatenate([every, every, [first_of[axis.tensor] for axis in axes]])
    columns = np.concatenate([every, firsts, starts])
    signs = np.repeat([1, -1, 1], [len(every), len(every), len(axes)])
    return csc_matrix(coo_matrix((signs, (rows, columns)), 2 * powers.shape[:1]) @ powers)


def _rank(rows: csr_matrix) -> int:
    """Return the rank of a large sparse integer matrix.

    Variables that a row with one entry makes zero, or a row with two makes equal or opposite to
    others, are replaced until no such row is left. Few variables remain.
    """
    rank, left = 0, rows.shape[1]
    while left:
        rows.eliminate_zeros()
        roots, signs = _joined(rows)
        remaining, index = np.unique(roots[roots >= 0], return_inverse=True)
        if len(remaining) == left:
            break
        shape, live = (left, len(remaining)), np.flatnonzero(roots >= 0)
        rows = csr_matrix(rows @ csr_matrix((signs[live], (live, index)), shape))
        rank, left = rank + left - len(remaining), len(remaining)
    squares = csr_matrix(rows.T @ rows)
    parts, component = connected_components(squares, directed=False)
    for columns in (np.flatnonzero(component == k) for k in range(parts)):
        square = squares[columns][:, columns].toarray().astype(np.float64)
        rank += int(np.linalg.matrix_rank(square, hermitian=True))
    return rank


def _joined(rows: csr_matrix) -> tuple[Ints, Ints]:
    """Return, for each variable, its representative (-1 for zero) and their relative sign."""
    count = rows.shape[1]
    widths, every = np.diff(rows.indptr), np.arange(count)
    pinned = rows.indices[rows.indptr[:-1][widths == 1]]
    starts = rows.indptr[:-1][widths == 2]
    (x, y), (a, b) = ((t[starts], t[starts + 1]) for t in (rows.indices, rows.data))
    alike = np.abs(a) == np.abs(b)
    x, y, same = x[alike], y[alike], (a * b < 0)[alike]
    ends = np.where(same, y, y + count), np.where(same, y + count, y)  # each with either sign
    edges = np.concatenate([x, x + count, pinned]), np.concatenate([*ends, pinned + count])
    graph = coo_matrix((np.ones(len(edges[0])), edges), (2 * count, 2 * count))
    _, component = connected_components(graph, directed=False)
    plus, minus = component[:count], component[count:]
    first = np.full(component.max() + 1, count)
    np.minimum.at(first, np.minimum(plus, minus), every)
    roots = first[np.minimum(plus, minus)]
    signs = np.where((plus < minus) == (plus[roots] < minus[roots]), 1, -1)
    return np.where(plus == minus, -1, roots), signs


def incidence(
    axes: Sequence[Axis], groups: Sequence[Any], ids: Sequence[Ints] | None = None
) -> csr_matrix:
    """Return the powers of units, or sides of channels, at the positions of all axes."""
    ids = [np.arange(group.units) for group in groups] if ids is None else ids
    starts = np.cumsum([0, *(axis.length for axis in axes)])
    parts, first = [np.zeros((3, 0), np.int64)], 0
    for group, numbers in zip(groups, ids, strict=True):
        for placement in group.placements:
            positions = placement.positions.cpu().numpy()
            column = np.broadcast_to(first + numbers[..., None], positions.shape)
            power = np.full_like(positions, placement.exponent)
            parts.append(
                np.stack([starts[placement.axis] + positions, column, power]).reshape(3, -1)
            )
        first += int(numbers.max(initial=-1)) + 1
    row, column, value = np.concatenate(parts, 1)
    return coo_matrix((value, (row, column)), (int(starts[-1]), first)).tocsr()
