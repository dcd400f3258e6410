"""Operations that only move entries, executed on labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weightsym.discovery.dimensions.arithmetic import unify
from weightsym.discovery.dimensions.nodes import operation_of
from weightsym.discovery.dimensions.system import System
from weightsym.discovery.dimensions.values import ZERO, Factor, Value, compress, with_dims

UNCHANGED = frozenset("_to_copy to clone contiguous lift_fresh_copy alias detach".split())
RESHAPES = frozenset("view reshape _unsafe_view view_copy".split())
MOVES = RESHAPES | UNCHANGED | frozenset(
    "permute transpose t squeeze unsqueeze select slice flip roll narrow unbind split "
    "split_with_sizes diagonal as_strided unfold movedim pixel_shuffle pixel_unshuffle "
    "channel_shuffle constant_pad_nd slice_scatter index index_select".split()
)  # fmt: skip


class Unfollowed(Exception):
    """An operation through which labels cannot be followed. Its operands are fixed."""


def move(system: System, node: Node, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """Execute a data movement on the labels of its operand."""
    name, value, size = operation_of(node), args[0], node.meta["val"]
    if name in UNCHANGED:
        return value
    if name in RESHAPES:
        value = _unrolled(system, value, size.shape)
        return _reshaped(value, size.shape)
    if name == "slice_scatter":
        return _written_into(system, node, args, named)
    if name == "slice" and _is_emptied(value, args, size):
        return Value(tuple(size.shape), value.factors, None, value.varies)
    function = _function(node, name, value, args, named)
    if isinstance(size, tuple | list):
        return _pieces(value, function, size)
    return _moved(value, size.shape, function)


def _is_emptied(value: Value, args: Sequence[Any], size: Tensor) -> bool:
    """Return whether a slice, such as ``x[:, 1:]``, is empty only because an example is short.

    What another example would leave there moves as before. Channels are as many in all of them.
    """
    start, end = (*args[2:4], None, None)[:2]
    is_by_length = start not in (None, 0) or (isinstance(end, int) and end < 0)
    is_of_channels = any(int(args[1]) % len(value.shape) in f.dims for f in value.factors)
    is_empty = not size.numel() and 0 not in value.shape
    return is_by_length and is_empty and not is_of_channels


def _reshaped(value: Value, shape: Sequence[int]) -> Value:
    pieces = _pieces_of_view(value.shape, shape)

    def reshape(labels: Tensor) -> Tensor:
        """Reshape labels, with size 1 along pieces in which they are constant."""
        wide, new = list(labels.shape), [1] * len(shape)
        for before, after in pieces:
            if len(pieces) == 1 or any(labels.shape[d] > 1 for d in before):
                for d in before:
                    wide[d] = value.shape[d]
                for d in after:
                    new[d] = shape[d]
        return labels.expand(wide).reshape(new)

    return _moved(value, shape, reshape)


def _pieces_of_view(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split two shapes of the same entries into corresponding pieces of dimensions, in order."""
    pieces, before, after = [], list(range(len(old))), list(range(len(new)))
    if 0 in old or math.prod(old) != math.prod(new):
        return [(before, after)]
    while before or after:
        a, b = [before.pop(0)] if before else [], [after.pop(0)] if after else []
        sizes = [math.prod(old[d] for d in a), math.prod(new[d] for d in b)]
        while sizes[0] != sizes[1]:
            k = int(sizes[0] > sizes[1])
            d = (before, after)[k].pop(0)
            (a, b)[k].append(d)
            sizes[k] *= (old, new)[k][d]
        pieces.append((a, b))
    return pieces


