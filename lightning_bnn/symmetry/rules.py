"""How operations treat channels: a small function per family, a table from names to them.

A rule is called as ``rule(system, node, *args, **kwargs)`` with `Value`, `Weight` and `Constant` in
place of tensors. It states on ``system`` which channels are tied, which scales and signs pass, and
returns the labels of the result. What a rule does not cover it leaves by raising `Unsupported`: the
tracer then freezes everything the operation touches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.constraints import Constraints, Record, Unsupported
from lightning_bnn.symmetry.labels import (
    FROZEN,
    STRUCTURAL_ZERO,
    Constant,
    Value,
    Weight,
    compress,
    constant_labels,
    core,
    varies,
)

__all__ = (
    "RULES SHAPE_OPERATIONS Rule even homogeneous labels_of nonlinear odd passthrough"
).split()

Rule = Callable[..., Any]
aten = torch.ops.aten


def labels_of(system: Constraints, x: Value | Weight | Constant | float) -> Tensor:
    """Labels of any operand."""
    if isinstance(x, Value):
        return x.labels
    if isinstance(x, Weight):
        return system.raw(x).labels
    return constant_labels(x.tensor if isinstance(x, Constant) else torch.as_tensor(x))


# ------------------------------------------------------------ element-wise, one operand
def passthrough(
    system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any
) -> Value:
    """Dropout, casts, negation: scales and signs pass."""
    return Value(labels_of(system, x))


def homogeneous(
    system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any
) -> Value:
    """ReLU and its kin: positive scales pass, signs do not."""
    labels = labels_of(system, x)
    system.freeze(labels, ("sign",))
    return Value(labels)


def odd(system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any) -> Value:
    """Tanh and its kin: signs pass, scales do not."""
    labels = labels_of(system, x)
    system.freeze(labels, ("scale",))
    return Value(labels)


def nonlinear(
    system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any
) -> Value:
    """GELU and its kin: only permutations pass."""
    labels = labels_of(system, x)
    system.freeze(labels, ("scale", "sign"))
    return Value(labels)


def even(system: Constraints, node: Node, x: Value | Weight, *args: Any, **kwargs: Any) -> Value:
    """Cosine, square: a flipped input gives the same output."""
    labels = labels_of(system, x)
    system.freeze(labels, ("scale",))
    return Value(_same_channels(system, labels, ()))


def absolute(system: Constraints, node: Node, x: Value | Weight) -> Value:
    """Positive scales pass, and a flipped input gives the same output."""
    labels = labels_of(system, x)
    return Value(_same_channels(system, labels, ("scale",)))


def power(system: Constraints, node: Node, x: Any, exponent: Any, *args: Any) -> Value:
    """Even powers forget the sign, odd ones keep it."""
    if not isinstance(x, Value | Weight) or not isinstance(exponent, int | float) or exponent % 1:
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


def _same_channels(system: Constraints, labels: Tensor, kinds: Sequence[str]) -> Tensor:
    """New channels that move with the old ones, follow them in ``kinds``, else are fixed."""
    small = core(labels)
    out = system.fresh(*small.shape)
    system.tie(out, small, ("permutation", *kinds))
    system.freeze(out, [k for k in ("scale", "sign") if k not in kinds])
    return out.expand(labels.shape)


# ------------------------------------------------------------ element-wise, several operands
def add(
    system: Constraints, node: Node, x: Any, y: Any, *args: Any, alpha: float = 1, **kwargs: Any
) -> Value:
    """Channels of the two operands become one."""
    return Value(system.unify([labels_of(system, x), labels_of(system, y)]))


def multiply(system: Constraints, node: Node, x: Any, y: Any) -> Value:
    """Scales and signs add up; a parameter over all channels is a gain, free on either side."""
    if isinstance(x, Weight) and not isinstance(y, Weight):
        x, y = y, x
    if isinstance(y, Weight) and isinstance(x, Value) and not y.is_buffer:
        gained = _gain(system, x, y)
        if gained is not None:
            return gained
    return Value(system.multiply(labels_of(system, x), labels_of(system, y)))


def _gain(system: Constraints, x: Value, weight: Weight) -> Value | None:
    labels, *_ = system.align([x.labels, torch.zeros((1,) * len(weight.shape))])
    shape = (1,) * (labels.ndim - len(weight.shape)) + tuple(weight.shape)
    moving = [d for d, moves in enumerate(varies(labels)) if moves]
    uniform_elsewhere = all(n == 1 or d in moving for d, n in enumerate(shape))
    if (
        not moving
        or any(shape[d] == 1 for d in moving)
        or not uniform_elsewhere
        or bool((core(labels) <= 0).any())
    ):
        return None
    small = core(labels)
    out = system.fresh(*small.shape)
    system.tie(out, small, ("permutation",))
    dim = 0 if len(weight.full_shape) == 1 else None
    if len(moving) == 1 and len(weight.full_shape) > 1:
        dim = moving[0] - (labels.ndim - len(weight.shape))
    elif dim is None and not _is_whole(weight):
        raise Unsupported("a view of a gain over several dimensions")
    system.consume(
        weight if dim is None or len(weight.full_shape) > 1 else _flat(weight),
        Record(dim, out.reshape(-1).numpy(), "gain", 1, 1),
        Record(dim, small.reshape(-1).numpy(), "gain in", -1, 1),
    )
    return Value(out.expand(labels.shape))


def _is_whole(weight: Weight) -> bool:
    in_order = all(
        not any(m for d, m in enumerate(varies(c)) if d != k) for k, c in enumerate(weight.coords)
    )
    return weight.shape == weight.full_shape and in_order


def _flat(weight: Weight) -> Weight:
    return Weight(
        weight.name, (core(weight.coords[0]).reshape(-1),), weight.full_shape, weight.is_buffer
    )


def divide(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Value:
    """Scales and signs subtract."""
    if kwargs.get("rounding_mode"):
        raise Unsupported("a rounded division")
    return Value(system.multiply(labels_of(system, x), labels_of(system, y), inverse=True))


def extreme(system: Constraints, node: Node, x: Any, y: Any) -> Value:
    """Element-wise maximum and minimum: one common scale passes, signs do not."""
    labels = system.unify([labels_of(system, x), labels_of(system, y)])
    system.freeze(labels, ("sign",))
    return Value(labels)


def compare(system: Constraints, node: Node, x: Any, y: Any = 0) -> Value:
    """A comparison does not change when both sides are scaled."""
    labels = extreme(system, node, x, y).labels
    return Value(_same_channels(system, labels, ()))


def where(system: Constraints, node: Node, condition: Any, x: Any, y: Any) -> Value:
    """A choice between two operands that share their channels."""
    chosen = system.unify([labels_of(system, x), labels_of(system, y)])
    system.tie_permutations(labels_of(system, condition), chosen)
    return Value(torch.broadcast_to(chosen, node.meta["val"].shape))


def masked_fill(system: Constraints, node: Node, x: Any, mask: Any, value: Any) -> Value:
    """A choice between the operand and a constant."""
    return where(system, node, mask, value, x)


def softmax(system: Constraints, node: Node, x: Value, dim: int, *args: Any) -> Value:
    """Couples the channels of a row: rows stay together."""
    small = core(x.labels)
    system.freeze(small, ("scale", "sign"))
    dim %= small.ndim
    if small.shape[dim] > 1:
        system.block(
            np.unique(small.movedim(dim, -1).reshape(-1, small.shape[dim]).numpy(), axis=0)
        )
    return x


def glu(system: Constraints, node: Node, x: Value, dim: int = -1) -> Value:
    """One half gates the other: the scale and sign of the other half pass."""
    half = x.labels.shape[dim] // 2
    gate = x.labels.narrow(dim, half, half)
    system.freeze(gate, ("scale", "sign"))
    return Value(system.multiply(compress(x.labels.narrow(dim, 0, half)), compress(gate)))


# ------------------------------------------------------------ reductions and pooling
def reduction(scale: bool, sign: str) -> Rule:
    """A reduction, and whether a common scale and sign pass, stop, or are forgotten."""

    def rule(
        system: Constraints,
        node: Node,
        x: Any,
        dim: Any = None,
        keepdim: bool = False,
        **kwargs: Any,
    ) -> Any:
        labels = labels_of(system, x)
        dims = _dims(dim, labels.ndim)
        if not scale:
            system.freeze(labels, ("scale",))
        if sign == "stops":
            system.freeze(labels, ("sign",))
        moving = [d for d in dims if varies(labels)[d]]
        out = labels
        if moving or sign == "is forgotten":
            out = reduce_channels(system, labels, moving, sign)
        for d in reversed(dims):
            out = out.narrow(d, 0, 1) if keepdim else out.select(d, 0)
        return _like(node, out)

    return rule


def reduce_channels(
    system: Constraints, labels: Tensor, moving: Sequence[int], sign: str
) -> Tensor:
    """New channels for reduced rows; each row is a block together with its result."""
    kept = [d for d in range(labels.ndim) if varies(labels)[d] and d not in moving]
    small = core(labels)
    rows = small.permute(*kept, *[d for d in range(labels.ndim) if d not in kept])
    rows = rows.reshape(*[small.shape[d] for d in kept], -1)
    out = system.fresh(*rows.shape[:-1])
    system.tie(rows, out[..., None], ("scale",) if sign == "is forgotten" else ("scale", "sign"))
    if sign == "is forgotten":
        system.freeze(out, ("sign",))
    if not moving:
        system.tie(rows, out[..., None], ("permutation",))
    elif kept:
        system.block(torch.cat([rows, out[..., None]], -1).reshape(-1, rows.shape[-1] + 1).numpy())
    shape = [small.shape[d] if d in kept else 1 for d in range(labels.ndim)]
    return out.reshape(shape).expand(labels.shape)


def _dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(ndim))
    return sorted({d % ndim for d in (dim if isinstance(dim, Sequence) else [dim])})


def norm(
    system: Constraints,
    node: Node,
    x: Any,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    **kw: Any,
) -> Any:
    """A vector norm: a common scale passes, signs are forgotten."""
    return reduction(True, "is forgotten")(system, node, x, dim, keepdim)


def variance(
    system: Constraints, node: Node, x: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Variance and deviation: scales stop, one sign is shared."""
    keepdim = kwargs.get("keepdim", args[-1] if args and isinstance(args[-1], bool) else False)
    result = reduction(False, "passes")(
        system, node, x, None if isinstance(dim, bool) else dim, keepdim
    )
    leaves = result if isinstance(result, tuple) else (result,)
    fresh = tuple(Value(_same_channels(system, leaf.labels, ())) for leaf in leaves)
    return fresh if isinstance(result, tuple) else fresh[0]


