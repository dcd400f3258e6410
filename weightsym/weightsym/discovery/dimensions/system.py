"""Constraints on labels: ties, unit equations and colours, with their origins."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weightsym.discovery.dimensions.values import (
    ZERO,
    Factor,
    Ints,
    Value,
    chosen,
    distinct,
    distinct_rows,
    label_rows,
    occurrence,
)

Mark = Literal["apart", "ones", "numbers"]
"""What keeps matrices from acting: units told apart, added up, or beside numbers that differ."""

_IN_PLACE_ORDER = frozenset({"tie", "dot", "sum", "cat"})


class Tie(NamedTuple):
    """Pairs of labels that move together. ``origin`` is the operation that requires it."""

    pairs: Ints
    origin: int


class Equation(NamedTuple):
    """Rows of labels whose log scales (or signs), times the coefficients, sum to zero."""

    labels: Ints
    coefficients: tuple[Fraction, ...]
    origin: int


@dataclass
class System:
    """Constraints on labels. Label 0 is a fixed unit.

    The ``origin`` of statements is an operation, ``is_ordered`` says whether it tells its operands
    apart.
    """

    count: int = 1
    origin: int = -1
    is_ordered: bool = False
    ties: list[Tie] = field(default_factory=list)
    relations: list[tuple[object, Ints]] = field(default_factory=list)
    scales: list[Equation] = field(default_factory=list)
    signs: list[Equation] = field(default_factory=list)
    colours: list[tuple[Ints, Ints, int]] = field(default_factory=list)
    marks: dict[str, list[Ints]] = field(default_factory=dict)
    planes: list[Ints] = field(default_factory=list)
    padded: list[Ints] = field(default_factory=list)
    stacks: list[range] = field(default_factory=list)
    axes: list[range] = field(default_factory=list)
    tables: list[Factor] = field(default_factory=list)
    choices: list[list[bool]] = field(default_factory=list)

    def new(self, *shape: int) -> Tensor:
        """Return new labels in a given shape."""
        size = int(np.prod(shape, dtype=np.int64))
        self.count += size
        return torch.arange(self.count - size, self.count).reshape(shape)

    def new_axis(self, size: int) -> Tensor:
        """Return new labels for an axis of a parameter."""
        self.axes.append(range(self.count, self.count + size))
        return self.new(size)

    def named(self) -> Tensor:
        """Return a mask of the labels that occur in a constraint."""
        result = torch.zeros(self.count, dtype=torch.bool)
        rows = [*(t.pairs for t in self.ties), *(pairs for _, pairs in self.relations)]
        rows += [*(e.labels for e in (*self.scales, *self.signs)), *(c[0] for c in self.colours)]
        for labels in rows:
            result[torch.from_numpy(labels[labels >= 0])] = True
        return result

    def note_table(self, value: Value, operand: Value) -> None:
        """Note the axes of a parameter that is combined with rows of individual units."""
        free = [x for x in value.factors if x.is_free and len(x.dims) <= 1 and not x.only_moves]
        for y in operand.factors if len(free) > 1 else ():
            inside = [x for x in free if x.dims <= y.dims and x.is_free_beside(free)]
            first = int(y.labels.reshape(-1)[0])
            axes = self.axes if all(x.dims for x in inside) else self.stacks
            if len({x.dims for x in inside}) > 1 and any(first in dims for dims in axes):
                self.tables += inside

    # -------------------------------------------------------------- permutations
    def tie(
        self, a: Tensor, b: Tensor, name: str = "tie", over: frozenset[int] | None = None
    ) -> bool:
        """Tie labels at the same positions: as equal if they correspond one to one.

        Where one meets several others ``over`` the same dimensions, their order counts.
        """
        rows = label_rows(a, b)
        rows = rows[rows[:, 0] != rows[:, 1]]
        if not len(rows):
            return True
        if len(distinct(rows[:, 0])) == len(rows) == len(distinct(rows[:, 1])):
            self.ties.append(Tie(rows, self.origin))
            return True
        if name not in _IN_PLACE_ORDER:
            self.relations.append((name, rows))
            return False
        if is_grid(rows):  # then the order in which one meets the others says nothing
            self.relations.append((name, rows))
            return False
        rows = label_rows(a, b, occurrence(a, over), occurrence(b, over))
        rows = rows[rows[:, 0] != rows[:, 1]]
        for i, j in np.unique(rows[:, 2:], axis=0).tolist():
            same = (rows[:, 2] == i) & (rows[:, 3] == j)
            self.relations.append(((name, i, j), rows[same, :2]))
        return False

    def _tie_factor(
        self, labels: Tensor, factor: Factor, name: str, is_placed: bool = False
    ) -> bool:
        """Tie products to one factor. A single factor for all entries keeps its label."""
        if is_placed and factor.places is not None:
            rows = label_rows(labels, factor.labels, factor.places)
            have_one_place = len(rows) == len(label_rows(labels, factor.labels))
            if have_one_place and len(distinct(rows[:, 1])) < len(rows):
                for position in np.unique(rows[:, 2]).tolist():
                    pairs = rows[rows[:, 2] == position, :2]
                    self.relations.append(((name, position), pairs))
                return False
        if factor.dims:
            return self.tie(labels, factor.labels, name)
        self.relations.append((name, label_rows(labels, factor.labels)))
        return False

    def tell_apart(self, factor: Factor, key: int = 0, dims: Sequence[int] | None = None) -> None:
        """Colour every position along some or all dimensions, so that nothing moves there."""
        flat = np.ascontiguousarray(factor.labels.numpy()).ravel()
        shape = [n if dims is None or d in dims else 1 for d, n in enumerate(factor.labels.shape)]
        places = np.arange(int(np.prod(shape))).reshape(shape)
        places = np.broadcast_to(places, tuple(factor.labels.shape)).ravel()
        self.colour(flat, places + 1_000_003 * key)

    def colour(self, labels: Ints, keys: Ints) -> None:
        """Forbid exchanges of labels with different keys."""
        self.colours.append((labels, keys, self.origin))

    def mark(self, mark: Mark, factor: Factor) -> None:
        """Note a reason why matrices cannot act on a factor."""
        labels = distinct(factor.labels.numpy())
        self.marks.setdefault(mark, []).append(labels[labels >= 0])

    # -------------------------------------------------------------- scales and signs
    def balance(
        self, terms: Sequence[tuple[Factor, int]], scale: bool = True, sign: bool = True
    ) -> None:
        """Require that the units of some factors, with coefficients 1 or -1, cancel everywhere."""
        live = [(p.labels, p.power * k) for p, k in terms if p.power != 0]
        if scale and live:
            rows = _spanning_rows([labels for labels, _ in live])
            self.scales.append(Equation(rows, tuple(c for _, c in live), self.origin))
        odd = [p.labels for p, _ in terms if p.parity]
        if sign and odd:
            ones = (Fraction(1),) * len(odd)
            self.signs.append(Equation(_spanning_rows(odd), ones, self.origin))

    def stop(self, factor: Factor, scale: bool = True, sign: bool = True) -> None:
        """Require that the unit of a factor is one: no scale, or no sign, passes."""
        self.balance([(factor, 1)], scale, sign)

    def fix(self, factor: Factor, key: int = 0) -> None:
        """Forbid any movement, scale or sign along a factor."""
        self.tell_apart(factor, key)
        if not factor.only_moves:
            self.stop(replace(factor, power=Fraction(1), parity=1))
        self.mark("apart", factor)

    # -------------------------------------------------------------- beside numbers
    def stand_beside(
        self, factor: Factor, value: Value, mark: Mark = "apart", others: Sequence[Factor] = ()
    ) -> None:
        """Combine a factor with values that may vary, except along dimensions of the others."""
        inner = factor.dims.difference(chosen(factor.labels), *(y.dims for y in others))
        dims = sorted(d for d in inner if value.varies[d] and value.shape[d] > 1)
        if not dims:
            return
        if value.constant is None:
            self.tell_apart(factor, dims=dims)
            return
        keys = _keys(value, factor)
        labels, keys = torch.broadcast_tensors(factor.labels, keys)
        if keys.unique().numel() > 1:
            self.colour(labels.numpy().ravel(), keys.numpy().ravel())
            self.mark(mark, factor)

    # -------------------------------------------------------------- padding
    def filled(self, factor: Factor) -> Factor:
        """Replace the padding of a factor by new labels, for padding other than zero."""
        padding = factor.labels == ZERO
        if not bool(padding.any()):
            return factor
        return replace(factor, labels=torch.where(padding, self.new(*padding.shape), factor.labels))

    def beside_padding(self, factor: Factor, partner: Factor) -> None:
        """Note the labels that a product pairs with padding only."""
        if bool((partner.labels < 0).any()):
            labels, beside = torch.broadcast_tensors(factor.labels, partner.labels)
            padded = torch.unique(labels[beside < 0])
            self.padded.append(padded[~torch.isin(padded, labels[beside >= 0])].numpy())

    def hold_unread(self) -> None:
        """Fix the labels that are paired with padding everywhere, because nothing reads them."""
        pairs = [t.pairs for t in self.ties] + [rows for _, rows in self.relations]
        present = np.concatenate([np.zeros(0, np.int64), *(rows.ravel() for rows in pairs)])
        for labels in self.padded:
            unread = torch.from_numpy(labels[~np.isin(labels, present)])
            if len(unread):
                self.fix(Factor(unread))

    # -------------------------------------------------------------- values
    def as_one_factor(self, value: Value, is_ordered: bool = False) -> Value:
        """Merge the factors of a value into one with new labels, in order if asked."""
        factors = self.absorb(value.factors)
        if len(factors) <= 1:
            return replace(value, factors=factors)
        full = torch.broadcast_tensors(*(f.labels for f in factors))
        places = torch.stack([t.reshape(-1) for t in full], 1)
        padding = (places < 0).any(1)
        distinct, index = torch.unique(places, dim=0, return_inverse=True)
        labels = self.new(len(distinct))[index]
        labels = torch.where(padding, places.amin(1), labels).reshape(full[0].shape)
        joined = Factor(
            labels, places=next((p.places for p in factors if p.places is not None), None)
        )
        mixed = [f for f in factors if f.dims]
        within = [x for x in mixed if all(_determines(x.labels, y.labels) for y in mixed)]
        for factor in factors:
            suffix = f"#{factors.index(factor)}" if is_ordered else ""
            name = f"merge{len(factor.dims)}^{factor.power}{'-' * factor.parity}{suffix}"
            self._tie_factor(labels, factor, name, is_placed=True)
        for factor in (*mixed, joined):  # one for all, or for each block, leaves matrices
            if len(mixed) > 1 and not (within and factor in (within[0], joined)):
                self.mark("apart", factor)
        if all(f.only_moves for f in factors):
            joined = joined.without_units()
        self.balance([(joined, -1), *((f, 1) for f in factors)])
        return replace(value, factors=(joined,))

    def absorb(self, factors: Sequence[Factor]) -> tuple[Factor, ...]:
        """Drop factors that only move beside others over the same dimensions."""
        left = list(factors)
        moving = [p for p in left if p.only_moves]
        for factor in sorted(moving, key=lambda p: not p.is_noise):
            others = [
                y for y in left if y is not factor and (factor.dims & y.dims or not factor.dims)
            ]
            wide = [
                y for y in others if factor.dims <= y.dims and _determines(y.labels, factor.labels)
            ]
            if not wide and any(factor.dims <= y.dims for y in others):
                continue
            reach = frozenset[int]().union(*(y.dims for y in others))
            if not wide and not (others and factor.dims <= reach):
                continue
            nearest = max(wide, key=lambda y: (y.power != 0, -len(y.dims)), default=None)
            for neighbour in others if nearest is None else [nearest]:
                is_one = self._tie_factor(neighbour.labels, factor, "beside", bool(wide))
                if factor.dims and (is_one or not wide):
                    self.mark("apart", factor)
                    self.mark("apart", neighbour)
            left = [y for y in left if y is not factor]
        return tuple(left)

    def settled(self, value: Value) -> Value:
        """Return the value for an operation that needs one label per entry."""
        factors = self.absorb(value.factors)
        repeated = len(factors) > 1 and len({p.dims for p in factors}) < len(factors)
        if repeated or any(p.power not in (0, 1) for p in factors):
            for factor in factors:
                self.mark("apart", factor)
        return self.as_one_factor(replace(value, factors=factors))


def _spanning_rows(labels: Sequence[Tensor]) -> Ints:
    """Return rows of labels at positions that determine the sums at all others.

    Labels that change along other dimensions change by themselves: it is enough to go along one
    group of dimensions where all others are at one place.
    """
    groups: list[tuple[set[int], list[int]]] = []
    for k, x in enumerate(labels):
        dims, members = {d - x.ndim for d, n in enumerate(x.shape) if n > 1}, [k]
        for near in [g for g in groups if g[0] & dims]:
            groups.remove(near)
            dims, members = dims | near[0], near[1] + members
        groups.append((dims, members))
    tables = [label_rows(*(labels[k] for k in members)) for _, members in groups]
    if len(groups) < 2 or not all(map(len, tables)):
        return label_rows(*labels)
    rows = np.empty((sum(map(len, tables)), len(labels)), np.int64)
    start = 0
    for (_, members), table in zip(groups, tables, strict=True):
        rows[:start, members], rows[start + len(table) :, members] = table[0], table[0]
        rows[start : start + len(table), members] = table
        start += len(table)
    return distinct_rows([*rows.T])


def is_grid(rows: Ints) -> bool:
    """Return whether every label of one column occurs with every label of the other."""
    sizes = [len(distinct(column)) for column in rows.T]
    return min(sizes) > 1 and len(rows) == sizes[0] * sizes[1]


def _determines(wide: Tensor, narrow: Tensor) -> bool:
    """Return whether the first label at a position determines the second."""
    rows = label_rows(wide, narrow)
    return len(distinct(rows[:, 0])) == len(rows)


def _keys(value: Value, factor: Factor) -> Tensor:
    """Number every position of a factor by the constants there."""
    numbers = value.constant
    assert numbers is not None
    for d in range(numbers.ndim):
        if d not in factor.dims and numbers.shape[d] > 1 and not value.varies[d]:
            numbers = numbers.narrow(d, 0, 1)
    dims = sorted(factor.dims)
    table = numbers.permute(*dims, *(d for d in range(numbers.ndim) if d not in dims))
    table = table.reshape(*table.shape[: len(dims)], -1)
    if table.is_complex():
        table = torch.view_as_real(table).flatten(-2)
    flat = table.reshape(-1, table.shape[-1]).to(torch.float64)
    rows, index = torch.unique(flat, dim=0, return_inverse=True)
    digests = [hashlib.blake2b(r.numpy().tobytes(), digest_size=7).digest() for r in rows]
    keys = torch.tensor([int.from_bytes(d, "little") for d in digests])[index]
    shape = [1] * value.constant.ndim  # type: ignore[union-attr]
    for size, d in zip(table.shape[: len(dims)], dims, strict=True):
        shape[d] = size
    return keys.reshape(shape)
