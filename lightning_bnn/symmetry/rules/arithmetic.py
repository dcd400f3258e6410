"""How element-wise operations of several operands treat channels: sums, products, choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import (
    align,
    multiply_labels,
    tie_to_choice,
    tie_to_noise,
    unify,
)
from lightning_bnn.symmetry.rules.chosen import compare_index, extreme_with_index
from lightning_bnn.symmetry.rules.constraints import Constraints, Record
from lightning_bnn.symmetry.rules.elementwise import homogeneous, nonlinear
from lightning_bnn.symmetry.rules.factored import as_value, factored, outer_parts
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Chosen,
    Factored,
    Noise,
    Products,
    Turned,
    Unsupported,
    Value,
    Weight,
    core,
    is_operand,
    is_zero,
    moving_dims,
    operation_name,
    shape_of,
    solid,
    zeros,
)
from lightning_bnn.symmetry.rules.lookahead import divides, sums_next

__all__ = [
    "add",
    "add_product",
    "add_quotient",
    "combine",
    "compare",
    "divide",
    "extreme",
    "lerp",
    "masked_fill",
    "multiply",
    "softmax",
    "where",
]


def add(
    system: Constraints, node: Node, x: Any, y: Any, *args: Any, alpha: float = 1, **kwargs: Any
) -> Value:
    """Channels of the two operands become one; independent noise is like itself in any order."""
    if isinstance(x, Noise) or isinstance(y, Noise):
        labels = _beside_noise(system, node, x, y)
        system.freeze(labels, ("scale", "sign"))
        return Value(labels)
    written = _written_by_vector(system, node, x, y, alpha)
    if written is not None:
        return written
    if isinstance(x, Turned) and isinstance(y, Turned):
        system.plane(x.labels, y.labels)
    return Value(unify(system, system.labels(x), system.labels(y)))


def _written_by_vector(
    system: Constraints, node: Node, x: Any, y: Any, alpha: int | float
) -> Value | None:
    """Channels plus a vector of the state, which writes them as the bias of a layer does."""
    if isinstance(x, Weight):
        x, y = y, x
    is_plain = operation_name(node).removesuffix("_") == "add" and alpha == 1
    if not is_plain or not isinstance(x, Value) or not isinstance(y, Weight):
        return None
    if y.is_buffer or len(y.full_shape) != 1 or y.full_shape[0] < 2:
        return None
    before, bias = align(x.labels, system.labels(y))
    channels = core(before)
    if moving_dims(before) != moving_dims(bias) or channels.numel() != y.full_shape[0]:
        return None
    if bool((channels <= FROZEN).any()):
        return None
    unify(system, before, bias)
    return Value(bias.expand(torch.broadcast_shapes(before.shape, bias.shape)))


def multiply(system: Constraints, node: Node, x: Any, y: Any) -> Any:
    """Scales and signs add up; a parameter over all channels is a gain, free on either side.

    Operands with channels along dimensions of their own make an outer product.
    """
    return _multiplied(system, node, (x, y), node.args[:2], sums_next(node))


def _multiplied(
    system: Constraints,
    node: Node,
    operands: tuple[Any, Any],
    nodes: Sequence[Any],
    summed: Sequence[int],
) -> Any:
    """The product of two operands, that of some nodes, over dimensions that are summed next."""
    (x, y), (_, factor) = operands, nodes
    if isinstance(x, Noise) or isinstance(y, Noise):
        return Value(_beside_noise(system, node, x, y))
    if is_zero(x) or is_zero(y):
        return zeros(shape_of(node))
    if isinstance(x, Weight) and not isinstance(y, Weight):
        x, y, factor = y, x, nodes[0]
    is_gain = isinstance(y, Weight) and not y.is_buffer and not divides(factor)
    if is_gain and isinstance(x, Value):
        product = _multiply_by_gain(system, x, y)
        if product is not None:
            return product
    left, right = align(system.labels(x), system.labels(y))
    if type(x) is Value and type(y) is Value and (parts := outer_parts(system, left, right)):
        return factored(parts, shape_of(node), active=True)
    labels = multiply_labels(system, left, right, summed=summed)
    if any(bool((core(t) <= 0).all()) for t in (left, right)):
        return Turned(labels)  # by numbers
    return Products(labels) if summed else Value(labels)


def _multiply_by_gain(system: Constraints, x: Value, weight: Weight) -> Value | None:
    """The product with a parameter that has one number for every channel; None where it has not."""
    labels, gain = align(x.labels, torch.zeros(()).expand(weight.shape))
    moving, small = moving_dims(labels), core(labels)
    if (
        not moving
        or any((n == 1) == (d in moving) for d, n in enumerate(gain.shape))
        or bool((small <= 0).any())
    ):
        return None
    dim = None
    if len(weight.full_shape) == 1:
        dim, weight = 0, replace(weight, coords=(core(weight.coords[0]).reshape(-1),))
    elif len(moving) == 1:
        dim = moving[0] - (labels.ndim - len(weight.shape))
    elif not _is_whole(weight):
        raise Unsupported("a view of a gain over several dimensions")
    out = system.fresh(*small.shape)
    system.tie(out, small, ("permutation",))
    system.mark(small, "diagonal")
    system.consume(
        weight,
        Record(dim, out.reshape(-1), "gain"),
        Record(dim, small.reshape(-1), "gain in", -1),
    )
    return Value(out.expand(labels.shape))


def _is_whole(weight: Weight) -> bool:
    in_order = all(set(moving_dims(c)) <= {k} for k, c in enumerate(weight.coords))
    return weight.shape == weight.full_shape and in_order


def divide(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Value:
    """Log scales and signs of the second operand are taken from those of the first."""
    if kwargs.get("rounding_mode"):
        raise Unsupported("a rounded division")
    return Value(multiply_labels(system, system.labels(x), system.labels(y), inverse=True))


def extreme(system: Constraints, node: Node, x: Any, y: Any) -> Value:
    """Element-wise maximum and minimum: one common scale passes, signs do not."""
    return homogeneous(system, node, Value(unify(system, system.labels(x), system.labels(y))))


def largest(
    system: Constraints, node: Node, x: Any, other: Any = None, *args: Any, **kw: Any
) -> Any:
    """``max(other)``, element by element, or ``max(dim)``."""
    if is_operand(other):
        return extreme(system, node, x, other)
    return extreme_with_index(system, node, x, other, *args, **kw)


def compare(system: Constraints, node: Node, x: Any, y: Any = 0) -> Value:
    """A comparison does not change when both sides are scaled."""
    if isinstance(x, Chosen) or isinstance(y, Chosen):
        return compare_index(system, node, x, y)
    return Value(system.follow(extreme(system, node, x, y).labels, ()))


def where(system: Constraints, node: Node, condition: Any, x: Any, y: Any) -> Value:
    """A choice between two operands that share their channels."""
    chosen = add(system, node, x, y).labels
    if isinstance(condition, Noise):
        _mark_beside(system, condition, chosen)
        tie_to_noise(system, condition, chosen)
    else:
        tie_to_choice(system, system.labels(condition), chosen)
    return Value(torch.broadcast_to(chosen, shape_of(node)))


def add_product(
    system: Constraints, node: Node, x: Any, a: Any, b: Any, value: float = 1, **kwargs: Any
) -> Value:
    """``x + a * b``."""
    product = _multiplied(system, node, (a, b), node.args[1:3], [])
    if isinstance(product, Factored):
        product = as_value(system, product)
    return Value(unify(system, system.labels(x), product.labels))


def add_quotient(
    system: Constraints, node: Node, x: Any, a: Any, b: Any, value: float = 1, **kwargs: Any
) -> Value:
    """``x + a / b``."""
    return Value(unify(system, system.labels(x), divide(system, node, a, b).labels))


def lerp(system: Constraints, node: Node, x: Any, y: Any, weight: Any) -> Value:
    """A mean of two operands; a weight that differs between channels moves with them."""
    labels = unify(system, system.labels(x), system.labels(y))
    if isinstance(weight, int | float):
        return Value(labels)
    share = system.labels(weight)
    system.freeze(share, ("scale", "sign"))
    mean = multiply_labels(system, solid(labels), solid(share))
    return Value(mean)


def combine(system: Constraints, node: Node, x: Any, y: Any, *args: Any, **kwargs: Any) -> Value:
    """Any function of two numbers: only permutations pass."""
    both = [nonlinear(system, node, v).labels for v in (x, y)]
    return Value(unify(system, *both))


def masked_fill(system: Constraints, node: Node, x: Any, mask: Any, value: Any) -> Value:
    """A choice between the operand and a constant."""
    return where(system, node, mask, value, x)


def softmax(system: Constraints, node: Node, x: Value, dim: int, *args: Any) -> Value:
    """Couples the channels of a row: rows stay together."""
    coupled = nonlinear(system, node, x)
    small = core(coupled.labels)
    dim %= small.ndim
    if small.shape[dim] > 1:
        rows = small.movedim(dim, -1).reshape(-1, small.shape[dim])
        system.block(np.unique(rows.numpy(), axis=0))
    return coupled


def _mark_beside(system: Constraints, noise: Noise, labels: Tensor) -> None:
    """Channels mix beside a draw that is the same for all of them, such as one for each example."""
    _, draws = align(labels, noise.labels)
    if any(draws.shape[d] > 1 for d in moving_dims(labels)):
        system.mark(labels, "diagonal")


def _beside_noise(system: Constraints, node: Node, x: Any, y: Any) -> Tensor:
    """Labels of what is combined with noise, in the shape of the result."""
    noise, other = (x, y) if isinstance(x, Noise) else (y, x)
    labels = torch.broadcast_to(system.labels(other), shape_of(node))
    _mark_beside(system, noise, labels)
    tie_to_noise(system, noise, labels)
    return labels
