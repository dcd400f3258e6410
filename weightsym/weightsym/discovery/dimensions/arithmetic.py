"""The three rules: addends share a unit, products multiply units, sums along rows cancel them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from weightsym.discovery.dimensions.noise import met
from weightsym.discovery.dimensions.system import System, is_grid
from weightsym.discovery.dimensions.values import (
    NONE,
    Factor,
    Ints,
    Value,
    choice_of,
    chosen,
    compress,
    label_rows,
    with_dims,
)


# ------------------------------------------------------------ side by side
def unify(system: System, values: Sequence[Value], is_linear: bool = True) -> Value:
    """Unify the units and motions of operands that are added, compared or selected between.

    Args:
        system: takes the ties and equations.
        values: the operands; they broadcast.
        is_linear: whether the result is linear in them, so that matrices pass.
    """
    ndim = max(len(v.shape) for v in values)
    values = met([with_dims(v, ndim) for v in values])
    shape = torch.broadcast_shapes(*(v.shape for v in values))
    varies = tuple(any(v.varies[d] for v in values) for d in range(ndim))
    values = [v for v in values if not v.is_zero] or values[:1]
    if len({_choices_of(v) for v in values if v.factors}) > 1:
        values = [gathered(system, v) for v in values]
    first, *others = (replace(v, factors=system.absorb(v.factors)) for v in values)
    for value in others:
        first = _unify_two(system, first, value)
    if not is_linear:
        for factor in first.factors:
            system.mark("apart", factor)
    return Value(tuple(shape), first.factors, None, varies)


def _choices_of(value: Value) -> frozenset[bytes]:
    return frozenset(choice_of(x.labels) for x in value.factors) - {b""}


def gathered(system: System, value: Value, over: frozenset[int] | None = None) -> Value:
    """Merge the labels that a choice selects among into one, where the choice is along ``over``."""
    if not system.choices:
        return value
    factors = []
    for x in value.factors:
        dims = chosen(x.labels)
        if not dims or (over is not None and not dims & over):
            factors.append(x)
            continue
        units = [] if x.only_moves else [x]
        row = row_factor(system, [x], dims, units, x.power)
        system.mark("apart", x)
        if not x.only_moves:
            factors.append(replace(row, axis=x.axis))
        elif row.dims:
            factors.append(row.without_units())
    return replace(value, factors=tuple(factors))


def _unify_two(system: System, a: Value, b: Value) -> Value:
    system.note_table(a, b)
    system.note_table(b, a)
    left, right = _as_wide(system, a, b), _as_wide(system, b, a)
    pairs = []
    for x in list(left):
        partner = next((y for y in right if y.dims == x.dims), None)
        if partner is not None:
            pairs.append((x, partner))
            left = [y for y in left if y is not x]
            right = [y for y in right if y is not partner]
    left, right = ([system.filled(x) for x in side] for side in (left, right))
    if right and not left:  # the result is written as the operand with more factors
        return _unify_two(system, b, a)
    has_gate = len(pairs) > 1 and not all(x.dims for x, _ in pairs)
    is_partial = bool(left or right) or has_gate  # then one number takes up what channels share
    result = [_tied(system, x, y, is_partial) for x, y in pairs]
    if is_partial:
        ours = [(x, 1) for x in (*(p[0] for p in pairs), *left)]
        system.balance([*ours, *((y, -1) for y in (*(p[1] for p in pairs), *right))])
    _meet_numbers(system, left, b, right)
    _meet_numbers(system, right, a, left)
    told_apart = b.constant is None and all(b.varies[d] for x in left for d in x.dims)
    if pairs and left and not right and told_apart:
        result, left = [replace(y, axis=None) for _, y in pairs], []
    result += _across(system, a, left, right) if left and right else [*left, *right]
    shape = torch.broadcast_shapes(a.shape, b.shape)
    varies = tuple(p or q for p, q in zip(a.varies, b.varies, strict=True))
    return Value(tuple(shape), tuple(result), None, varies)


def _as_wide(system: System, value: Value, operand: Value) -> list[Factor]:
    """Return the factors, merged into one if the other operand has one label per entry."""
    reach = frozenset[int]().union(*(x.dims for x in value.factors))
    if len(value.factors) > 1 and len(operand.factors) == 1 and operand.factors[0].dims == reach:
        return list(system.as_one_factor(value).factors)
    return list(value.factors)


def _tied(system: System, x: Factor, y: Factor, is_partial: bool) -> Factor:
    """Merge two factors over the same dimensions into one."""
    rows = label_rows(x.labels, y.labels)
    rows = rows[rows[:, 0] != rows[:, 1]]
    if len(rows) and np.array_equal(np.unique(rows[:, 0]), np.unique(rows[:, 1])):
        system.planes.append(np.unique(np.sort(rows, 1), axis=0))  # x is added to a shuffle of x
    if len(rows) and not (x.dims or y.dims):  # what all entries share does not move
        shared = replace(x, labels=system.new(*x.labels.shape), axis=None)
        system.balance([(shared, 1), (x, -1)])
        if not is_partial:
            system.balance([(x, 1), (y, -1)])
        return shared
    system.tie(x.labels, y.labels, "sum")
    if not is_partial:
        system.balance([(x, 1), (y, -1)])
    labels = x.labels
    if not bool((labels >= 0).all()):
        labels = torch.where(*torch.broadcast_tensors(labels >= 0, labels, y.labels))
    return replace(x, labels=labels, axis=None, is_noise=x.is_noise and y.is_noise)


def _meet_numbers(
    system: System, factors: Iterable[Factor], operand: Value, others: Sequence[Factor]
) -> None:
    """Relate dimensions that only one operand has to the values of the other operand."""
    for factor in factors:
        inside = [y for y in operand.factors if y.dims and y.dims <= factor.dims]
        inside = [y for y in inside if not any(y.dims & z.dims for z in others)]
        for y in inside:  # numbers that move say to which entries they belong
            system.tie(factor.labels, y.labels, "beside")
            system.mark("apart", factor)
        system.stand_beside(factor, operand, others=(*others, *inside))
        if not others:
            if factor.dims and not any(operand.varies[d] for d in factor.dims):
                system.mark("ones", factor)
            if not operand.factors:
                system.stop(factor)


def _across(system: System, a: Value, left: list[Factor], right: list[Factor]) -> list[Factor]:
    """Combine factors over different dimensions, such as a column plus a row."""
    both = left + right
    wide = [x for x in both if all(y.dims <= x.dims for y in both)]
    if wide:
        for y in both:
            if y is not wide[0]:
                system.tie(wide[0].labels, y.labels, "wide")
                system.mark("ones", wide[0])
        return left if any(x is wide[0] for x in left) else right
    moves = tuple(x.without_units() for x in both)
    base = Factor(system.as_one_factor(Value(a.shape, moves), system.is_ordered).factors[0].labels)
    for side in (left, right):
        system.balance([(base, 1), *((x, -1) for x in side)])
    return [base]


# ------------------------------------------------------------ products
def multiply(system: System, a: Value, b: Value, power: int = 1) -> Value:
    """Multiply ``a * b ** power``, keeping all factors. Nothing is tied until a rule demands it."""
    ndim = max(len(a.shape), len(b.shape))
    a, b = met([with_dims(a, ndim), with_dims(b, ndim)])
    shape = torch.broadcast_shapes(a.shape, b.shape)
    if a.is_zero or (b.is_zero and power > 0):
        return Value.constant_of(torch.zeros(()).expand(shape))
    if len(_choices_of(a) | _choices_of(b)) > 1:
        a, b = gathered(system, a), gathered(system, b)
    system.note_table(a, b)
    system.note_table(b, a)
    for factor, operand in [(x, b) for x in a.factors] + [(x, a) for x in b.factors]:
        system.stand_beside(factor, operand, "numbers", operand.factors)
    factors = (*a.factors, *(y.to_power(Fraction(power), 1) for y in b.factors))
    varies = tuple(p or q for p, q in zip(a.varies, b.varies, strict=True))
    return Value(tuple(shape), factors, None, varies)


# ------------------------------------------------------------ sums over dimensions
def sum_over(
    system: System, value: Value, dims: Iterable[int] | None, keepdim: bool = False
) -> Value:
    """Sum along dimensions. Their units must equal one common unit, and their labels vanish."""
    ndim = len(value.shape)
    over = frozenset(d % ndim for d in dims) if dims else frozenset(range(ndim))
    if value.constant is not None:
        total = value.constant.sum(sorted(over), keepdim=keepdim) if ndim else value.constant
        return Value.constant_of(total)
    value = gathered(system, value, over)
    consumed = [x for x in value.factors if x.dims & over]
    if len({choice_of(x.labels) for x in consumed}) > 1:
        wide = gathered(system, Value(value.shape, tuple(consumed)))
        consumed = [x for x in wide.factors if x.dims & over]
    idle = [x for x in value.factors if not x.dims & over]
    places = [x for x in consumed if x.only_moves]
    consumed = list(system.absorb(consumed)) if len(consumed) > 1 else consumed
    new: list[Factor] = []
    for group in _meeting(consumed):
        pair = _at_most_two(system, value, group, idle)
        if len(pair) == 2:
            sums, idle = _contract(system, pair[0], pair[1], idle, over, places)
            new += sums
        else:
            new += _use_up(system, pair[0], idle, over)
    for row in new:
        for y in idle:
            if row.dims and row.dims <= y.dims:
                system.tie(y.labels, row.labels, "row")
    new = [x for x in new if not (x.only_moves and any(x.dims <= y.dims for y in idle))]
    return reduced(value, system.absorb(idle + new), over, keepdim)


def _meeting(factors: Iterable[Factor]) -> list[list[Factor]]:
    """Group the factors that share dimensions, directly or through others."""
    groups: list[list[Factor]] = []
    for factor in factors:
        near = [g for g in groups if any(x.dims & factor.dims for x in g)]
        groups = [g for g in groups if g not in near] + [[*(x for g in near for x in g), factor]]
    return groups


def _at_most_two(
    system: System, value: Value, factors: Sequence[Factor], idle: Sequence[Factor]
) -> Sequence[Factor]:
    """Reduce factors to at most two: a free one, if any, and the product of the others."""
    if len(factors) <= 2:
        return factors
    free = [x for x in factors if x.is_free_beside(idle)][:1]
    others = tuple(x for x in factors if x not in free)
    return [*free, *system.as_one_factor(Value(value.shape, others)).factors]


def _contract(
    system: System,
    x: Factor,
    y: Factor,
    idle: list[Factor],
    over: frozenset[int],
    places: Sequence[Factor] = (),
) -> tuple[list[Factor], list[Factor]]:
    """Contract two rows: their labels are tied, and their units cancel or leave those of a block.

    A weight that nothing has used takes up the units of what it is multiplied with. Where labels
    stand several times, ``places`` may tell where, as heads do beside values that they share.
    """
    rows = label_rows(x.labels, y.labels)
    repeated = [p.labels for p in places if len(p.labels.unique()) < p.labels.numel()]  # no grids
    is_placed = repeated and all(len(label_rows(z.labels, *repeated)) == len(rows) for z in (x, y))
    x, y = _in_entries(system, x, rows), _in_entries(system, y, rows)
    system.tie(x.labels, y.labels, "placed" if is_placed else "dot", over)
    system.beside_padding(x, y)
    system.beside_padding(y, x)
    fixes = x.is_free_beside(idle) or y.is_free_beside(idle)
    for z in (x, y):
        if z.power != 1:
            system.mark("apart", z)
    if not fixes:
        power = Fraction(bool(x.power or y.power))
        return [row_factor(system, [x, y], over, [x, y], power)], idle
    alone = [z for z in idle if fixes and not z.dims and not z.is_free and not z.only_moves]
    system.balance([(x, 1), (y, 1), *((z, 1) for z in alone)])
    idle = [z.without_units() if z in alone else z for z in idle]
    if (x.dims | y.dims) - over:
        return [row_factor(system, [x, y], over).without_units()], idle
    return [], idle


def _in_entries(system: System, x: Factor, rows: Ints) -> Factor:
    """Label every entry of a table whose labels form a grid with others, as for circulants."""
    if len(x.dims) < 2 or not is_grid(rows) or len(x.labels.unique()) == x.labels.numel():
        return x
    entries = replace(x, labels=system.new(*x.labels.shape), axis=None, places=None)
    system.tie(entries.labels, x.labels, "entry")
    system.balance([(entries, 1), (x, -1)])
    return entries


def _use_up(
    system: System, x: Factor, idle: Sequence[Factor], over: frozenset[int]
) -> list[Factor]:
    """Sum along a row without a partner: all its entries share one unit."""
    outside = bool(x.dims - over)
    if x.is_free_beside(idle) and x.power == 1:
        system.stop(x)
        system.mark("ones", x)
        return [row_factor(system, [x], over).without_units()] if outside else []
    if x.only_moves:
        return [row_factor(system, [x], over).without_units()] if outside else []
    if x.power != 2:
        system.mark("ones" if x.power == 1 else "apart", x)
    return [row_factor(system, [x], over, [x], x.power)]


def row_factor(
    system: System,
    factors: Sequence[Factor],
    over: frozenset[int],
    balance: Sequence[Factor] = (),
    power: Fraction = Fraction(1),
) -> Factor:
    """Assign a new label to every distinct row along the summed dimensions: a block."""
    shape = torch.broadcast_shapes(*(x.labels.shape for x in factors))
    full = torch.stack([x.labels.expand(shape) for x in factors])
    outer = [d + 1 for d in range(len(shape)) if d not in over]
    table = full.permute(*outer, 0, *(d + 1 for d in sorted(over)))
    sizes = [1 if d in over else n for d, n in enumerate(shape)]
    rows, index = torch.unique(table.reshape(int(np.prod(sizes)), -1), dim=0, return_inverse=True)
    new = torch.where((rows == NONE).all(1), NONE, system.new(len(rows)))
    labels = compress(new[index].reshape(sizes))
    reach = frozenset(d for d, n in enumerate(labels.shape) if n > 1)
    for x in factors:
        if reach:
            system.tie(x.labels, labels, "in")
    is_odd = any(z.parity for z in balance)
    factor = Factor(labels, power, int(is_odd))
    if balance:
        system.balance([(factor, -1), *((z, 1) for z in balance)])
    return factor


def reduced(value: Value, factors: Iterable[Factor], over: frozenset[int], keepdim: bool) -> Value:
    """Return a value with the given factors, without the dimensions that were summed."""

    def narrowed(labels: Tensor) -> Tensor:
        for d in sorted(over, reverse=True):
            labels = labels.narrow(d, 0, 1)
            labels = labels if keepdim else labels.squeeze(d)
        return labels

    left = [
        (1 if d in over else n, d not in over and value.varies[d])
        for d, n in enumerate(value.shape)
        if keepdim or d not in over
    ]
    return Value(
        tuple(n for n, _ in left), tuple(x.on(narrowed) for x in factors), None,
        tuple(v for _, v in left),
    )  # fmt: skip
