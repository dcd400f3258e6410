"""How reductions and pooling treat channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.discovery.export import operation_name
from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.labels import Unsupported, Value, core, varies

__all__ = ["REDUCTION_RULES", "reduce_channels"]


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
        labels = system.labels(x)
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
    """A vector norm: a common scale passes, signs are forgotten; a count of non-zeros has none."""
    if p == 0:
        labels = reduction(False, "is forgotten")(system, node, x, dim, keepdim).labels
        return Value(system.follow(labels, ()))
    return reduction(True, "is forgotten")(system, node, x, dim, keepdim)


def variance(
    system: Constraints, node: Node, x: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Variance and deviation: scales stop, one sign is shared; the mean beside them keeps it."""
    keepdim = kwargs.get("keepdim", args[-1] if args and isinstance(args[-1], bool) else False)
    mean = reduction(False, "passes")(
        system, node, x, None if isinstance(dim, bool) else dim, keepdim
    )
    if isinstance(mean, tuple):
        return Value(system.follow(mean[0].labels, ())), mean[1]
    return Value(system.follow(mean.labels, ()))


def extreme_with_index(
    system: Constraints, node: Node, x: Any, dim: Any = None, keepdim: bool = False
) -> Any:
    """``max(dim)``: the values, and where they stand, which must not be asked of channels."""
    if dim is None:
        return reduction(True, "stops")(system, node, x)
    asked = any(user.args[1] == 1 and user.users for user in node.users if len(user.args) > 1)
    if asked and varies(system.labels(x))[dim]:
        raise Unsupported("the index of a channel")
    values, _ = reduction(True, "stops")(system, node, x, dim, keepdim)
    return values, Value(system.follow(values.labels, ()))


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
        found = _like(node, channels[(...,) + (None,) * dims])
        if not isinstance(found, tuple):
            return found
        values, where = found  # places have no size
        return values, Value(system.follow(where.labels, ()))

    return rule


REDUCTION_RULES: dict[str, Rule] = {
    **dict.fromkeys(("mean", "sum", "nanmean", "nansum"), reduction(True, "passes")),
    **dict.fromkeys(("amax", "amin"), reduction(True, "stops")),
    **dict.fromkeys(("max", "min"), extreme_with_index),
    "logsumexp": reduction(False, "stops"),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), variance),
    **dict.fromkeys(("linalg_vector_norm", "norm"), norm),
    **{
        f"{kind}_pool{d}d{suffix}": pool(d)
        for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "_adaptive_avg")
        for suffix in ("", "_with_indices")
        for d in (1, 2, 3)
    },
    **{
        f"{kind}{d}d": pool(d)
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for d in (1, 2, 3)
    },
    "upsample_linear1d": pool(1),
    **{
        f"{aa}upsample_{kind}2d{'_aa' if aa else ''}": pool(2)
        for aa in ("", "_")
        for kind in ("bilinear", "bicubic")
    },
    "upsample_trilinear3d": pool(3),
}
