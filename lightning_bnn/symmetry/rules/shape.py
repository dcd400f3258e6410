"""Shape operations, executed on labels and on the coordinates of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.discovery.export import operation_name
from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    STRUCTURAL_ZERO,
    Constant,
    Unsupported,
    Value,
    Weight,
    compress,
    is_operand,
    varies,
)

__all__ = ["SHAPE_RULES"]


_UNIFORM = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full zero"
_PADDING = "pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad2d"


def pad(
    system: Constraints, node: Node, x: Value, widths: Sequence[int], *args: Any, **kwargs: Any
) -> Value:
    """Zeros added at the border are free; any other padding must not touch the channels."""
    padded = [x.labels.ndim - 1 - k // 2 for k, w in enumerate(widths) if w]
    mode = args[0] if args and isinstance(args[0], str) else "constant"
    fill = next((a for a in (*args, kwargs.get("value")) if isinstance(a, int | float)), 0)
    if mode == "constant" and any(varies(x.labels)[d] for d in padded):
        if fill != 0:
            raise Unsupported("channels padded with a constant")
        return Value(
            compress(torch.nn.functional.pad(x.labels, list(widths), value=STRUCTURAL_ZERO))
        )
    if any(varies(x.labels)[d] for d in padded):
        raise Unsupported("channels padded by reflection")
    if fill != 0:
        system.freeze(x.labels, ("scale", "sign"))
    shape = node.meta["val"].shape
    small = x.labels
    for d in padded:
        small = small.narrow(d, 0, 1)
    return Value(small.expand(shape))


# ------------------------------------------------------------ shape operations
_REARRANGE = frozenset(
    (
        "view reshape permute transpose flatten unsqueeze squeeze select slice expand "
        "contiguous clone chunk split split_with_sizes unbind unflatten repeat "
        "repeat_interleave roll flip pixel_shuffle pixel_unshuffle t numpy_T movedim "
        "moveaxis narrow channel_shuffle tile swapaxes swapdims alias detach view_as "
        "expand_as mT mH adjoint _unsafe_view view_copy index index_select unfold "
        "diagonal tensor_split hsplit vsplit rot90 _reshape_alias lift_fresh_copy "
        "broadcast_to atleast_1d atleast_2d atleast_3d ravel squeeze_ unsqueeze_ "
        "transpose_"
    ).split()
)


def expand(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Broadcasting stays visible: dimensions of size 1 keep it, and need no tie later."""
    if not isinstance(x, Value):
        return rearrange(system, node, x, *args, **kwargs)
    return Value(x.labels[(None,) * (node.meta["val"].ndim - x.labels.ndim)])


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


def _view(weight: Weight, coords: Sequence[Tensor]) -> Weight:
    return Weight(
        weight.name, tuple(compress(c) for c in coords), weight.full_shape, weight.is_buffer
    )


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
    """Concatenation of the labels."""
    full = [
        _full_labels(system, p)
        for p in parts
        if not (isinstance(p, Value) and p.labels.numel() == 0)
    ]
    dim %= full[0].ndim
    moving = [any(varies(t)[d] for t in full) or d == dim for d in range(full[0].ndim)]
    small = [t if all(moving) else _narrow(t, moving) for t in full]
    return Value(compress(torch.cat(small, dim)).expand(node.meta["val"].shape))


def _narrow(labels: Tensor, moving: Sequence[bool]) -> Tensor:
    for d, moves in enumerate(moving):
        if not moves and labels.shape[d] > 1:
            labels = labels.narrow(d, 0, 1)
    return labels


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


def copy(system: Constraints, node: Node, x: Any, source: Any, *args: Any) -> Value:
    """A full overwrite."""
    return Value(_full_labels(system, source).expand(node.meta["val"].shape))


def uniform_like(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``zeros_like`` and its kin: a constant of the same shape."""
    assert callable(node.target)
    fill = kwargs.get("fill_value", next((a for a in args if isinstance(a, int | float)), 1))
    zero = "zero" in operation_name(node) or fill == 0
    shape = node.meta["val"].shape
    if "empty" in operation_name(node):
        return Value(torch.full((1,) * len(shape), FROZEN).expand(shape))
    value = torch.full((1,) * len(shape), 0.0 if zero else float(fill))
    return Constant(value.to(node.meta["val"].dtype).expand(shape))


SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(_REARRANGE, rearrange),
    **dict.fromkeys(("slice_scatter", "select_scatter"), scatter_slice),
    **dict.fromkeys(_UNIFORM.split(), uniform_like),
    **dict.fromkeys(("cat", "concat", "concatenate"), concatenate),
    **dict.fromkeys(_PADDING.split(), pad),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    "stack": stack,
    "copy": copy,
}
