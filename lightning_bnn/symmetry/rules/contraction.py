"""Sums of products, dimensions named by letters: matrix products and einsum, of two or more."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels, unify
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.factored import (
    as_value,
    contracted,
    factored,
    is_active,
    outer_parts,
    parts_of,
    sum_of,
)
from lightning_bnn.symmetry.rules.gathered_products import contract_gathered
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Factored,
    Gathered,
    Unsupported,
    Value,
    Weight,
    compress,
    is_zero,
    moving_dims,
    shape_of,
    spread,
    zeros,
)
from lightning_bnn.symmetry.rules.lookahead import is_summed
from lightning_bnn.symmetry.rules.reduction import reduce_channels
from lightning_bnn.symmetry.rules.tensor_weights import apply_weight

__all__ = ["baddbmm", "contract", "dot", "einsum", "matmul", "ndim_of", "outer", "sum_of_products"]


def sum_of_products(
    system: Constraints, node: Node, operands: Sequence[Any], letters: Sequence[str], result: str
) -> Any:
    """An einsum of anything: activations by themselves, with one weight, or with computed ones.

    Without an activation the result is a computed weight.
    """
    if any(isinstance(x, Gathered) for x in operands):
        return contract_gathered(system, node, operands, letters, result)
    weights = [x for x in operands if isinstance(x, Weight)]
    active = any(map(is_active, operands))
    operands = [
        as_value(system, x) if _is_read_whole(x, t, weights, result) else x
        for x, t in zip(operands, letters, strict=True)
    ]
    if active and not weights and any(map(is_zero, operands)):
        return zeros(shape_of(node))
    if active and not any(isinstance(x, Factored) for x in operands):
        done = _of_activations(system, node, operands, letters, result, len(weights))
        if done is not None:
            return done
    parts = [parts_of(system, x) for x in operands]
    readers = [k for k, x in enumerate(operands) if not is_active(x) and (active or k == 0)]
    done = contracted(system, parts, letters, result, readers)
    return factored(done, shape_of(node), active)


def _is_read_whole(x: Any, letters: str, weights: Sequence[Any], result: str) -> bool:
    """Whether a weight sums over all channels of what is known by parts."""
    if not (isinstance(x, Factored) and x.active and weights):
        return False
    moving = [d for p in x.parts if bool((p != FROZEN).any()) for d in moving_dims(p)]
    return not any(letters[d] in result for d in moving)


def _of_activations(
    system: Constraints,
    node: Node,
    operands: Sequence[Any],
    letters: Sequence[str],
    result: str,
    weights: int,
) -> Any:
    """A product of activations and weights as they are; None where these must be taken apart."""
    if len(operands) > 2:
        return _in_turn(system, node, operands, letters, result)
    if not weights:
        if rows := _apart(system, operands, letters, result):
            return factored(rows, shape_of(node), active=True)
        return Value(_product(system, operands, letters, result).expand(shape_of(node)))
    try:
        return _of_one_weight(system, node, operands, letters, result)
    except Unsupported:
        return None


def _in_turn(
    system: Constraints, node: Node, operands: Sequence[Any], letters: Sequence[str], result: str
) -> Any:
    """Activations first, then weight after weight; letters are summed where last needed."""
    order = sorted(range(len(operands)), key=lambda k: isinstance(operands[k], Weight))
    at, *pending = order
    x, of_x = Value(system.labels(operands[at])), letters[at]
    while pending:
        at = next((k for k in pending if set(letters[k]) & set(of_x)), pending[0])
        pending.remove(at)
        needed = {*result, *(c for k in pending for c in letters[k])}
        kept = "".join(sorted({*of_x, *letters[at]} & needed)) if pending else result
        sizes = _sizes((x, operands[at]), (of_x, letters[at]))
        y = operands[at]
        if isinstance(y, Weight):
            (labels,) = apply_weight(system, x.labels, y, (of_x, letters[at]), kept)
        else:
            labels = _product(system, (x, y), (of_x, letters[at]), kept)
        x, of_x = Value(labels.expand([sizes[c] for c in kept])), kept
    return Value(x.labels.expand(shape_of(node)))


def _sizes(operands: Sequence[Any], letters: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for x, t in zip(operands, letters, strict=True):
        shape = x.labels.shape if isinstance(x, Value) else getattr(x, "tensor", x).shape
        for c, n in zip(t, shape, strict=True):
            sizes[c] = max(n, sizes.get(c, 1))
    return sizes


def _product(
    system: Constraints, operands: Sequence[Any], letters: Sequence[str], result: str
) -> Tensor:
    names = [*result, *sorted({c for t in letters for c in t} - set(result))]
    a, b = (spread(system.labels(o), t, names) for o, t in zip(operands, letters, strict=True))
    sizes = _sizes([Value(a), Value(b)], ("".join(names),) * 2)
    return contract(system, a, b, list(range(len(result), len(names))), [sizes[c] for c in result])


def _apart(
    system: Constraints, operands: Sequence[Any], letters: Sequence[str], result: str
) -> list[Tensor]:
    """Parts of a product of activations, none of whose channels are summed."""
    names = [*result, *sorted({c for t in letters for c in t} - set(result))]
    a, b = (spread(system.labels(o), t, names) for o, t in zip(operands, letters, strict=True))
    if max(moving_dims(a, b), default=0) >= len(result):
        return []
    kept = (slice(None),) * len(result) + (0,) * (len(names) - len(result))
    return outer_parts(system, a[kept], b[kept])


def _of_one_weight(
    system: Constraints, node: Node, operands: Sequence[Any], letters: Sequence[str], result: str
) -> Any:
    at = next(k for k, x in enumerate(operands) if isinstance(x, Weight))
    x = system.labels(operands[1 - at])

    def summed(letter: str) -> bool:
        return is_summed(node, result.index(letter))

    parts = apply_weight(system, x, operands[at], (letters[1 - at], letters[at]), result, summed)
    return factored(parts, shape_of(node), active=True)


def contract(
    system: Constraints, a: Tensor, b: Tensor, dims: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Element-wise product, then a sum: the blocks are what both operands share."""
    product = compress(multiply_labels(system, a, b, summed=dims))
    dims = [d % product.ndim for d in dims]
    moving = [d for d in moving_dims(product) if d in dims]
    if moving:
        product = reduce_channels(system, product, moving, mixes=True)
    for d in sorted(dims, reverse=True):
        product = product.select(d, 0)
    return product.expand(tuple(shape))