def _like(node: Node, labels: Tensor) -> Any:
    value = node.meta["val"]
    if isinstance(value, tuple | list):
        return tuple(Value(torch.broadcast_to(labels, v.shape)) for v in value)
    return Value(torch.broadcast_to(labels, value.shape))


def pool(dims: int) -> Rule:
    """Pooling and resampling over the last ``dims`` dimensions."""

    def rule(system: Constraints, node: Node, x: Value, *args: Any, **kwargs: Any) -> Any:
        if "max" in operation_name(node):
            system.freeze(x.labels, ("sign",))
        if any(varies(x.labels)[-dims:]):
            channels = system.collapse(x.labels, range(x.labels.ndim - dims))
        else:
            channels = x.labels[(...,) + (0,) * dims]
        return _like(node, channels[(...,) + (None,) * dims])

    return rule


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
SHAPE_OPERATIONS = frozenset(
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


def shape_operation(system: Constraints, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Any rearrangement: executed on the labels (or on the coordinates of a weight)."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs), is_leaf=_is_operand)
    weight = next((leaf for leaf in leaves if isinstance(leaf, Weight)), None)
    if weight is None:
        result = _execute(
            node, args, kwargs, lambda v: v.labels if isinstance(v, Value) else v.tensor
        )
        return torch.utils._pytree.tree_map(lambda t: Value(compress(t)), result)
    if any(isinstance(leaf, Value) for leaf in leaves):
        raise Unsupported("a weight indexed by an activation")
    results = []
    for k in range(len(weight.coords)):
        results.append(
            _execute(
                node,
                args,
                kwargs,
                lambda v, k=k: v.coords[k] if isinstance(v, Weight) else v.tensor,
            )
        )
    if isinstance(results[0], Tensor):
        return _view(weight, results)
    return type(results[0])(_view(weight, parts) for parts in zip(*results, strict=True))


def _view(weight: Weight, coords: Sequence[Tensor]) -> Weight:
    return Weight(
        weight.name, tuple(compress(c) for c in coords), weight.full_shape, weight.is_buffer
    )


def _is_operand(x: Any) -> bool:
    return isinstance(x, Value | Weight | Constant)


def _execute(node: Node, args: Any, kwargs: Any, pick: Callable[[Any], Tensor]) -> Any:
    def unwrap(x: Any) -> Any:
        return pick(x) if _is_operand(x) else x

    first = args[0] if not isinstance(args[0], list | tuple) else args[0][0]
    if isinstance(first, Constant):
        raise Unsupported("a constant indexed by an activation")
    for other in torch.utils._pytree.tree_leaves(args[1:], is_leaf=_is_operand):
        if isinstance(other, Value) and operation_name(node) in ("index", "index_select"):
            raise Unsupported("an index computed from the input")
    args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs), is_leaf=_is_operand)
    target = node.target
    if operation_name(node) in ("view", "_unsafe_view", "view_copy", "_reshape_alias"):
        target, args = aten.reshape.default, args[:2]
    assert callable(target)
    return target(*args, **kwargs)


