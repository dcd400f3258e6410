"""How operations treat channels: a small function per family, a table from names to them.

A rule is called as ``rule(system, node, *args, **kwargs)`` with `Value`, `Weight` and `Constant` in
place of tensors. It states on ``system`` which channels are tied, which scales and signs pass, and
returns the labels of the result. What a rule does not cover it leaves by raising `Unsupported`: the
tracer then freezes everything the operation touches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import (
    meet_noise,
    multiply_labels,
    tie_permutations,
    unify,
)
from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.gains import gained
from lightning_bnn.symmetry.rules.labels import (
    Noise,
    Unsupported,
    Value,
    Weight,
    compress,
    core,
    noise_of,
    solid,
)
from lightning_bnn.symmetry.rules.reduction import REDUCTION_RULES
from lightning_bnn.symmetry.rules.shape import SHAPE_RULES

__all__ = ["RULES", "Rule", "even", "homogeneous", "nonlinear", "odd", "passthrough", "softmax"]


# ------------------------------------------------------------ element-wise, one operand
def passthrough(
    system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any
) -> Value:
    """Dropout, casts, negation: scales and signs pass."""
    return Value(system.labels(x))


def homogeneous(
    system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any
) -> Value:
    """ReLU and its kin: positive scales pass, signs do not."""
    labels = system.labels(x)
    system.freeze(labels, ("sign",))
    return Value(labels)


def odd(system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any) -> Value:
    """Tanh and its kin: signs pass, scales do not."""
    labels = system.labels(x)
    system.freeze(labels, ("scale",))
    return Value(labels)


def nonlinear(
    system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any
) -> Value:
    """GELU and its kin: only permutations pass."""
    labels = solid(system.labels(x))
    system.freeze(labels, ("scale", "sign"))
    return Value(labels)


def even(system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any) -> Value:
    """Cosine, square: a flipped input gives the same output."""
    labels = solid(system.labels(x))
    system.freeze(labels, ("scale",))
    return Value(system.follow(labels, ()))


def absolute(system: Constraints, node: Node, x: Value | Weight) -> Value:
    """Positive scales pass, and a flipped input gives the same output."""
    labels = system.labels(x)
    return Value(system.follow(labels, ("scale",)))


def power(system: Constraints, node: Node, x: Any, exponent: Any, *args: Any) -> Value:
    """Even powers forget the sign, odd ones keep it."""
    if not isinstance(exponent, int | float):
        both = [solid(system.labels(v)) for v in (x, exponent)]
        for labels in both:
            system.freeze(labels, ("scale", "sign"))
        return Value(unify(system, both))
    if exponent % 1 or exponent <= 0:
        return nonlinear(system, node, x)
    return even(system, node, x) if exponent % 2 == 0 else odd(system, node, x)


def clamp(
    system: Constraints,
    node: Node,
    x: Value | Weight,
    low: Any = None,
    high: Any = None,
    *args: Any,
) -> Value:
    """At zero it is a ReLU, symmetric it is a hard tanh, else only permutations pass."""
    if isinstance(low, Value | Weight) or isinstance(high, Value | Weight):
        raise Unsupported("bounds that are tensors")
    bounds = (low, high)
    if bounds in ((0, None), (None, 0)):
        return homogeneous(system, node, x)
    return (
        odd(system, node, x)
        if low is not None and low == -(high or 0)
        else nonlinear(system, node, x)
    )


def hardtanh(
    system: Constraints, node: Node, x: Value, low: float = -1.0, high: float = 1.0
) -> Value:
    """ReLU6 and the symmetric hard tanh."""
    return clamp(system, node, x, low, high)


def threshold(system: Constraints, node: Node, x: Value, at: float, value: float) -> Value:
    """A ReLU when both numbers are zero."""
    return homogeneous(system, node, x) if at == 0 == value else nonlinear(system, node, x)


def prelu(system: Constraints, node: Node, x: Value, weight: Weight) -> Value:
    """A leaky ReLU with a learned slope per channel."""
    system.freeze(x.labels, ("sign",))
    if weight.full_shape.numel() > 1:
        channels = system.collapse(x.labels, [1])
        system.consume(weight, Record(0, channels.numpy(), "slope", 0, 0))
    return Value(x.labels)


def cast(system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any) -> Value:
    """To another floating type everything passes, to integers permutations only."""
    passes = node.meta["val"].dtype.is_floating_point
    return passthrough(system, node, x) if passes else nonlinear(system, node, x)


def native_dropout(system: Constraints, node: Node, x: Value, *args: Any) -> Any:
    """Dropout with its mask, which belongs to no channel."""
    mask = torch.zeros((1,) * x.labels.ndim, dtype=torch.long).expand(x.labels.shape)
    return Value(x.labels), Value(mask)


# ------------------------------------------------------------ element-wise, several operands
def add(
    system: Constraints, node: Node, x: Any, y: Any, *args: Any, alpha: float = 1, **kwargs: Any
) -> Value:
    """Channels of the two operands become one; independent noise is like itself in any order."""
    if isinstance(x, Noise) or isinstance(y, Noise):
        labels = _beside_noise(system, node, x, y)
        system.freeze(labels, ("scale", "sign"))
        return Value(labels)
    return Value(unify(system, [system.labels(x), system.labels(y)]))


def multiply(system: Constraints, node: Node, x: Any, y: Any) -> Value:
    """Scales and signs add up; a parameter over all channels is a gain, free on either side."""
    if isinstance(x, Noise) or isinstance(y, Noise):
        return Value(_beside_noise(system, node, x, y))
    if isinstance(x, Weight) and not isinstance(y, Weight):
        x, y = y, x
    if isinstance(y, Weight) and isinstance(x, Value) and not y.is_buffer:
        product = gained(system, x, y)
        if product is not None:
            return product
    return Value(multiply_labels(system, system.labels(x), system.labels(y)))


def divide(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Value:
    """Scales and signs subtract."""
    if kwargs.get("rounding_mode"):
        raise Unsupported("a rounded division")
    return Value(multiply_labels(system, system.labels(x), system.labels(y), inverse=True))


def extreme(system: Constraints, node: Node, x: Any, y: Any) -> Value:
    """Element-wise maximum and minimum: one common scale passes, signs do not."""
    labels = unify(system, [system.labels(x), system.labels(y)])
    system.freeze(labels, ("sign",))
    return Value(labels)


def compare(system: Constraints, node: Node, x: Any, y: Any = 0) -> Value:
    """A comparison does not change when both sides are scaled."""
    labels = extreme(system, node, x, y).labels
    return Value(system.follow(labels, ()))


def where(system: Constraints, node: Node, condition: Any, x: Any, y: Any) -> Value:
    """A choice between two operands that share their channels."""
    chosen = add(system, node, x, y).labels
    if isinstance(condition, Noise):
        meet_noise(system, condition, chosen)
    else:
        tie_permutations(system, system.labels(condition), chosen)
    return Value(torch.broadcast_to(chosen, _shape(node)))


def masked_fill(system: Constraints, node: Node, x: Any, mask: Any, value: Any) -> Value:
    """A choice between the operand and a constant."""
    return where(system, node, mask, value, x)


def softmax(system: Constraints, node: Node, x: Value, dim: int, *args: Any) -> Value:
    """Couples the channels of a row: rows stay together."""
    small = core(solid(x.labels))
    system.freeze(small, ("scale", "sign"))
    dim %= small.ndim
    if small.shape[dim] > 1:
        system.block(
            np.unique(small.movedim(dim, -1).reshape(-1, small.shape[dim]).numpy(), axis=0)
        )
    return Value(solid(x.labels))


def alpha_dropout(
    system: Constraints, node: Node, x: Value, p: float = 0.5, train: bool = False
) -> Value:
    """In training the value of dropped units is fixed, and with it the size of all."""
    return nonlinear(system, node, x) if train and p > 0 else passthrough(system, node, x)


def bernoulli(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """Coins with one probability for all units, or each with that of its unit."""
    if any(isinstance(p, float | int) for p in args):
        return noise_of(node)
    return Value(system.follow(nonlinear(system, node, x).labels, ()))


def _beside_noise(system: Constraints, node: Node, x: Any, y: Any) -> Tensor:
    """Labels of what meets noise, in the shape of the result."""
    noise, other = (x, y) if isinstance(x, Noise) else (y, x)
    labels = torch.broadcast_to(system.labels(other), _shape(node))
    meet_noise(system, noise, labels)
    return labels


def _shape(node: Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def glu(system: Constraints, node: Node, x: Value, dim: int = -1) -> Value:
    """One half gates the other: the scale and sign of the other half pass."""
    half = x.labels.shape[dim] // 2
    gate = x.labels.narrow(dim, half, half)
    system.freeze(gate, ("scale", "sign"))
    return Value(multiply_labels(system, compress(x.labels.narrow(dim, 0, half)), compress(gate)))


_HOMOGENEOUS = "relu leaky_relu rrelu"
_ODD = (
    "tanh sin asin atan sinh asinh atanh erf tan hardshrink softshrink sign round trunc tanhshrink "
    "softsign"
)
_EVEN = "cos cosh square"
_NONLINEAR = (
    "gelu silu sigmoid hardswish hardsigmoid elu selu celu softplus exp exp2 expm1 mish relu6 "
    "log_sigmoid log log2 log10 log1p sqrt rsqrt reciprocal erfc lgamma digamma floor ceil acos "
    "logit frac nan_to_num bitwise_not logical_not isnan isinf isfinite"
)
_PASS = "dropout feature_dropout neg real positive lift_fresh"

RULES: dict[str, Rule] = {
    **SHAPE_RULES,
    **REDUCTION_RULES,
    **dict.fromkeys(_HOMOGENEOUS.split(), homogeneous),
    **dict.fromkeys(_ODD.split(), odd),
    **dict.fromkeys(_EVEN.split(), even),
    **dict.fromkeys(_NONLINEAR.split(), nonlinear),
    **dict.fromkeys(_PASS.split(), passthrough),
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), add),
    **dict.fromkeys(("mul", "multiply"), multiply),
    **dict.fromkeys(("div", "divide", "true_divide"), divide),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), extreme),
    **dict.fromkeys(("gt", "lt", "ge", "le", "eq", "ne"), compare),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(("to", "_to_copy", "type_as"), cast),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), alpha_dropout),
    "native_dropout": native_dropout,
    "bernoulli": bernoulli,
    "abs": absolute,
    "pow": power,
    "clamp": clamp,
    "clamp_min": lambda s, n, x, low: clamp(s, n, x, low, None),
    "clamp_max": lambda s, n, x, high: clamp(s, n, x, None, high),
    "hardtanh": hardtanh,
    "threshold": threshold,
    "prelu": prelu,
    "where": where,
    "masked_fill": masked_fill,
    "glu": glu,
}
"""Rule of every operation, by its name without the in-place underscore."""
