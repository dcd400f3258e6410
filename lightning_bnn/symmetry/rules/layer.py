"""How layers with weights treat channels: linear maps, convolutions, embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels, unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.labels import (
    Unsupported,
    Value,
    Weight,
    along,
    compress,
    core,
    moving_dims,
    shape_of,
)
from lightning_bnn.symmetry.rules.reduction import reduce_channels
from lightning_bnn.symmetry.rules.shifts import is_forgotten_by_softmax, rows_sum_to_one

__all__ = [
    "addmm",
    "baddbmm",
    "contract",
    "convolution",
    "einsum",
    "embedding",
    "linear",
    "matmul",
    "write",
]


# ------------------------------------------------------------ linear maps
def linear(system: Constraints, node: Node, x: Any, weight: Any, bias: Any = None) -> Value:
    """Consumes the channels of the last dimension and makes new ones."""
    is_matrix = isinstance(weight, Weight) and len(weight.shape) == 2
    if not is_matrix or not isinstance(bias, Weight | None):
        raise Unsupported("a weight that is computed")
    labels = system.labels(x)
    channels = system.collapse(labels, [labels.ndim - 1])
    out = system.fresh(weight.shape[0])
    write(system, out, channels, weight, bias)
    return Value(along(out, labels.ndim - 1, shape_of(node)))


def write(
    system: Constraints,
    out: Tensor,
    incoming: Tensor,
    weight: Weight,
    bias: Weight | None,
    out_dim: int = 0,
) -> None:
    """A weight and a bias write channels; the other dimension of the weight reads the incoming."""
    system.consume(weight, Record(out_dim, out, "out"), Record(1 - out_dim, incoming, "in", -1))
    system.shifts.read(weight, bias, incoming)
    if bias is not None:
        system.consume(bias, Record(0, out.reshape(-1), "bias"))


def addmm(
    system: Constraints, node: Node, bias: Any, x: Any, weight: Any, *args: Any, **kwargs: Any
) -> Value:
    """A linear map whose weight stands on the right: ``bias + x @ weight``."""
    if args or kwargs or not isinstance(weight, Weight):
        raise Unsupported("a scaled addmm")
    return linear(system, node, x, _transpose(weight), bias)


def _transpose(weight: Weight) -> Weight:
    return replace(weight, coords=tuple(c.t() for c in weight.coords))


def convolution(transposed: bool = False) -> Rule:
    """A linear map of channels, within groups; the rows of a transposed one read its input."""

    def rule(
        system: Constraints,
        node: Node,
        x: Any,
        weight: Any,
        bias: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Value:
        labels = system.labels(x)
        if not isinstance(weight, Weight) or labels.ndim != len(weight.shape):
            raise Unsupported(
                "a convolution without a batch dimension, or with a weight that is computed"
            )
        groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
        incoming, out = system.collapse(labels, [1]), system.fresh(shape_of(node)[1])
        if transposed or _pads(args, kwargs):  # zeros at the border are not shifted
            system.shifts.stop(incoming)
        inside = [t.reshape(groups, -1) for t in (incoming, out)]
        if transposed:
            write(system, inside[1], incoming, weight, bias, out_dim=1)
        else:
            write(system, out, inside[0], weight, bias)
        if groups > 1:
            system.block(torch.cat(inside, 1))
        return Value(along(out, 1, shape_of(node)))

    return rule


def _pads(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    padding = kwargs.get("padding", args[1] if len(args) > 1 else 0)
    return padding not in (0, "valid") and any(padding)


def embedding(system: Constraints, node: Node, weight: Any, *args: Any, **kwargs: Any) -> Value:
    """New channels, one per column of the table."""
    if not isinstance(weight, Weight):
        raise Unsupported("a table that is computed")
    if args and isinstance(args[0], Value) and bool((core(args[0].labels) != 0).any()):
        raise Unsupported("indices that are computed from channels")
    out = system.fresh(weight.shape[1])
    system.consume(weight, Record(1, out, "out"))
    system.shifts.tables.add(weight.name)
    shape = shape_of(node)
    return Value(along(out, len(shape) - 1, shape))


def matmul(system: Constraints, node: Node, x: Any, y: Any) -> Value:
    """A linear map when one operand is a weight, else products summed over the shared dimension."""
    if isinstance(y, Weight) and len(y.shape) == 2:
        return linear(system, node, x, _transpose(y))
    if isinstance(x, Weight) or isinstance(y, Weight):
        raise Unsupported("a product with a weight that is not a matrix on the right")
    a, b = system.labels(x), system.labels(y)
    if min(a.ndim, b.ndim) < 2:
        raise Unsupported("a product with a vector")
    out = contract(system, a[..., :, :, None], b[..., None, :, :], [-2], shape_of(node))
    _shift_product(system, node, a, b, out)
    return Value(out)


def _shift_product(system: Constraints, node: Node, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Averages of rows are shifted like the rows; a shift of keys is forgotten by the softmax."""
    averages = rows_sum_to_one(node.args[0])
    tokens = b.ndim - (2 if averages else 1)
    system.shifts.stop(a)
    if averages:
        system.shifts.tie(out, b.narrow(-2, 0, 1))
    else:
        system.shifts.stop(out)
    if tokens in moving_dims(b) or not (averages or is_forgotten_by_softmax(node)):
        system.shifts.stop(b)


