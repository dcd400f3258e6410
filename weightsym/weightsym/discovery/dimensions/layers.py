"""Layers with rules of their own: convolutions, norms with statistics, embeddings, extrema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from weightsym.discovery.dimensions.arithmetic import (
    gathered,
    multiply,
    reduced,
    row_factor,
    sum_over,
    unify,
)
from weightsym.discovery.dimensions.moves import reshaped, squeezed, unsqueezed
from weightsym.discovery.dimensions.system import System
from weightsym.discovery.dimensions.values import Factor, Value, compress, with_dims


def only_moving(value: Value) -> Value:
    """Return the value without units, which are known to be one."""
    factors = tuple(p.without_units() for p in value.factors)
    return replace(value, factors=factors, constant=None)


def contract(system: System, a: Value, b: Value) -> Value:
    """Multiply matrices and vectors, broadcasting the leading dimensions."""
    if len(a.shape) == 1:
        return squeezed(contract(system, unsqueezed(a, 0), b), max(len(b.shape) - 2, 0))
    if len(b.shape) == 1:
        return squeezed(contract(system, a, unsqueezed(b, 1)), len(a.shape) - 1)
    k = max(len(a.shape), len(b.shape))
    a, b = with_dims(a, k), with_dims(b, k)
    product = multiply(system, unsqueezed(a, k), unsqueezed(b, k - 2))
    return sum_over(system, product, [k - 1])


def convolution(system: System, size: Any, args: Sequence[Any]) -> Value:
    """Convolve: a product over channels in each group. Kernel positions stay fixed."""
    x, weight, bias, *_, transposed, _, groups = args
    space = len(x.shape) - 2
    batch, channels = x.shape[:2]
    out = size.shape[1]
    x, weight = (_without_space(system, v, space) for v in (x, weight))
    if transposed:
        x = reshaped(x, batch, groups, channels // groups, 1)
        weight = _in_groups(weight, groups, channels // groups)
    else:
        x = reshaped(x, batch, groups, 1, channels // groups)
        weight = _in_groups(weight, groups, out // groups)
    y = sum_over(system, multiply(system, x, weight), [2 if transposed else 3])
    y = y.moved(
        (batch, out),
        lambda t: t.expand(batch, groups, out // groups).reshape(batch, out),
        (batch > 1, out > 1),
    )
    if bias is not None:
        y = unify(system, [y, bias])
    factors = tuple(p.on(lambda t: t[(..., *([None] * space))]) for p in y.factors)
    return Value.of(size.shape, factors)


def _in_groups(weight: Value, *rows: int) -> Value:
    """View a weight as one matrix per group. Equal rows of a constant remain equal."""
    shape, varies = (1, *rows, weight.shape[1]), weight.varies
    along = [n > 1 and varies[d] for n, d in zip(shape, (0, 0, 0, 1), strict=True)]
    return weight.moved(shape, lambda t: t.expand(weight.shape).reshape(shape), along)


def _without_space(system: System, value: Value, space: int) -> Value:
    """Merge the positions of every row, whose entries then share one unit."""
    factors = []
    over = frozenset(range(2, len(value.shape)))
    for factor in value.factors:
        if factor.dims & over and factor.dims - over:
            system.tell_apart(factor, dims=sorted(over))
            system.mark("apart", factor)
            factor = row_factor(system, [factor], over, [factor], factor.power)
        elif factor.dims & over:
            system.fix(factor)
            continue
        factors.append(factor.on(lambda t: t.flatten(2)[..., 0]))
    return Value(value.shape[:2], tuple(factors), None, value.varies[:2])


# ------------------------------------------------------------ norms
def _per_channel(value: Value, ndim: int) -> Value:
    """Broadcast a vector of channels to an activation of ``ndim`` dimensions."""
    after = (1,) * (ndim - 2)
    factors = tuple(p.on(lambda t: t.reshape(1, -1, *after)) for p in value.factors)
    return Value(
        (1, *value.shape, *after), factors, None, (False, *value.varies, *(False,) * (ndim - 2))
    )  # noqa: E501


def batch_norm(
    system: System, x: Value, gain: Value | None, bias: Value | None, mean: Value, var: Value,
    is_fixed: bool = False,
) -> Value:  # fmt: skip
    """Normalise by running statistics, which move with their channels without changing units.

    Signs pass; the gain carries the scale of what follows. As a fixed map, a scale may come in: it
    passes, and the mean has it, too.
    """
    ndim = len(x.shape)
    for factor in () if is_fixed else mean.factors:
        system.stop(factor, sign=False)
    y = unify(system, [x, _per_channel(mean, ndim)])
    deviation = _per_channel(var, ndim)
    for factor in deviation.factors:
        system.stop(factor)
    y = multiply(system, y, only_moving(deviation))
    y = replace(y, factors=system.absorb(y.factors))
    return _affine(system, y, gain, bias)


def group_norm(system: System, args: Sequence[Any]) -> Value:
    """Normalise groups of channels over channels and positions."""
    x, gain, bias, batch, channels, places, groups, *_ = args
    rows = reshaped(x, batch, groups, channels // groups, places)
    y = reshaped(_normalised(system, rows, [2, 3]), *x.shape)
    return _affine(system, y, gain, bias)


def norm_by_places(system: System, x: Value, gain: Value | None, bias: Value | None) -> Value:
    """Normalise every channel over examples and positions."""
    return _affine(system, _normalised(system, x, _all_but_channels(x)), gain, bias)


def statistics(system: System, x: Value) -> tuple[Value, Value]:
    """Return the means and variances of the channels."""
    dims = _all_but_channels(x)
    return sum_over(system, x, dims), variance(system, x, dims, False, False)


def _all_but_channels(x: Value) -> list[int]:
    return [d for d in range(len(x.shape)) if d != 1]


def _affine(system: System, y: Value, gain: Value | None, bias: Value | None) -> Value:
    if gain is not None:
        y = system.settled(multiply(system, y, _per_channel(gain, len(y.shape))))
    if bias is not None:
        y = system.settled(unify(system, [y, _per_channel(bias, len(y.shape))]))
    return y


def _squared(system: System, value: Value) -> Value:
    factors = tuple(p.to_power(Fraction(2), 0) for p in system.absorb(value.factors))
    return replace(value, factors=factors, constant=None)


def _centred(system: System, x: Value, dims: Iterable[int]) -> Value:
    mean = sum_over(system, x, dims, keepdim=True)
    return replace(system.settled(unify(system, [x, mean])), constant=None)


def _normalised(system: System, x: Value, dims: Iterable[int]) -> Value:
    dims = list(dims)
    centred = _centred(system, x, dims)
    squares = sum_over(system, _squared(system, centred), dims, keepdim=True)
    for factor in squares.factors:
        system.stop(factor)  # a small number is added
    y = multiply(system, centred, only_moving(squares))
    return system.settled(replace(y, constant=None))


def variance(
    system: System, x: Value, dims: Sequence[int] | None, keepdim: bool, is_root: bool
) -> Value:
    """Return the variance or the standard deviation."""
    dims = list(dims) if dims is not None else list(range(len(x.shape)))
    sum_over(system, x, dims)  # the mean
    total = sum_over(system, _squared(system, x), dims, keepdim)
    half = Fraction(1, 2)
    return (
        replace(total, factors=tuple(p.to_power(half, 1) for p in total.factors))
        if is_root
        else total
    )


# ------------------------------------------------------------ others
def embedding(system: System, table: Value, index: Value, size: Any) -> Value:
    """Look up rows of a table by index: its rows are fixed, its columns are passed on."""
    factors = []
    for factor in table.factors:
        if 0 in factor.dims:
            system.fix(factor)
        else:
            factors.append(
                factor.on(lambda t: t.reshape((1,) * len(index.shape) + tuple(t.shape[1:])))
            )
    return Value.of(size.shape, factors)


def extreme(system: System, value: Value, dims: Sequence[int] | int, keepdim: bool) -> Value:
    """The maximum or minimum along dimensions, which scales commute with and signs do not."""
    ndim = len(value.shape)
    listed = [dims] if isinstance(dims, int) else list(dims)
    over = frozenset(d % ndim for d in listed) or frozenset(range(ndim))
    value = gathered(system, system.as_one_factor(value), over)
    for factor in value.factors:
        system.stop(factor, scale=False)
        system.mark("apart", factor)
    if any(p.dims & over for p in value.factors):
        (factor,) = value.factors
        row = row_factor(system, [factor], over, [factor], factor.power)
        return reduced(value, [replace(row, power=factor.power, parity=0)], over, keepdim)
    factors = [replace(p, parity=0) for p in value.factors]
    return reduced(value, factors, over, keepdim)


def moved_along(value: Value, image: dict[int, int], size: Any, scales: bool, signs: bool) -> Value:
    """Permute the dimensions of a value as a probe has observed."""
    factors: list[Factor] = []
    for factor in value.factors:
        source = sorted(factor.dims, key=lambda d: image[d])
        labels = factor.labels.permute(
            *source, *(d for d in range(factor.labels.ndim) if d not in source)
        )  # noqa: E501
        shape = [1] * size.ndim
        for d in source:
            shape[image[d]] = factor.labels.shape[d]
        has_unit = size.dtype.is_floating_point or size.dtype.is_complex
        power = factor.power if scales and has_unit else Fraction(0)
        parity = factor.parity if signs and has_unit else 0
        factors.append(Factor(compress(labels.reshape(shape)), power, parity))
    return Value.of(size.shape, factors)
