"""Shape operations, executed on labels and on the coordinates of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.emptied import REASON, is_emptied, would_be_longer
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    STRUCTURAL_ZERO,
    Constant,
    Unsupported,
    Value,
    Weight,
    compress,
    core,
    is_operand,
    moving_dims,
    narrow_except,
    operation_name,
    shape_of,
)

__all__ = [
    "concatenate",
    "copy",
    "cut",
    "expand",
    "pad",
    "rearrange",
    "scatter_slice",
    "stack",
    "uniform_like",
    "view_as_complex",
    "view_as_real",
]


def pad(
    system: Constraints, node: Node, x: Value, widths: Sequence[int], *args: Any, **kwargs: Any
) -> Value:
    """Zeros added at the border are free; any other padding must not touch the channels."""
    padded = [x.labels.ndim - 1 - k // 2 for k, w in enumerate(widths) if w]
    mode = args[0] if args and isinstance(args[0], str) else "constant"
    by_value = mode == "constant" and operation_name(node) in ("pad", "constant_pad_nd")
    fill = next((a for a in (*args, kwargs.get("value")) if isinstance(a, int | float)), 0)
    if set(padded) & set(moving_dims(x.labels)):
        if not by_value:
            return Value(_mirrored(x.labels, widths, mode, operation_name(node)))
        beside = STRUCTURAL_ZERO if fill == 0 else FROZEN
        return Value(compress(torch.nn.functional.pad(x.labels, list(widths), value=beside)))
    if fill != 0:
        system.freeze(x.labels, ("scale", "sign"))
    unpadded = [d for d in range(x.labels.ndim) if d not in padded]
    return Value(narrow_except(x.labels, unpadded).expand(shape_of(node)))


def _mirrored(labels: Tensor, widths: Sequence[int], mode: str, name: str) -> Tensor:
    """Channels that stand at the border once more: labels taken from where the values are."""
    kinds = ("replicate", "circular", "reflect")
    kind = next((k for k in kinds if k == mode or k.removesuffix("e")[:7] in name), "reflect")
    for k in range(0, len(widths), 2):
        dim = labels.ndim - 1 - k // 2
        places = torch.arange(labels.shape[dim], dtype=torch.float64)[None]
        index = torch.nn.functional.pad(places, list(widths[k : k + 2]), mode=kind)[0].long()
        labels = labels.index_select(dim, index)
    return compress(labels)


def expand(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Broadcasting stays visible: dimensions of size 1 keep it, and need no tie later."""
    if not isinstance(x, Value):
        return rearrange(system, node, x, *args, **kwargs)
    return Value(x.labels[(None,) * (len(shape_of(node)) - x.labels.ndim)])


