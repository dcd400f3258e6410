"""Weights computed from other weights: low-rank updates, norms, products, and layers that use them.

What is computed is a `Factored` operand: rows and columns keep labels of their own until a layer
reads them. ``y = F.linear(x, W + B @ A)`` ties what ``x @ W.T + x @ A.T @ B.T`` would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.rules import elementwise
from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.factored import factored, is_active, like, parts_of, sum_of
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Constant,
    Factored,
    Squares,
    Unsupported,
    Value,
    Weight,
    core,
    is_operand,
    is_zero,
    moving_dims,
    narrow_except,
    operation_name,
    shape_of,
    zeros,
)
from lightning_bnn.symmetry.rules.lookahead import is_square, sums_next
from lightning_bnn.symmetry.rules.parts import aligned, apart, joined, merged, product
from lightning_bnn.symmetry.rules.reduction import reduce_channels
from lightning_bnn.symmetry.rules.shape import rearrange

__all__ = [
    "add",
    "batch_norm",
    "divide",
    "each_part",
    "multiply",
    "norm",
    "reduction",
    "reshape",
    "running_sum",
    "softmax",
    "weight_norm",
]


# ------------------------------------------------------------ element by element
def multiply(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Any:
    """Rows times rows, columns times columns; a weight times itself forgets its sign."""
    if len(node.args) > 1 and node.args[0] is node.args[1]:
        return each_part(elementwise.squares)(system, node, x)
    shape = shape_of(node)
    active = is_active(x) or is_active(y)
    if active and (is_zero(x) or is_zero(y)):
        return zeros(shape)
    for mask, weight in ((x, y), (y, x)):
        if isinstance(mask, Constant):
            parts = aligned(parts_of(system, weight), len(shape))
            _keep_equal(system, parts, torch.broadcast_to(mask.tensor, shape))
            return like(parts, shape, x, y)
    first, second = (aligned(parts_of(system, z), len(shape)) for z in (x, y))
    summed = sums_next(node) if active else ()
    return like(product(system, first, second, active, summed=summed), shape, x, y)


def _keep_equal(system: Constraints, parts: Sequence[Tensor], mask: Tensor) -> None:
    """Only rows (and columns) that a constant multiplies by the same numbers are exchangeable."""
    varying = moving_dims(mask)
    for part in parts:
        dims = moving_dims(part)
        if not set(dims) & set(varying):
            continue
        rows = narrow_except(mask, [*dims, *varying]).detach().cpu()
        rows = rows.movedim(dims, list(range(len(dims)))).reshape(part.numel(), -1)
        kinds = np.unique(rows.numpy(), axis=0, return_inverse=True)[1].reshape(-1)
        if kinds.max():
            system.mark(part, "diagonal")
            for kind in range(int(kinds.max()) + 1):
                system.seen.append(np.unique(part.reshape(-1).numpy()[kinds == kind]))


def divide(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Any:
    """Rows over rows, columns over columns."""
    if kwargs.get("rounding_mode"):
        raise Unsupported("a rounded division")
    shape, active = shape_of(node), is_active(x) or is_active(y)
    above, below = (aligned(parts_of(system, z), len(shape)) for z in (x, y))
    return like(product(system, above, below, active, inverse=True), shape, x, y)


def add(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Any:
    """A sum of weights ties rows with rows and columns with columns."""
    return sum_of(system, shape_of(node), x, y)


def each_part(rule: Rule) -> Rule:
    """A function of every element by itself, asked of each part."""

    def on_each(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
        if any(is_operand(a) for a in tree_leaves((args, kwargs), is_leaf=is_operand)):
            raise Unsupported("a function of a computed weight and another tensor")
        parts = parts_of(system, x)
        done = [rule(system, node, Value(p), *args, **kwargs) for p in parts]
        for part in done:
            if isinstance(part, Squares) and not sums_next(node):
                system.mark(part.labels, "diagonal")
        return like([part.labels for part in done], shape_of(node), x)

    return on_each


softmax = each_part(elementwise.nonlinear)


# ------------------------------------------------------------ reductions
def _dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(ndim))
    return sorted({d % ndim for d in (dim if isinstance(dim, Sequence) else [dim])})


def _reduced(
    system: Constraints,
    node: Node,
    x: Any,
    dim: Any,
    outer: Callable[[Tensor], Tensor],
    sign: Literal["passes", "is forgotten"] = "passes",
) -> Any:
    """What is reduced keeps its permutations only; ``outer`` says what becomes of the rest."""
    shape = x.shape if isinstance(x, Weight | Factored) else x.tensor.shape
    dims, result = _dims(dim, len(shape)), []
    for part in parts_of(system, x):
        inside = [d for d in moving_dims(part) if d in dims]
        if inside:
            _mark_reduced(system, node, part, is_active(x))
            part = core(reduce_channels(system, part, inside, sign))
        if moving_dims(part) or is_active(x):
            result.append(outer(part))
        else:
            system.freeze(part, ("scale", "sign"))
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    if first.ndim < len(shape):
        result = [p.squeeze(dims) for p in result]
    if isinstance(value, tuple | list):
        return tuple(like(result, v.shape, x) for v in value)
    return like(result, value.shape, x)


def _mark_reduced(system: Constraints, node: Node, part: Tensor, active: bool) -> None:
    """A row turns where its squares are summed; what else leaves a sum alone, no rule says."""
    name = operation_name(node)
    if name in ("norm", "linalg_vector_norm"):
        system.mark(part, "orthogonal" if node.args[1:2] in ((), (2,)) else "diagonal")
    elif name in ("sum", "mean") and is_square(node.args[0]):
        system.mark(part, "orthogonal")
    elif active or name in ("amax", "amin"):
        system.mark(part, "diagonal")
    else:
        system.hold(part, "a sum or a variance over rows or columns of a weight")


def reduction(
    system: Constraints, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **kw: Any
) -> Any:
    """A sum or a mean over some dimensions of a computed weight."""
    return _reduced(system, node, x, dim, lambda part: part)


def running_sum(system: Constraints, node: Node, x: Any, dim: int, **kwargs: Any) -> Any:
    """Running sums along a dimension in which nothing moves, such as tokens."""
    parts = parts_of(system, x)
    if any(dim % len(x.shape) in moving_dims(p) and bool((p != FROZEN).any()) for p in parts):
        raise Unsupported("a running sum over channels")
    return like(parts, shape_of(node), x)


def norm(
    system: Constraints, node: Node, x: Any, *args: Any, dim: Any = None, **kwargs: Any
) -> Any:
    """A norm, a variance or an extreme: what is inside is not scaled, and rows of norms only."""
    is_norm = "norm" in operation_name(node)
    numbers = args[1:] if is_norm else args
    if dim is None and numbers and not isinstance(numbers[0], bool):
        dim = numbers[0]
    for part in parts_of(system, x):
        inside = set(moving_dims(part)) & set(_dims(dim, len(x.shape)))
        if inside or not is_norm:
            system.freeze(part, ("scale",) if is_norm else ("scale", "sign"))
    sign: Literal["passes", "is forgotten"] = "is forgotten" if is_norm else "passes"
    passing = ("scale",) if is_norm else ()
    return _reduced(system, node, x, dim, lambda part: core(system.follow(part, passing)), sign)


# ------------------------------------------------------------ shape
def reshape(system: Constraints, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Any rearrangement, executed on the labels of every part."""
    x, value = args[0], node.meta["val"]

    def moved(part: Tensor) -> Any:
        labels = Value(part.expand(x.shape))
        return rearrange(system, node, labels, *_plain(args[1:]), **kwargs)

    results = [moved(part) for part in x.parts]
    if isinstance(value, tuple | list):
        return tuple(like([r[k].labels for r in results], v.shape, x) for k, v in enumerate(value))
    if not x.active:
        return factored(apart(system, [r.labels for r in results]), value.shape)
    whole = joined(system, x.parts, [moving_dims(r.labels) for r in results])
    return factored([moved(part).labels for part in whole.values()], value.shape, active=True)


