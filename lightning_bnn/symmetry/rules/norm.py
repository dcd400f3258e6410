"""How normalisations treat channels: scales stop, and start anew at the gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.labels import Constant, Value, Weight, along, solid

__all__ = ["norm_rules"]


def batch_norm(batch_norm_mode: str) -> Rule:
    """Batch norm, and instance norm: every channel by itself."""

    def rule(
        system: Constraints, node: Node, x: Any, weight: Any, bias: Any, *args: Any, **kwargs: Any
    ) -> Any:
        labels = solid(system.labels(x))
        incoming = system.collapse(labels, [1])
        statistics = [a for a in args[:2] if isinstance(a, Weight)]
        fixed_map = batch_norm_mode == "eval" and len(statistics) == 2
        if not fixed_map:
            system.freeze(incoming, ("scale",))
        if statistics:
            system.consume(statistics[0], Record(0, incoming.numpy(), "mean", 1, 1))
            system.consume(statistics[1], Record(0, incoming.numpy(), "variance", 0, 0))
        inward = -1 if fixed_map else 0
        out = _affine(system, incoming, weight, bias, inward)
        if fixed_map and weight is None:
            system.freeze(incoming, ("scale",))
        return _normalised(node, along(out, 1, labels.shape))

    return rule


def layer_norm(
    system: Constraints,
    node: Node,
    x: Any,
    shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *a: Any,
) -> Any:
    """Layer norm: all channels of a row share one sign, no scale passes."""
    labels = solid(system.labels(x))
    incoming = system.collapse(labels, range(labels.ndim - len(shape), labels.ndim))
    system.freeze(incoming, ("scale",))
    system.tie(incoming, incoming.reshape(-1)[:1], ("sign",))
    out = _affine(system, incoming, weight, bias, 0)
    return _normalised(node, out.expand(labels.shape))


def rms_norm(
    system: Constraints, node: Node, x: Any, shape: Sequence[int], weight: Any = None, *args: Any
) -> Any:
    """RMS norm: every channel keeps its own sign."""
    labels = solid(system.labels(x))
    incoming = system.collapse(labels, range(labels.ndim - len(shape), labels.ndim))
    system.freeze(incoming, ("scale",))
    return _normalised(node, _affine(system, incoming, weight, None, 0).expand(labels.shape))


def group_norm(
    system: Constraints,
    node: Node,
    x: Any,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    *a: Any,
) -> Any:
    """Group norm: groups are blocks with one sign each."""
    labels = solid(system.labels(x))
    incoming = system.collapse(labels, [1])
    rows = incoming.reshape(groups, -1)
    system.block(rows.numpy())
    system.freeze(incoming, ("scale",))
    system.tie(rows, rows[:, :1], ("sign",))
    return _normalised(node, along(_affine(system, incoming, weight, bias, 0), 1, labels.shape))


def _affine(system: Constraints, incoming: Tensor, weight: Any, bias: Any, inward: int) -> Tensor:
    """Learned gain and bias: channels leave with a scale and sign of their own."""
    out = system.fresh(*incoming.shape)
    system.tie(out, incoming, ("permutation",))
    dim = 0 if incoming.ndim == 1 else None
    if not isinstance(weight, Weight):
        system.tie(out, incoming, ("sign",))
        system.freeze(out, ("scale",))
        if isinstance(weight, Constant):
            system.freeze(out)
    else:
        flat_out, flat_in = out.reshape(-1).numpy(), incoming.reshape(-1).numpy()
        system.consume(
            weight, Record(dim, flat_out, "gain", 1, 1), Record(dim, flat_in, "gain in", inward, 1)
        )
    if isinstance(bias, Weight):
        system.consume(bias, Record(dim, out.reshape(-1).numpy(), "bias", 1, 1))
    elif isinstance(bias, Constant):
        system.freeze(out)
    return out


def _normalised(node: Node, labels: Tensor) -> Any:
    value = node.meta["val"]
    if not isinstance(value, tuple | list):
        return Value(labels)
    rest = [Value(torch.zeros((1,) * v.ndim, dtype=torch.long).expand(v.shape)) for v in value[1:]]
    return (Value(labels), *rest)


def norm_rules(batch_norm_mode: str) -> dict[str, Rule]:
    """Rules of all normalisations, for one of the two conventions about batch norm."""
    names = (
        "batch_norm",
        "_native_batch_norm_legit_no_training",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit",
    )
    return {
        **dict.fromkeys(names, batch_norm(batch_norm_mode)),
        "instance_norm": batch_norm("carrier"),
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "group_norm": group_norm,
    }