def _function(
    node: Node, name: str, value: Value, args: Sequence[Any], named: dict[str, Any]
) -> Callable[[Tensor], Any]:
    arguments = args[1:]
    target: Any = node.target
    if name == "constant_pad_nd":
        number = args[2] if len(args) > 2 else named.get("value", 0)
        if value.factors and number != 0:
            raise Unfollowed("padding with a nonzero value")
        return lambda t: _padded(t, value.shape, arguments[0])
    if name == "index":
        indices = [None if i is None else i.constant for i in args[1]]
        return lambda t: target(t.expand(value.shape), indices)
    if name == "index_select":
        return lambda t: target(t.expand(value.shape), arguments[0], arguments[1].constant)
    if name == "as_strided":
        return lambda t: target(t.expand(value.shape).contiguous(), *arguments, **named)
    return lambda t: target(t.expand(value.shape), *arguments, **named)


def _padded(labels: Tensor, shape: Sequence[int], amounts: Sequence[int]) -> Tensor:
    """Pad labels with zeros. Dimensions without labels remain unlabelled."""
    pairs = [amounts[k : k + 2] for k in range(0, len(amounts), 2)]
    widths = []
    for d, (before, after) in zip(range(len(shape) - 1, -1, -1), pairs, strict=False):
        has_labels = labels.shape[d] == shape[d]
        widths += [before, after] if has_labels else [0, 0]
    padded = torch.nn.functional.pad(labels, widths, value=ZERO)
    ends = [sum(p) for p in pairs[::-1]]
    ends = [0] * (len(shape) - len(ends)) + ends
    return padded.expand([n + k for n, k in zip(shape, ends, strict=True)])


def _pieces(
    value: Value, function: Callable[[Tensor], Any], sizes: Sequence[Tensor]
) -> tuple[Value, ...]:
    factors: list[list[Factor]] = [[] for _ in sizes]
    for factor in value.factors:
        for piece, labels in zip(factors, function(factor.labels), strict=True):
            piece.append(factor.with_labels(compress(labels)))
    return tuple(Value.of(s.shape, piece) for s, piece in zip(sizes, factors, strict=True))


def _moved(value: Value, shape: Sequence[int], function: Callable[[Tensor], Tensor]) -> Value:
    """Apply a data movement to a value, one axis at a time.

    Along which dimensions of the result may numbers differ, and which positions come to stand among
    the entries of a label?
    """
    varies, positions = [False] * len(shape), []
    for d in (d for d, varied in enumerate(value.varies) if varied):
        along = [-1 if k == d else 1 for k in range(len(value.shape))]
        moved = compress(function(torch.arange(1, value.shape[d] + 1).reshape(along)))
        varies = [varied or n > 1 for varied, n in zip(varies, moved.shape, strict=True)]
        if not any(d in f.dims for f in value.factors):
            positions.append(moved)
    result = value.moved(shape, function, varies)
    return replace(result, factors=tuple(_among(f, positions) for f in result.factors))


def _among(factor: Factor, positions: Sequence[Tensor]) -> Factor:
    """Return the factor with positions along its own dimensions."""
    for positions_along in positions:
        if any(positions_along.shape[d] > 1 for d in factor.dims):
            before = factor.places if factor.places is not None else 0
            factor = replace(
                factor, places=before * (int(positions_along.max()) + 1) + positions_along
            )
    return factor


def _unrolled(system: System, value: Value, shape: Sequence[int]) -> Value:
    """Relabel the copies of a broadcast dimension that is flattened into channels."""
    for d, n in enumerate(value.shape):
        if n > 1 and not value.varies[d] and not _stays(value, d, shape):
            factors = tuple(_copied(system, value, f, d, n, shape) for f in value.factors)
            varies = tuple(k == d or varied for k, varied in enumerate(value.varies))
            value = Value(value.shape, factors, value.constant, varies)
    return value


def _copied(
    system: System, value: Value, factor: Factor, d: int, n: int, shape: Sequence[int]
) -> Factor:
    is_flattened = any(not _stays(value, k, shape) for k in factor.dims)
    if factor.labels.shape[d] > 1 or not is_flattened:
        return factor
    copies = system.new(*(n if k == d else a for k, a in enumerate(factor.labels.shape)))
    system.tie(copies, factor.labels, "copy")
    copy = replace(factor, labels=copies, axis=None)
    system.balance([(copy, 1), (factor, -1)])
    return copy