def rearrange(system: Constraints, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Any rearrangement: executed on the labels (or on the coordinates of a weight)."""
    leaves = tree_leaves((args, kwargs), is_leaf=is_operand)
    weight = next((leaf for leaf in leaves if isinstance(leaf, Weight)), None)
    if weight is None:
        result = _execute(
            node, args, kwargs, lambda v: v.labels if isinstance(v, Value) else v.tensor.cpu()
        )
        return tree_map(lambda t: Value(compress(t)), result)
    if any(isinstance(leaf, Value) for leaf in leaves):
        raise Unsupported("a weight indexed by an activation")
    results = [_execute(node, args, kwargs, _coordinate(k)) for k in range(len(weight.coords))]
    if isinstance(results[0], Tensor):
        return _view(weight, results)
    return type(results[0])(_view(weight, parts) for parts in zip(*results, strict=True))


def cut(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A slice along anything; along tokens, something must be left of it."""
    if isinstance(x, Value) and would_be_longer(node):
        dim = args[0] if args else 0
        if dim % x.labels.ndim not in moving_dims(x.labels):
            raise Unsupported(REASON)
    return rearrange(system, node, x, *args, **kwargs)


def _view(weight: Weight, coords: Sequence[Tensor]) -> Weight:
    return replace(weight, coords=tuple(compress(c) for c in coords))


def _coordinate(k: int) -> Callable[[Any], Tensor]:
    return lambda v: v.coords[k] if isinstance(v, Weight) else v.tensor.cpu()


def _execute(node: Node, args: Any, kwargs: Any, pick: Callable[[Any], Tensor]) -> Any:
    def unwrap(x: Any) -> Any:
        return pick(x) if is_operand(x) else x

    first = args[0] if not isinstance(args[0], list | tuple) else args[0][0]
    if isinstance(first, Constant):
        raise Unsupported("a constant indexed by an activation")
    for other in tree_leaves(args[1:], is_leaf=is_operand):
        if isinstance(other, Value) and operation_name(node) in ("index", "index_select"):
            raise Unsupported("an index computed from the input")
    args, kwargs = tree_map(unwrap, (args, kwargs), is_leaf=is_operand)
    target = node.target
    if operation_name(node) in ("view", "_unsafe_view", "view_copy", "_reshape_alias"):
        target, args = torch.ops.aten.reshape.default, args[:2]
    assert callable(target)
    return target(*args, **kwargs)


def concatenate(system: Constraints, node: Node, parts: Sequence[Any], dim: int = 0) -> Value:
    """The channels of the parts side by side."""
    moved = [d for p in parts if isinstance(p, Value) for d in moving_dims(p.labels)]
    if any(map(is_emptied, node.all_input_nodes)) and dim % len(shape_of(node)) not in moved:
        raise Unsupported(REASON)
    full = [t for t in (_full_labels(system, p) for p in parts) if t.numel()]
    full = _with_zeros_in_rows(system, full, dim)
    moving = {*moving_dims(*full), dim % full[0].ndim}
    joined = torch.cat([narrow_except(t, moving) for t in full], dim)
    return Value(compress(joined).expand(shape_of(node)))


def _with_zeros_in_rows(system: Constraints, parts: list[Tensor], dim: int) -> list[Tensor]:
    """Rows of zeros beside rows of channels, such as an empty key, are rows of these channels.

    Zero stays zero under all that permutes, scales, flips or mixes.
    """
    zeros = [bool((core(t) < 0).all()) for t in parts]
    row = next((t.narrow(dim, 0, 1) for t in parts if _has_rows(t, dim % t.ndim)), None)
    if row is None or not any(zeros):
        return parts
    return [row.expand(t.shape) if zero else t for t, zero in zip(parts, zeros, strict=True)]


def _has_rows(labels: Tensor, dim: int) -> bool:
    """Whether a dimension counts rows of the same channels, such as tokens."""
    if bool((core(labels) <= FROZEN).any()):
        return False
    if dim not in moving_dims(labels):
        return True
    return torch.equal(*(core(labels.narrow(dim, k, 1)) for k in range(2)))


def _full_labels(system: Constraints, x: Any) -> Tensor:
    return system.labels(x).expand(x.tensor.shape) if isinstance(x, Constant) else system.labels(x)


def stack(system: Constraints, node: Node, parts: Sequence[Any], dim: int = 0) -> Value:
    """A new dimension over the parts."""
    return Value(compress(torch.stack([_full_labels(system, p) for p in parts], dim)))


def scatter_slice(
    system: Constraints, node: Node, x: Any, source: Any, *args: Any, **kwargs: Any
) -> Value:
    """A write into a slice, executed on the labels."""
    assert callable(node.target)
    into, what = _full_labels(system, x).contiguous().clone(), _full_labels(system, source)
    return Value(compress(node.target(into, what, *args, **kwargs)))


def view_as_complex(system: Constraints, node: Node, x: Any) -> Value:
    """Pairs of channels become one that complex numbers may turn."""
    real, imaginary = (system.labels(x).select(-1, k) for k in range(2))
    system.tie(core(real), core(imaginary))
    for _ in range(2):  # a product of complex numbers turns both ways
        system.plane(real, imaginary)
    return Value(compress(real))


def view_as_real(system: Constraints, node: Node, x: Any) -> Value:
    """A complex channel becomes two that move, scale and flip together."""
    labels = system.labels(x)
    return Value(torch.stack([labels, labels], -1))


def copy(system: Constraints, node: Node, x: Any, source: Any, *args: Any) -> Value:
    """An overwrite of the whole tensor by the channels of another."""
    return Value(_full_labels(system, source).expand(shape_of(node)))


def uniform_like(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``zeros_like`` and its kin: a constant of the same shape."""
    fill = kwargs.get("fill_value", next((a for a in args if isinstance(a, int | float)), 1))
    value = 0.0 if "zero" in operation_name(node) else float(fill)
    shape = shape_of(node)
    number = torch.full((1,) * len(shape), value, dtype=node.meta["val"].dtype)
    return Constant(number.expand(shape))
