"""Effects of operations on units, measured on random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from weightsym.discovery.dimensions.values import Value

_ORDINARY = 32
"""Numbers that are normal; after them come those of `_SIZES`."""
_SIZES = 10 ** torch.linspace(-4, 6, 60, dtype=torch.float64)
"""With both signs, less than a factor of two apart, so that no threshold of usual size lies between
a number and its double."""
_ZERO, _LARGE = 1e-7, 1e4
"""What counts as zero, as what norms are clamped to, and how many times that surely does not."""
_COUNT = _ORDINARY + 2 * len(_SIZES)
_SATURATING = 1e3
"""Factor of normal numbers, at which what has bounds has reached them."""
_FORGOTTEN = frozenset({"device", "layout", "pin_memory", "memory_format"})


class NotSeparable(Exception):
    """An operation mixes the entries along a dimension, so that its labels cannot be followed."""

    def __init__(self, dim: int) -> None:
        super().__init__(f"it mixes entries along dimension {dim}")
        self.dim = dim


class Pointwise(NamedTuple):
    """How an elementwise function transforms under scales and signs.

    Attributes:
        kind: ``each`` operand has its own power; ``joint`` powers of some operands together;
            ``signs`` only; ``zero`` everywhere; ``none``.
        powers: power and parity by operand, or one pair for all; None where nothing passes.
        operands: those that must have one unit.
        has_one_unit: whether all that have powers of their own must, too, as in a distance.
        is_linear: whether sums pass.
        keeps_zero: whether it is zero where all operands with weights behind them are.
    """

    kind: str
    powers: tuple[tuple[Fraction | None, int | None], ...] = ()
    operands: tuple[int, ...] = ()
    has_one_unit: bool = False
    is_linear: bool = False
    keeps_zero: bool = False


class Along(NamedTuple):
    """How an operation of one operand maps dimensions, and which scales and signs it preserves."""

    dims: dict[int, int]
    has_scales: bool
    has_signs: bool
    is_linear: bool


def _is_value(x: Any) -> bool:
    return isinstance(x, Value)


def _filled(args: Any, numbers: Sequence[Tensor]) -> Any:
    left = iter(numbers)
    return tree_map(lambda x: next(left) if _is_value(x) else x, args, is_leaf=_is_value)


def _sizes(node: Node) -> list[Any]:
    return [a.meta["val"] for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, Node)]


# ------------------------------------------------------------ functions of single numbers
def probe_pointwise(
    node: Node, args: Any, named: dict[str, Any], values: Sequence[Value], moving: Sequence[int]
) -> Pointwise:
    """Measure powers, parities and linearity on inputs of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    named = {k: v for k, v in named.items() if k not in _FORGOTTEN}
    literals = [_literal(v) for v in values]
    numbers = [
        _numbers(size, literal, generator)
        for size, literal in zip(_sizes(node), literals, strict=True)
    ]

    def function(numbers: Sequence[Tensor]) -> Tensor:
        filled, keywords = _filled((args, named), numbers)
        result = node.target(*filled, **keywords)  # type: ignore[operator]
        return torch.view_as_real(result) if result.is_complex() else result.to(torch.float64)

    at_zero = function([torch.zeros_like(x) if k in moving else x for k, x in enumerate(numbers)])
    return _kind_of(node, values, moving, literals, _Probe(function, numbers, generator))._replace(
        keeps_zero=not bool(at_zero.any())
    )


def _kind_of(
    node: Node, values: Sequence[Value], moving: Sequence[int],
    literals: Sequence[float | None], probe: _Probe,
) -> Pointwise:  # fmt: skip
    numbers = probe.numbers
    if not bool(probe.output.any()) and node.meta["val"].dtype.is_floating_point:
        return Pointwise("zero")
    floats = {k for k in moving if not _has_no_unit(numbers[k])}
    single = [
        (probe.power({k}), probe.parity({k})) if k in floats else (None, None) for k in moving
    ]
    if any(p is not None for p, _ in single) or (
        len(moving) > 1 and any(e is not None for _, e in single)
    ):
        is_linear = single == [(1, 1)] and probe.adds(set(moving))
        shared = probe.power(floats) if not any(p is not None for p, _ in single) else None
        if shared is not None and len(floats) == len(values):
            powers = [(Fraction(0) if k else shared, e) for k, (_, e) in enumerate(single)]
            return Pointwise("each", tuple(powers), tuple(moving), has_one_unit=True)
        return Pointwise("each", tuple(single), tuple(moving), is_linear=is_linear)
    together = [
        k
        for k in range(len(values))
        if not _has_no_unit(numbers[k])
        and (literals[k] is None or (literals[k] == 0 and k not in moving))
    ]
    if together:
        power, parity = probe.power(set(together)), probe.parity(set(together))
        if power is not None:
            is_linear = power == 1 and parity == 1 and probe.adds(set(together))
            return Pointwise("joint", ((power, parity),), tuple(together), is_linear=is_linear)
        if parity is not None:
            return Pointwise("signs", ((None, parity),), tuple(together))
    return Pointwise("none")


