"""How element-wise operations of one operand treat scales and signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels, unify
from lightning_bnn.symmetry.rules.chosen import cast_index
from lightning_bnn.symmetry.rules.constraints import Constraints, Kind, Product, Record, Rule
from lightning_bnn.symmetry.rules.labels import (
    Chosen,
    Constant,
    Squares,
    Value,
    Weight,
    compress,
    core,
    noise_of,
    operation_name,
    shape_of,
    solid,
    with_fixed_rest,
)

__all__ = [
    "absolute",
    "alpha_dropout",
    "bernoulli",
    "cast",
    "clamp",
    "clamp_max",
    "dropout",
    "even",
    "glu",
    "hardtanh",
    "homogeneous",
    "inverse_root",
    "native_dropout",
    "nonlinear",
    "odd",
    "passthrough",
    "power",
    "prelu",
    "root",
    "squares",
    "threshold",
]

NEVER_REACHED = 1e-6
"""Bounds up to it keep a norm that is divided by from zero."""


def pointwise(
    stops: Sequence[Kind] = (),
    forgets: Sequence[Kind] = (),
    keeps_zero: bool = True,
    mixes: bool = False,
) -> Rule:
    """A function of every element by itself: permutations pass, and scales and signs if they may.

    Args:
        stops: what the function does not commute with, so that it is held fixed.
        forgets: what does not change the result.
        keeps_zero: whether the function of zero is zero.
        mixes: whether the function is linear, so that channels may be mixed before it.
    """
    passing = [kind for kind in ("scale", "sign") if kind not in (*stops, *forgets)]

    def rule(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Value:
        labels = system.labels(x) if keeps_zero else solid(system.labels(x))
        system.freeze(labels, stops)
        if not mixes:
            system.mark(labels, "diagonal")
        return Value(system.follow(labels, passing) if forgets else labels)

    return rule


passthrough = pointwise(mixes=True)  # casts, negation
homogeneous = pointwise(stops=["sign"])  # ReLU and its kin
odd = pointwise(stops=["scale"])  # tanh and its kin
nonlinear = pointwise(stops=["scale", "sign"], keeps_zero=False)  # GELU and its kin
even = pointwise(stops=["scale"], forgets=["sign"], keeps_zero=False)  # cosine, square
absolute = pointwise(forgets=["sign"])


def power(system: Constraints, node: Node, x: Any, exponent: Any, *args: Any) -> Value:
    """Even powers forget the sign, odd ones keep it."""
    if not isinstance(exponent, int | float):
        both = [nonlinear(system, node, v).labels for v in (x, exponent)]
        return Value(unify(system, *both))
    if exponent in (0.5, -0.5):
        return root(system, node, x, inverse=exponent < 0)
    if exponent % 1 or exponent <= 0:
        return nonlinear(system, node, x)
    if exponent == 2 and isinstance(x, Value):
        return squares(system, node, x)
    return even(system, node, x) if exponent % 2 == 0 else odd(system, node, x)


def squares(system: Constraints, node: Node, x: Any) -> Squares:
    """Squares forget signs; summed over a row they forget its rotations, too."""
    labels = solid(system.labels(x))
    out = _without_sign(system, core(labels))
    _square(system, core(labels), out)
    return Squares(out.expand(labels.shape))


def root(system: Constraints, node: Node, x: Any, inverse: bool = False) -> Value:
    """A square root: half of the log scale passes. Of one over it, the same with minus."""
    labels = solid(system.labels(x))
    system.freeze(labels, ("sign",))
    system.mark(labels, "diagonal")
    out = _without_sign(system, core(labels))
    _square(system, out, core(labels))
    if inverse:
        above = out
        out = _without_sign(system, above)
        system.tie(out, above, ("inverse scale",))
    return Value(out.expand(labels.shape))


def inverse_root(system: Constraints, node: Node, x: Any) -> Value:
    """One over a square root."""
    return root(system, node, x, inverse=True)


def _without_sign(system: Constraints, small: Tensor) -> Tensor:
    """New channels that move with the old ones, positive whatever the sign of those."""
    out = system.fresh(*small.shape)
    system.tie(out, small, ("permutation",))
    system.freeze(out, ("sign",))
    return out


def _square(system: Constraints, x: Tensor, out: Tensor) -> None:
    """The log scale of one is twice that of the other."""
    once, twice = x.numpy().ravel(), out.numpy().ravel()
    system.products.append(Product(twice, once, once, False, has_signs=False))


def dropout(
    system: Constraints, node: Node, x: Any, p: float = 0.5, train: bool = True, *args: Any
) -> Value:
    """In training every channel is dropped by itself: everything passes, but nothing mixes."""
    labels = system.labels(x)
    if train and p > 0:
        system.mark(labels, "diagonal")
    return Value(labels)


def clamp(
    system: Constraints, node: Node, x: Value | Weight, low: Any = None, high: Any = None
) -> Value:
    """At zero it is a ReLU, symmetric it is a hard tanh, else only permutations pass.

    Bounds that are tensors move, and are scaled, with the channels. The tiny number that keeps a
    norm from zero is never reached.
    """
    if high is None and isinstance(low, float) and 0 < low <= NEVER_REACHED and _is_norm(node):
        return passthrough(system, node, x)
    bounds = [bound for bound in (low, high) if isinstance(bound, Value | Weight | Constant)]
    if bounds:
        return Value(unify(system, *(homogeneous(system, node, v).labels for v in (x, *bounds))))
    if (low, high) in ((0, None), (None, 0)):
        return homogeneous(system, node, x)
    symmetric = low is not None and low == -(high or 0)
    return odd(system, node, x) if symmetric else nonlinear(system, node, x)


def _is_norm(node: Node) -> bool:
    source = node.args[0]
    return (
        isinstance(source, Node)
        and source.op == "call_function"
        and "norm" in operation_name(source)
    )


def clamp_max(system: Constraints, node: Node, x: Value | Weight, high: Any) -> Value:
    """A bound from above only, see `clamp`."""
    return clamp(system, node, x, None, high)


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
        system.consume(weight, Record(0, channels, "slope", 0, 0))
    return Value(x.labels)


def cast(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """To another floating type everything passes, to integers permutations only."""
    if isinstance(x, Chosen):
        return cast_index(node, x)
    passes = node.meta["val"].dtype.is_floating_point
    return passthrough(system, node, x) if passes else nonlinear(system, node, x)


def native_dropout(system: Constraints, node: Node, x: Value, *args: Any) -> Any:
    """Dropout with its mask, which belongs to no channel."""
    return with_fixed_rest(node, x.labels)


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


def glu(system: Constraints, node: Node, x: Value, dim: int = -1) -> Value:
    """One half gates the other: the scale and sign of the other half pass."""
    half = shape_of(node)[dim]
    gate = x.labels.narrow(dim, half, half)
    system.freeze(gate, ("scale", "sign"))
    return Value(multiply_labels(system, compress(x.labels.narrow(dim, 0, half)), compress(gate)))