def _stays(value: Value, d: int, shape: Sequence[int]) -> bool:
    """Return whether a dimension remains a single dimension of the new shape."""
    before, after = next(p for p in _pieces_of_view(value.shape, shape) if d in p[0])
    sizes = [value.shape[k] for k in before], [shape[k] for k in after]
    wide, new = ([n for n in size if n > 1] for size in sizes)
    return wide == new == [value.shape[d]]


def _written_into(system: System, node: Node, args: Sequence[Any], named: dict[str, Any]) -> Value:
    target: Any = node.target
    whole, factor = (system.as_one_factor(v) for v in args[:2])
    labels = target(_labels_of(whole), _labels_of(factor), *args[2:], **named)
    return Value.of(whole.shape, [Factor(compress(labels))])


def _labels_of(value: Value) -> Tensor:
    if value.factors:
        return value.factors[0].labels.expand(value.shape)
    return torch.full(value.shape, ZERO if value.is_zero else 0)


# ------------------------------------------------------------ dimensions
def unsqueezed(value: Value, d: int) -> Value:
    """Insert a dimension of size 1."""
    shape, varies = list(value.shape), list(value.varies)
    shape.insert(d, 1)
    varies.insert(d, False)
    constant = None if value.constant is None else value.constant.unsqueeze(d)
    factors = tuple(p.on(lambda t: t.unsqueeze(d)) for p in value.factors)
    return Value(tuple(shape), factors, constant, tuple(varies))


def squeezed(value: Value, d: int) -> Value:
    """Remove a dimension of size 1."""
    shape, varies = list(value.shape), list(value.varies)
    del shape[d], varies[d]
    return Value(tuple(shape), tuple(p.on(lambda t: t.squeeze(d)) for p in value.factors), None,
                 tuple(varies))  # fmt: skip


def reshaped(value: Value, *shape: int) -> Value:
    """Reshape a value, all of whose dimensions vary."""
    return value.moved(
        shape, lambda t: t.expand(value.shape).reshape(shape), [n > 1 for n in shape]
    )


def expand(value: Value, shape: Sequence[int]) -> Value:
    """Broadcast a value to a shape. It is constant along the new dimensions."""
    value = with_dims(value, len(shape))
    constant = None if value.constant is None else value.constant.expand(tuple(shape))
    varies = tuple(v and value.shape[d] > 1 for d, v in enumerate(value.varies))
    return Value(tuple(shape), value.factors, constant, varies)


# ------------------------------------------------------------ concatenation
def join(system: System, values: Sequence[Value], d: int, shape: Sequence[int]) -> Value:
    """Concatenate values and their labels."""
    ndim = len(shape)
    varies = [any(v.varies[k] for v in values) or k == d for k in range(ndim)]
    full = [v for v in values if not v.is_zero]
    if all(v.factors and not any(d in p.dims for p in v.factors) for v in full):
        same = unify(system, [_first_of(v, d) for v in full])
        return Value(tuple(shape), same.factors, None, tuple(varies))
    beside = _joined_beside_others(system, values, d, shape)
    if beside is not None:
        return beside
    if len(full) == len(values):
        joined = _joined_one_by_one(system, values, d, shape)
        if joined is not None:
            return joined
    factor = _joined_entry_by_entry(system, values, d, shape)
    return Value(tuple(shape), (factor,) if factor else (), None, tuple(varies))