def _literal(value: Value) -> float | None:
    numbers = value.constant
    if numbers is None or not numbers.numel() or any(value.varies):
        return None
    return float(numbers.reshape(-1)[0])


def _numbers(size: Tensor, literal: float | None, generator: Any) -> Tensor:
    if literal is not None:
        dtype = torch.float64 if size.dtype.is_floating_point else size.dtype
        return torch.full((_COUNT,), literal, dtype=dtype)
    if size.dtype == torch.bool:
        return torch.rand(_COUNT, generator=generator) > 0.5
    if size.dtype.is_complex:
        return torch.randn(_COUNT, generator=generator, dtype=torch.complex128)
    if not size.dtype.is_floating_point:
        return torch.randint(0, 5, (_COUNT,), generator=generator)
    return _of_all_sizes(generator)


def _of_all_sizes(generator: Any) -> Tensor:
    ordinary = torch.randn(_ORDINARY, generator=generator, dtype=torch.float64)
    signed = torch.cat([_SIZES, -_SIZES])
    return torch.cat([ordinary, signed[torch.randperm(len(signed), generator=generator)]])


class _Probe:
    """A function and the inputs that it is tried on."""

    def __init__(
        self,
        function: Callable[[Sequence[Tensor]], Tensor],
        numbers: list[Tensor],
        generator: Any,
        zero: float = _ZERO,
    ) -> None:
        output = function(numbers)
        if int(torch.isfinite(output).sum()) <= 8:
            numbers = [x.abs() if x.is_floating_point() else x for x in numbers]
            output = function(numbers)
        self.function, self.numbers, self.output = function, numbers, output
        self._finite, self._generator, self._zero = torch.isfinite(output), generator, zero

    def power(self, which: set[int]) -> Fraction | None:
        """Return ``k`` if scaling the operands by ``c`` scales the result by ``c ** k``.

        What a small constant is added to, as norms do, has no power, which shows near zero.
        """
        powers = {self._power_at(which, f) for f in (2.0, 3.7)}
        power = powers.pop() if len(powers) == 1 else None
        if power is None or power <= 0:
            return power
        remainder = self._changed(which, torch.zeros_like)[self._finite].abs()
        size = float(remainder.max()) if remainder.numel() else 0.0
        if not 0 < size < 1e-3:
            return power
        near = [x * 1e3 * size if k in which else x for k, x in enumerate(self.numbers)]
        near = [x[:_ORDINARY] for x in near]
        return _Probe(self.function, near, self._generator, 2 * size)._power_at(which, 2.0)

    def _power_at(self, which: set[int], factor: float) -> Fraction | None:
        scaled = self._changed(which, lambda x: x * factor)
        small, large = torch.stack([scaled.abs(), self.output.abs()]).aminmax(dim=0)
        live = self._finite & torch.isfinite(scaled) & (small > self._zero)
        if not bool(live.any()):
            return Fraction(0) if bool((scaled == self.output)[self._finite].all()) else None
        if bool(((small <= self._zero) & (large > _LARGE * self._zero))[self._finite].any()):
            return None
        ratio = (scaled / self.output)[live]
        if not bool((ratio > 0).all()) or float(ratio.max() / ratio.min()) > 1 + 1e-7:
            return None
        exponent = math.log(float(ratio[0])) / math.log(factor)
        power = Fraction(exponent).limit_denominator(6)
        return power if abs(float(power) - exponent) < 1e-6 else None

    def parity(self, which: set[int]) -> int | None:
        """Return 0 for an even function, 1 for an odd one."""
        flipped = self._changed(which, lambda x: -x)
        if int(torch.isfinite(flipped).sum()) < int(self._finite.sum()):
            return None
        for parity, sign in ((0, -1), (1, 1)):
            if _vanishes((flipped + sign * self.output)[self._finite], self.output[self._finite]):
                return parity
        return None

    def adds(self, which: set[int]) -> bool:
        """Return whether the function is additive."""
        others = [
            _of_all_sizes(self._generator) if k in which else x for k, x in enumerate(self.numbers)
        ]
        both = [
            x + y if k in which else x
            for k, (x, y) in enumerate(zip(self.numbers, others, strict=True))
        ]  # noqa: E501
        further = self.function(others)
        gap, size = self.function(both) - self.output - further, self.output.abs() + further.abs()
        return _vanishes(gap[self._finite], size[self._finite])

    def _changed(self, which: set[int], change: Callable[[Tensor], Tensor]) -> Tensor:
        return self.function([change(x) if k in which else x for k, x in enumerate(self.numbers)])