def baddbmm(system: Constraints, node: Node, bias: Any, x: Any, y: Any, **kwargs: Any) -> Value:
    """``bias + x @ y``, both possibly scaled."""
    product = matmul(system, node, x, y)
    return Value(unify(system, system.labels(bias), product.labels))


def einsum(
    system: Constraints, node: Node, equation: str, operands: Sequence[Any], **kwargs: Any
) -> Value:
    """A product over named dimensions, then a sum over those that do not appear in the result."""
    terms, _, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if (
        "." in equation
        or len(operands) != 2
        or not result
        or any(len(set(t)) < len(t) for t in letters)
    ):
        raise Unsupported(f"the equation {equation!r}")
    if isinstance(operands[1], Weight):
        return _einsum_linear(system, node, letters, result, operands)
    if any(isinstance(o, Weight) for o in operands):
        raise Unsupported("a weight on the left")
    names = [*result, *sorted({c for t in letters for c in t} - set(result))]
    a, b = (_spread(system.labels(o), t, names) for o, t in zip(operands, letters, strict=True))
    summed = list(range(len(result), len(names)))
    return Value(contract(system, a, b, summed, shape_of(node)))


def _spread(labels: Tensor, letters: str, names: Sequence[str]) -> Tensor:
    order = [letters.index(c) for c in names if c in letters]
    moved = labels.permute(order)
    for d, name in enumerate(names):
        if name not in letters:
            moved = moved.unsqueeze(d)
    return moved


def _einsum_linear(
    system: Constraints, node: Node, letters: Sequence[str], result: str, operands: Sequence[Any]
) -> Value:
    x, w = letters
    shared = [c for c in w if c in x and c not in result]
    if len(w) != 2 or len(shared) != 1:
        raise Unsupported("a weight with more than two dimensions")
    (inner,) = shared
    (outer,) = [c for c in w if c != inner]
    if (
        outer in x
        or result.replace(outer, "") != x.replace(inner, "")
        or not result.endswith(outer)
    ):
        raise Unsupported("a weight that is not a linear map of the last dimension")
    weight = operands[1] if w[0] == outer else _transpose(operands[1])
    labels = system.labels(operands[0]).movedim(x.index(inner), -1)
    return linear(system, node, Value(labels), weight)


def contract(
    system: Constraints, a: Tensor, b: Tensor, dims: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Element-wise product, then a sum: the blocks are what both operands share."""
    product = compress(multiply_labels(system, a, b, summed=dims))
    dims = [d % product.ndim for d in dims]
    moving = [d for d in moving_dims(product) if d in dims]
    if moving:
        product = reduce_channels(system, product, moving)
    for d in sorted(dims, reverse=True):
        product = product.select(d, 0)
    return product.expand(tuple(shape))