def _joined_beside_others(
    system: System, values: Sequence[Value], d: int, shape: Sequence[int]
) -> Value | None:
    """Concatenate rows of parameters with rows of data, which have no labels along them."""
    along = [[p for p in v.factors if d in p.dims] for v in values]
    rows = [p for row in along for p in row]
    others = [replace(v, factors=tuple(p for p in v.factors if d not in p.dims)) for v in values]
    is_row = all(v.factors for v in others) and 0 in map(len, along)
    if not is_row or not rows or max(map(len, along)) > 1 or any(p.power != 1 for p in rows):
        return None
    same = unify(system, [_first_of(v, d) for v in others])
    wide = torch.broadcast_shapes(*(p.labels.narrow(d, 0, 1).shape for p in rows))
    size = [[v.shape[d] if k == d else n for k, n in enumerate(wide)] for v in values]
    labels = [
        row[0].labels.expand(n) if row else torch.zeros(n, dtype=torch.long)
        for row, n in zip(along, size, strict=True)
    ]
    return Value.of(shape, (*same.factors, Factor(torch.cat(labels, d))))


def _joined_entry_by_entry(
    system: System, values: Sequence[Value], d: int, shape: Sequence[int]
) -> Factor | None:
    """Concatenate with one label per entry. None if no value has labels and none is zero."""
    values = [system.as_one_factor(v) for v in values]
    powers = {(p.power, p.parity) for v in values for p in v.factors}
    if not powers and not any(v.is_zero for v in values):
        return None
    if len(powers) > 1:
        values = [_to_first_power(system, v) for v in values]
    power, parity = powers.pop() if len(powers) == 1 else (Fraction(1), 1)
    dims = {k for v in values for p in v.factors for k in p.dims} | {d}
    narrow = [_labels_of(v) for v in values]
    for k in set(range(len(shape))) - dims:
        narrow = [t.narrow(k, 0, 1) for t in narrow]
    factor = Factor(compress(torch.cat(narrow, d)), power, parity)
    places = [
        _places_of(v, k, t.shape) for k, (v, t) in enumerate(zip(values, narrow, strict=True))
    ]
    factor = factor.with_labels(factor.labels, compress(torch.cat(places, d)))
    return _with_copies(system, factor, narrow, d)


def _places_of(value: Value, k: int, shape: Sequence[int]) -> Tensor:
    """Return the positions of entries that share a label. Data and constants differ by piece.

    Constants that are equal are at one place.
    """
    if value.factors:
        placed = value.factors[0].places
        return (
            torch.zeros((), dtype=torch.long).expand(shape)
            if placed is None
            else placed.expand(shape)
        )
    if value.constant is not None:
        places = torch.unique(value.constant, return_inverse=True)[1]
    else:
        sizes = [n if varied else 1 for n, varied in zip(value.shape, value.varies, strict=True)]
        places = torch.arange(math.prod(sizes)).reshape(sizes)
    for d, n in enumerate(shape):
        places = places.narrow(d, 0, 1) if n == 1 else places
    return (places + (k + 1) * 1_000_003).expand(tuple(shape))


def _with_copies(system: System, factor: Factor, pieces: Sequence[Tensor], d: int) -> Factor:
    """Relabel, in each piece, the labels that occur in several pieces."""
    distinct = [torch.unique(piece[piece > 0]) for piece in pieces]
    if sum(map(len, distinct)) == len(torch.unique(torch.cat(distinct))):
        return factor
    keys = torch.cat([torch.where(p > 0, p + k * system.count, p) for k, p in enumerate(pieces)], d)
    distinct_keys, index = torch.unique(keys, return_inverse=True)
    copies = compress(torch.where(keys > 0, system.new(len(distinct_keys))[index], keys))
    system.tie(copies, torch.where(factor.labels > 0, factor.labels, ZERO), "cat")
    copy = replace(factor, labels=copies, axis=None)
    system.balance([(copy, 1), (factor, -1)])
    return copy


def _first_of(value: Value, d: int) -> Value:
    """Return the first entry along a dimension without labels."""
    shape, varies = list(value.shape), list(value.varies)
    shape[d], varies[d] = 1, False
    return Value(tuple(shape), value.factors, None, tuple(varies))