# ------------------------------------------------------------ the letters of an operation
def einsum(
    system: Constraints, node: Node, equation: str, operands: Sequence[Any], **kwargs: Any
) -> Any:
    """A product over named dimensions, then a sum over those that do not appear in the result."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    spare = [c for c in reversed(ascii_letters) if c not in equation]
    extra = [ndim_of(x) - len(t.replace("...", "")) for x, t in zip(operands, letters, strict=True)]
    dots = "".join(spare[: max(extra)]) if "..." in equation else ""
    letters = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(letters, extra, strict=True)]
    joined = "".join(letters)
    if not arrow:
        result = "..." + "".join(sorted(c for c in set(joined) - set(dots) if joined.count(c) == 1))
    result = result.replace("...", dots)
    if any(len(set(t)) < len(t) for t in letters):
        raise Unsupported(f"the equation {equation!r}")
    return sum_of_products(system, node, operands, letters, result)


def matmul(system: Constraints, node: Node, x: Any, y: Any) -> Any:
    """A matrix product over leading dimensions, or one with a vector."""
    sizes = [ndim_of(z) for z in (x, y)]
    lead = ascii_letters[: max(0, *(n - 2 for n in sizes))]
    first = lead[len(lead) - max(0, sizes[0] - 2) :] + ("Y" if sizes[0] == 1 else "XY")
    second = lead[len(lead) - max(0, sizes[1] - 2) :] + ("Y" if sizes[1] == 1 else "YZ")
    result = lead + ("X" if sizes[0] > 1 else "") + ("Z" if sizes[1] > 1 else "")
    return sum_of_products(system, node, (x, y), (first, second), result)


def dot(system: Constraints, node: Node, x: Any, y: Any) -> Any:
    """The inner product of two vectors."""
    return sum_of_products(system, node, (x, y), ("a", "a"), "")


def outer(system: Constraints, node: Node, x: Any, y: Any) -> Any:
    """The outer product of two vectors."""
    return sum_of_products(system, node, (x, y), ("a", "b"), "ab")


def baddbmm(
    system: Constraints, node: Node, bias: Any, x: Any, y: Any, *args: Any, **kwargs: Any
) -> Any:
    """``bias + x @ y``, both possibly scaled by numbers; a bias times zero is unread."""
    product = matmul(system, node, x, y)
    if kwargs.get("beta") == 0:
        return product
    if isinstance(product, Factored):
        return sum_of(system, shape_of(node), bias, product)
    if isinstance(bias, Factored):
        bias = as_value(system, bias, product.labels)
    return Value(unify(system, system.labels(bias), product.labels).expand(shape_of(node)))


def ndim_of(x: Any) -> int:
    """How many dimensions an operand has."""
    if isinstance(x, Value):
        return x.labels.ndim
    return len(x.tensor.shape if hasattr(x, "tensor") else x.shape)
