"""How layers with weights treat channels: linear maps, convolutions, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.labels import Unsupported, Value, Weight, along, core
from lightning_bnn.symmetry.rules.norm import norm_rules
from lightning_bnn.symmetry.rules.sequence import SEQUENCE_RULES, contract

__all__ = ["layer_rules"]


# ------------------------------------------------------------ linear maps
def linear(system: Constraints, node: Node, x: Any, weight: Any, bias: Any = None) -> Value:
    """Consumes the channels of the last dimension and makes new ones."""
    if (
        not isinstance(weight, Weight)
        or len(weight.shape) != 2
        or not isinstance(bias, Weight | None)
    ):
        raise Unsupported("a weight that is computed")
    labels = system.labels(x)
    channels = system.collapse(labels, [labels.ndim - 1])
    out = _write(system, weight, channels.numpy(), bias)
    shape = node.meta["val"].shape
    return Value(along(out, len(shape) - 1, shape))


def _write(
    system: Constraints, weight: Weight, incoming: Any, bias: Weight | None, groups: int = 1
) -> Tensor:
    """Tie the rows of a weight and bias to new channels, the columns to the incoming ones."""
    out = system.fresh(weight.shape[0])
    columns = incoming.reshape(groups, -1) if groups > 1 else incoming
    system.consume(weight, Record(0, out.numpy(), "out", 1, 1), Record(1, columns, "in", -1, 1))
    _write_bias(system, bias, out)
    return out


def _write_bias(system: Constraints, bias: Weight | None, out: Tensor) -> None:
    if bias is not None:
        system.consume(bias, Record(0, out.numpy(), "bias", 1, 1))


def addmm(
    system: Constraints, node: Node, bias: Any, x: Any, weight: Any, *args: Any, **kwargs: Any
) -> Value:
    """``bias + x @ weight``."""
    if args or kwargs or not isinstance(weight, Weight):
        raise Unsupported("a scaled addmm")
    return linear(system, node, x, _transpose(weight), bias)


def _transpose(weight: Weight) -> Weight:
    return Weight(
        weight.name, tuple(c.t() for c in weight.coords), weight.full_shape, weight.is_buffer
    )


def convolution(
    system: Constraints, node: Node, x: Any, weight: Any, bias: Any = None, *args: Any, **kw: Any
) -> Value:
    """A linear map of channels, within groups."""
    labels = _channels_first(system, x, weight)
    groups = kw.get("groups", args[3] if len(args) > 3 else 1)
    incoming = system.collapse(labels, [1]).numpy()
    out = _write(system, weight, incoming, bias, groups)
    _block_groups(system, groups, incoming, out)
    shape = node.meta["val"].shape
    return Value(along(out, 1, shape))


def transposed(
    system: Constraints, node: Node, x: Any, weight: Any, bias: Any = None, *args: Any, **kw: Any
) -> Value:
    """A transposed convolution: its rows are the incoming channels."""
    labels = _channels_first(system, x, weight)
    groups = kw.get("groups", args[3] if len(args) > 3 else 1)
    incoming = system.collapse(labels, [1]).numpy()
    out = system.fresh(weight.shape[1] * groups)
    columns = out.numpy().reshape(groups, -1) if groups > 1 else out.numpy()
    system.consume(weight, Record(1, columns, "out", 1, 1), Record(0, incoming, "in", -1, 1))
    _write_bias(system, bias, out)
    _block_groups(system, groups, incoming, out)
    return Value(along(out, 1, node.meta["val"].shape))


def _block_groups(system: Constraints, groups: int, incoming: Any, out: Tensor) -> None:
    if groups > 1:
        rows = [incoming.reshape(groups, -1), out.numpy().reshape(groups, -1)]
        system.block(np.concatenate(rows, 1))


def _channels_first(system: Constraints, x: Any, weight: Any) -> Tensor:
    labels = system.labels(x)
    if not isinstance(weight, Weight) or labels.ndim != len(weight.shape):
        raise Unsupported(
            "a convolution without a batch dimension, or with a weight that is computed"
        )
    return labels


def embedding(system: Constraints, node: Node, weight: Any, *args: Any, **kwargs: Any) -> Value:
    """New channels, one per column of the table."""
    if not isinstance(weight, Weight):
        raise Unsupported("a table that is computed")
    if args and isinstance(args[0], Value) and bool((core(args[0].labels) != 0).any()):
        raise Unsupported("indices that are computed from channels")
    out = system.fresh(weight.shape[1])
    system.consume(weight, Record(1, out.numpy(), "out", 1, 1))
    shape = node.meta["val"].shape
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
    return Value(
        contract(system, a[..., :, :, None], b[..., None, :, :], [-2], node.meta["val"].shape)
    )


def baddbmm(system: Constraints, node: Node, bias: Any, x: Any, y: Any, **kwargs: Any) -> Value:
    """``bias + x @ y``, both possibly scaled."""
    product = matmul(system, node, x, y)
    return Value(unify(system, [system.labels(bias), product.labels]))


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
    return Value(contract(system, a, b, summed, node.meta["val"].shape))


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


def layer_rules(batch_norm_mode: str) -> dict[str, Rule]:
    """Rules of all layers, for one of the two conventions about batch norm."""
    return {
        **norm_rules(batch_norm_mode),
        "linear": linear,
        "addmm": addmm,
        **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
        "einsum": einsum,
        **{f"conv{d}d": convolution for d in (1, 2, 3)},
        **{f"conv_transpose{d}d": transposed for d in (1, 2, 3)},
        "baddbmm": baddbmm,
        "embedding": embedding,
        **SEQUENCE_RULES,
    }