def _joined_one_by_one(
    system: System, values: Sequence[Value], d: int, shape: Sequence[int]
) -> Value | None:
    """Concatenate values with several factors over the same dimensions, factor by factor."""
    if len({len(v.factors) for v in values}) > 1 or len(values[0].factors) < 2:
        return None
    if any(v.shape[d] < 2 for v in values):
        return None
    factors = []
    for x in values[0].factors:
        index = [y is x for y in _alike(x, values[0], d)].index(True)
        mates = [next(iter(_alike(x, v, d)[index:]), None) for v in values]
        if any(m is None for m in mates):
            return None
        present = [m for m in mates if m is not None]
        if d in x.dims:
            shapes = [m.labels.shape[:d] + (1,) + m.labels.shape[d + 1 :] for m in present]
            wide = torch.broadcast_shapes(*shapes)
            labels = [
                m.labels.expand([v.shape[k] if k == d else n for k, n in enumerate(wide)])
                for m, v in zip(present, values, strict=True)
            ]
            factors.append(replace(x.with_labels(torch.cat(labels, d)), axis=None))
        else:
            for m in present[1:]:
                system.tie(x.labels, m.labels)
                system.balance([(x, 1), (m, -1)])
            factors.append(replace(x, axis=None))
    return Value.of(shape, factors)


def _alike(x: Factor, value: Value, d: int) -> list[Factor]:
    """List the factors of a value with the power, parity and dimensions of a given one."""
    key = x.power, x.parity, x.dims - {d}, d in x.dims
    return [y for y in value.factors if (y.power, y.parity, y.dims - {d}, d in y.dims) == key]


def _to_first_power(system: System, value: Value) -> Value:
    if not value.factors:
        return value
    (factor,) = value.factors
    if (factor.power, factor.parity) == (1, 1):
        return value
    plain = Factor(system.new(*factor.labels.shape))
    system.tie(plain.labels, factor.labels, "cat")
    system.balance([(plain, 1), (factor, -1)])
    system.mark("apart", factor)
    return replace(value, factors=(plain,))


def stacked(system: System, values: Sequence[Value], d: int, shape: Sequence[int]) -> Value | None:
    """Concatenate single rows along a new dimension of positions, which may be permuted."""
    values = [replace(v, factors=system.absorb(v.factors)) for v in values]
    dims = {frozenset(p.dims for p in v.factors) for v in values}
    alike = len(dims) == 1 and all(v.factors for v in values) and len(values) > 1
    if not alike or any(v.shape[d] != 1 or d in p.dims for v in values for p in v.factors):
        return None
    row = Factor(
        system.new(len(values)).reshape([-1 if k == d else 1 for k in range(len(shape))]),
        Fraction(0), 0,
    )  # fmt: skip
    first = values[0]
    if all(have_same_labels(first, v) for v in values[1:]):
        same = unify(system, values)
        varies = tuple(v or k == d for k, v in enumerate(same.varies))
        return Value(tuple(shape), (*same.factors, row), None, varies)
    values = [system.as_one_factor(v) for v in values]
    if len({(v.factors[0].power, v.factors[0].parity) for v in values}) > 1:
        return None
    wide = torch.broadcast_shapes(*(v.factors[0].labels.shape for v in values))
    labels = torch.cat([v.factors[0].labels.expand(wide) for v in values], d)
    system.tie(labels, row.labels, "stack")
    factor = replace(values[0].factors[0].with_labels(compress(labels)), axis=None)
    varies = tuple(any(v.varies[k] for v in values) or k == d for k in range(len(shape)))
    return Value(tuple(shape), (factor,), None, varies)


def have_same_labels(a: Value, b: Value) -> bool:
    """Return whether two values have the same labels everywhere."""
    if len(a.factors) != len(b.factors):
        return False
    return all(
        x.labels.shape == y.labels.shape and bool((x.labels == y.labels).all())
        for x, y in zip(a.factors, b.factors, strict=True)
    )
