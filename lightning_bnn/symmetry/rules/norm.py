"""How normalisations treat channels: scales stop, and start anew at the gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import (
    multiply_labels,
    tie_permutations,
    unify,
)
from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.labels import (
    Constant,
    Value,
    Weight,
    along,
    core,
    moving_dims,
    solid,
    with_fixed_rest,
)

__all__ = ["batch_norm", "group_norm", "layer_norm", "rms_norm"]


def batch_norm(mode: str) -> Rule:
    """Batch norm, and instance norm: every channel by itself."""

    def rule(
        system: Constraints, node: Node, x: Any, weight: Any, bias: Any, *args: Any, **kwargs: Any
    ) -> Any:
        labels = solid(system.labels(x))
        incoming = system.collapse(labels, [1])
        statistics = [a for a in args[:2] if isinstance(a, Weight)]
        fixed_map = mode == "eval" and len(statistics) == 2
        if not fixed_map or weight is None:
            system.freeze(incoming, ("scale",))
        if statistics:
            system.consume(statistics[0], Record(0, incoming, "mean"))
            system.consume(statistics[1], Record(0, incoming, "variance", 0, 0))
        out = _affine(system, incoming, weight, bias, inward=-1 if fixed_map else 0)
        return with_fixed_rest(node, along(out, 1, labels.shape))

    return rule


def layer_norm(
    system: Constraints,
    node: Node,
    x: Any,
    shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *args: Any,
) -> Any:
    """Layer norm: all channels of a row share one sign, no scale passes."""
    return _row_norm(system, node, x, shape, weight, bias, shares_sign=True)


def rms_norm(
    system: Constraints, node: Node, x: Any, shape: Sequence[int], weight: Any = None, *args: Any
) -> Any:
    """RMS norm: every channel keeps its own sign."""
    return _row_norm(system, node, x, shape, weight, None, shares_sign=False)


def _row_norm(
    system: Constraints,
    node: Node,
    x: Any,
    shape: Sequence[int],
    weight: Any,
    bias: Any,
    shares_sign: bool,
) -> Any:
    labels = solid(system.labels(x))
    normal = list(range(labels.ndim - len(shape), labels.ndim))
    if weight is None and bias is None:
        return with_fixed_rest(node, _plain_norm(system, labels, normal, shares_sign))
    several = [d for d in moving_dims(labels) if d not in normal]
    incoming = _shared_by_rows(system, labels, several) if several else labels
    incoming = system.collapse(incoming, normal)
    system.freeze(incoming, ("scale",))
    system.mark(incoming, "diagonal")
    if shares_sign:
        system.tie(incoming, incoming.reshape(-1)[:1], ("sign",))
    out = _affine(system, incoming, weight, bias)
    if several:
        small = core(labels)
        rows = system.fresh(*small.shape)
        system.tie(rows, small, ("permutation",))
        system.tie(rows, out, ("scale", "sign"))
        system.mark(small, "diagonal")
        out = rows
    return with_fixed_rest(node, out.expand(labels.shape))


def _rows(small: Tensor, several: Sequence[int]) -> Tensor:
    rest = [d for d in range(small.ndim) if d not in several]
    table = small.permute(*several, *rest)
    return table.reshape(int(np.prod(table.shape[: len(several)])), -1)


def _shared_by_rows(system: Constraints, labels: Tensor, several: Sequence[int]) -> Tensor:
    """Channels of one row that stand for those of all rows, such as heads with one gain."""
    small = core(labels)
    common = system.fresh(*(1 if d in several else n for d, n in enumerate(small.shape)))
    system.tie(small, common, ("scale", "sign"))
    tie_permutations(system, small, common)
    if common.numel() > 1:
        system.block(_rows(small, several))
    shape = [1 if d in several else n for d, n in enumerate(labels.shape)]
    return common.expand(shape)


def _plain_norm(
    system: Constraints, labels: Tensor, row: Sequence[int], shares_sign: bool
) -> Tensor:
    """A norm without a gain, under which rows may be rotated."""
    small = core(labels)
    several = [d for d in moving_dims(small) if d not in row]
    if several and small.numel() > len(rows := _rows(small, several)):
        system.block(rows)
    system.freeze(small, ("scale",))
    system.mark(small, "centred" if shares_sign else "orthogonal")
    if shares_sign:
        first = small
        for d in row:
            first = first.narrow(d, 0, 1)
        system.tie(small, first, ("sign",))
    return labels


def group_norm(
    system: Constraints,
    node: Node,
    x: Any,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
) -> Any:
    """Group norm: groups are blocks with one sign each."""
    labels = solid(system.labels(x))
    incoming = system.collapse(labels, [1])
    rows = incoming.reshape(groups, -1)
    system.block(rows)
    system.freeze(incoming, ("scale",))
    system.tie(rows, rows[:, :1], ("sign",))
    is_plain = weight is None and bias is None
    system.mark(incoming, "centred" if is_plain else "diagonal")
    out = incoming if is_plain else _affine(system, incoming, weight, bias)
    return with_fixed_rest(node, along(out, 1, labels.shape))


def _affine(
    system: Constraints, incoming: Tensor, weight: Any, bias: Any, inward: int = 0
) -> Tensor:
    """Learned gain and bias: channels leave with a scale and sign of their own."""
    dim = 0 if incoming.ndim == 1 else None
    if isinstance(weight, Weight):
        out = system.fresh(*incoming.shape)
        system.tie(out, incoming, ("permutation",))
        system.consume(
            weight,
            Record(dim, out.reshape(-1), "gain"),
            Record(dim, incoming.reshape(-1), "gain in", inward),
        )
    else:
        out = system.follow(incoming, ("sign",))
    if isinstance(weight, Value):  # a computed one, such as 1 + w
        out = multiply_labels(system, out, weight.labels)
    if isinstance(bias, Value):
        out = unify(system, out, bias.labels)
    if isinstance(bias, Weight):
        system.consume(bias, Record(dim, out.reshape(-1), "bias"))
    if isinstance(weight, Constant) or isinstance(bias, Constant):
        system.freeze(out)
    return out