def operation_name(node: Node) -> str:
    """The bare name of the operation a node calls; operations outside aten keep their namespace."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    namespace, name = schema.name.split("::")
    return str(name if namespace == "aten" else f"{namespace}.{name}")


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
    return (
        labels_of(system, x).expand(x.tensor.shape)
        if isinstance(x, Constant)
        else labels_of(system, x)
    )


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
    zero = "zeros" in operation_name(node) or fill == 0
    shape = node.meta["val"].shape
    if "empty" in operation_name(node):
        return Value(torch.full((1,) * len(shape), FROZEN).expand(shape))
    return Constant(
        torch.full((1,) * len(shape), 0.0 if zero else 1.0 if fill is True else float(fill)).expand(
            shape
        )
    )


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
_PASS = (
    "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout to _to_copy "
    "type_as neg real positive lift_fresh"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(SHAPE_OPERATIONS, shape_operation),
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
    **dict.fromkeys(("mean", "sum", "nanmean", "nansum"), reduction(True, "passes")),
    **dict.fromkeys(("amax", "amin"), reduction(True, "stops")),
    **dict.fromkeys(("logsumexp",), reduction(False, "stops")),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), variance),
    **dict.fromkeys(("linalg_vector_norm", "norm"), norm),
    **{
        f"{kind}_pool{d}d": pool(d)
        for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "_adaptive_avg", "lp")
        for d in (1, 2, 3)
    },
    **{f"max_pool{d}d_with_indices": pool(d) for d in (1, 2, 3)},
    **{
        f"{kind}{d}d": pool(d)
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for d in (1, 2, 3)
    },
    **dict.fromkeys(("upsample_linear1d",), pool(1)),
    **dict.fromkeys(
        (
            "upsample_bilinear2d",
            "_upsample_bilinear2d_aa",
            "upsample_bicubic2d",
            "_upsample_bicubic2d_aa",
        ),
        pool(2),
    ),
    **dict.fromkeys(("upsample_trilinear3d",), pool(3)),
    **dict.fromkeys(
        ("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d"), pad
    ),
    **dict.fromkeys(("slice_scatter", "select_scatter"), scatter_slice),
    **dict.fromkeys(
        ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full"),
        uniform_like,
    ),
    **dict.fromkeys(("cat", "concat", "concatenate"), concatenate),
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
    "stack": stack,
    "copy": copy,
}
"""Rule of every operation, by its name without the in-place underscore."""