def _plain(args: Any) -> Any:
    """Arguments of which only the shape counts."""

    def plain(x: Any) -> Any:
        is_weight = isinstance(x, Factored | Weight)
        return Value(torch.zeros(()).long().expand(x.shape)) if is_weight else x

    return tree_map(plain, args, is_leaf=is_operand)


# ------------------------------------------------------------ normalisations
def weight_norm(system: Constraints, node: Node, v: Any, g: Any, dim: int = 0) -> Any:
    """``g * v / ||v||``: the gain has the scale, rows of v one without effect, both the sign.

    The norm of all of v (``dim`` is -1) leaves one scale without effect.
    """
    parts: list[Tensor] = []
    for part in parts_of(system, v):
        if moving_dims(part) == [dim]:
            part = core(system.follow(part, ("sign",)))
        elif dim >= 0 or parts:
            system.freeze(part, ("scale",))
            system.mark(part, "orthogonal")
        else:
            system.tie(part, part.reshape(-1)[0], ("scale",))
            system.mark(part, "orthogonal")
            part = core(system.follow(part, ("sign",)))
        parts.append(part)
    parts = merged(system, [*parts, *parts_of(system, g)])
    value = node.meta["val"]
    if isinstance(value, tuple | list):
        return factored(parts, value[0].shape), factored([], value[1].shape)
    return factored(parts, value.shape)


def batch_norm(
    system: Constraints, node: Node, x: Any, gain: Any, bias: Any, mean: Any, *args: Any, **kw: Any
) -> Any:
    """Filters as channels of one example, each standardised by itself, times their gains."""
    if bias is not None or mean is not None:
        raise Unsupported("a weight that is normalised by statistics, or shifted")
    parts = parts_of(system, x)
    for part in parts:
        system.freeze(part, ("scale", "sign"))
        system.mark(part, "diagonal")
    shape = shape_of(node)
    gains = [p.reshape(-1, *(1,) * (len(shape) - 2)) for p in parts_of(system, gain)]
    return like(merged(system, [*parts, *aligned(gains, len(shape))]), shape, x)