def _vanishes(numbers: Tensor, beside: Tensor) -> bool:
    """Return whether values are within the rounding error of others."""
    return bool((numbers.abs() <= 1e-9 * (1 + beside.abs())).all())


# ------------------------------------------------------------ operations along dimensions
def probe_along(
    node: Node, args: Any, named: dict[str, Any], values: Sequence[Value], moving: Sequence[int],
    dims: Sequence[int],
) -> Along:  # fmt: skip
    """Test whether an operation acts independently on every index of some dimensions.

    All operands with weights behind them are changed together. Dimensions of size one are tried
    with two entries where the operation takes them, since one entry is its own sum and its median.
    """
    generator = torch.Generator().manual_seed(1)
    numbers = [_example(v, size, generator) for v, size in zip(values, _sizes(node), strict=True)]

    def function(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        arguments = list(numbers)
        for k, x in zip(moving, inputs, strict=True):
            arguments[k] = x
        filled, keywords = _filled((args, named), arguments)
        result = node.target(*filled, **keywords)  # type: ignore[operator]
        return result if isinstance(result, tuple | list) else (result,)

    inputs = [numbers[k] for k in moving]
    y = function(inputs)
    if any(1 in x.shape for x in inputs):
        with suppress(Exception):  # it may have its sizes among its arguments
            wide = [_of_two(x, generator) for x in inputs]
            y, inputs = function(wide), wide
    large = [_SATURATING * x for x in inputs]
    tried = [(inputs, y), (large, function(large))]
    tried = [pair for pair in tried if pair is tried[0] or bool(pair[1][0].isfinite().all())]
    image: dict[int, int] = {}
    has_scales = has_signs = True
    for d in dims:
        size = inputs[0].shape[d]
        out = image[d] = _image_of(function, inputs, y, d, set(image.values()), generator)
        factors = torch.rand(size, generator=generator) + 0.5
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
        has_scales &= all(_passes(function, *pair, d, out, factors) for pair in tried)
        has_signs &= all(_passes(function, *pair, d, out, signs) for pair in tried)
        changed = [x.clone() for x in inputs]
        for x in changed:
            x.select(d, 0).add_(1.0)
        others = (function(changed)[0], y[0])
        if not _close(*(t.narrow(out, 1, size - 1) for t in others)):
            raise NotSeparable(d)
    further = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs]
    is_linear = True
    for one, result in tried:
        sums = [a + b for a, b in zip(one, further, strict=True)]
        is_linear &= _close(function(sums)[0], result[0] + function(further)[0])
    return Along(image, has_scales, has_signs, is_linear)


def _example(value: Value, size: Tensor, generator: Any) -> Tensor:
    if value.constant is not None:
        return value.constant.to(size.dtype)
    if size.dtype.is_floating_point or size.dtype.is_complex:
        return torch.randn(value.shape, generator=generator, dtype=size.dtype)
    return torch.zeros(value.shape, dtype=size.dtype)


def _of_two(x: Tensor, generator: Any) -> Tensor:
    """Return a random tensor with size 2 along each dimension of size 1."""
    shape = [2 if n == 1 else n for n in x.shape]
    return torch.randn(shape, generator=generator, dtype=x.dtype)


def _image_of(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor],
    y: Sequence[Tensor], d: int, taken: set[int], generator: Any,
) -> int:  # fmt: skip
    """Return the output dimension that is permuted along with a given input dimension."""
    size = inputs[0].shape[d]
    order = torch.randperm(size, generator=generator)
    shuffled = function([x.index_select(d, order) for x in inputs])
    fits = [
        o
        for o in range(y[0].ndim)
        if y[0].shape[o] == size
        and o not in taken
        and all(
            _close(z, t.index_select(o, order))
            for z, t in zip(shuffled, y, strict=True)
            if t.ndim > o
        )
    ]
    if not fits:
        raise NotSeparable(d)
    return d if d in fits else fits[0]


def _passes(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor],
    y: Sequence[Tensor], d: int, out: int, factors: Tensor,
) -> bool:  # fmt: skip
    before, after = [1] * inputs[0].ndim, [1] * y[0].ndim
    before[d] = after[out] = -1
    first, *others = function([(x * factors.reshape(before)).to(x.dtype) for x in inputs])
    still = (torch.equal(a, b) for a, b in zip(others, y[1:], strict=True) if _has_no_unit(a))
    return _close(first, y[0] * factors.reshape(after)) and all(still)


def _has_no_unit(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())


def _close(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return a.shape == b.shape and bool(torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5))
