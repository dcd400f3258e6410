"""How reductions and pooling treat channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.constraints import Constraints, Mark, Rule
from lightning_bnn.symmetry.rules.labels import (
    Products,
    Squares,
    Value,
    core,
    moving_dims,
    operation_name,
)

__all__ = ["norm", "pool", "reduce_channels", "reduction", "variance"]

Sign = Literal["passes", "stops", "is forgotten"]


# ------------------------------------------------------------ reductions
def reduction(
    scale: Literal["passes", "stops"], sign: Sign, rotates: bool = False, varies: bool = False
) -> Rule:
    """A reduction, and whether a common scale and sign pass, stop, or are forgotten.

    One that ``rotates`` does not change when the row is rotated, nor do sums of squares; what
    ``varies`` does not if the rotation leaves the sum alone.
    """

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
        if scale == "stops":
            system.freeze(labels, ("scale",))
        if sign == "stops":
            system.freeze(labels, ("sign",))
        moving = [d for d in moving_dims(labels) if d in dims]
        out = labels
        if scale == sign == "passes":
            _mark_sum(system, x, labels, bool(moving))
        else:
            turns: Mark = "orthogonal" if rotates else "centred"
            system.mark(labels, turns if moving and (rotates or varies) else "diagonal")
        if moving or sign == "is forgotten":
            out = reduce_channels(system, labels, moving, sign)
        for d in reversed(dims):
            out = out.narrow(d, 0, 1) if keepdim else out.select(d, 0)
        return _broadcast_results(node, out)

    return rule


def _mark_sum(system: Constraints, x: Any, labels: Tensor, is_over_channels: bool) -> None:
    """Of products and squares the rule before has told what mixes, or what turns."""
    if is_over_channels and isinstance(x, Squares):
        system.mark(labels, "orthogonal")
    elif is_over_channels and not isinstance(x, Products):
        system.hold(labels, "a sum over them", "centred")


def reduce_channels(
    system: Constraints,
    labels: Tensor,
    moving: Sequence[int],
    sign: Sign = "passes",
    mixes: bool = False,
) -> Tensor:
    """New channels for reduced rows; each row is a block together with its result."""
    kept = [d for d in moving_dims(labels) if d not in moving]
    small = core(labels)
    rows = small.permute(*kept, *[d for d in range(labels.ndim) if d not in kept])
    rows = rows.reshape(*[small.shape[d] for d in kept], -1)
    out = system.fresh(*rows.shape[:-1])
    system.tie(rows, out[..., None], ("scale",) if sign == "is forgotten" else ("scale", "sign"))
    if sign == "is forgotten":
        system.freeze(out, ("sign",))
    if not moving:
        system.tie(rows, out[..., None], ("permutation",))
    elif not kept:
        system.freeze(out, ("permutation",))  # a mean is not exchanged with a maximum
    else:
        whole = torch.cat([rows, out[..., None]], -1)
        system.block(whole.reshape(-1, rows.shape[-1] + 1), mixes=mixes)
    shape = [small.shape[d] if d in kept else 1 for d in range(labels.ndim)]
    return out.reshape(shape).expand(labels.shape)


def _dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(ndim))
    return sorted({d % ndim for d in (dim if isinstance(dim, Sequence) else [dim])})


def _broadcast_results(node: Node, labels: Tensor) -> Any:
    """All results of a node with the same labels, each in its own shape."""
    value = node.meta["val"]
    if isinstance(value, tuple | list):
        return tuple(Value(torch.broadcast_to(labels, v.shape)) for v in value)
    return Value(torch.broadcast_to(labels, value.shape))


def norm(
    system: Constraints,
    node: Node,
    x: Any,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> Any:
    """A vector norm: a common scale passes, signs are forgotten; a count of non-zeros has none."""
    if p != 0:
        return reduction("passes", "is forgotten", p == 2)(system, node, x, dim, keepdim)
    count = reduction("stops", "is forgotten")(system, node, x, dim, keepdim)
    return Value(system.follow(count.labels, ()))


def variance(
    system: Constraints, node: Node, x: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Variance and deviation: scales stop, one sign is shared; the mean beside them keeps it."""
    keepdim = kwargs.get("keepdim", args[-1] if args and isinstance(args[-1], bool) else False)
    dim = None if isinstance(dim, bool) else dim
    mean = reduction("stops", "passes", varies=True)(system, node, x, dim, keepdim)
    if isinstance(mean, tuple):
        return Value(system.follow(mean[0].labels, ())), mean[1]
    return Value(system.follow(mean.labels, ()))


# ------------------------------------------------------------ pooling
def pool(dims: int) -> Rule:
    """Pooling and resampling over the last ``dims`` dimensions."""

    def rule(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
        labels = system.labels(x)
        kept = range(labels.ndim - dims)
        if "max" in operation_name(node):
            system.freeze(labels, ("sign",))
        if "max" in operation_name(node) or not set(moving_dims(labels)) <= set(kept):
            system.mark(labels, "diagonal")
        if set(moving_dims(labels)) <= set(kept):
            channels = labels[(...,) + (0,) * dims]
        else:
            channels = system.collapse(labels, kept)
        pooled = _broadcast_results(node, channels[(...,) + (None,) * dims])
        if not isinstance(pooled, tuple):
            return pooled
        values, places = pooled  # places have no size
        return values, Value(system.follow(places.labels, ()))

    return rule
