"""How layers with weights treat channels: linear maps, convolutions, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels, unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Limit, Record, Rule
from lightning_bnn.symmetry.rules.contraction import baddbmm, ndim_of, sum_of_products
from lightning_bnn.symmetry.rules.factored import as_value, contracted, factored, parts_of
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Factored,
    Unsupported,
    Value,
    Weight,
    along,
    core,
    moving_dims,
    shape_of,
)

__all__ = [
    "addmm",
    "convolution",
    "embedding",
    "linear",
    "write",
]


_ACROSS = "it maps a dimension that has no channels, which ties those of the other dimensions"


# ------------------------------------------------------------ linear maps
def linear(system: Constraints, node: Node, x: Any, weight: Any, bias: Any = None) -> Value:
    """Consumes the channels of the last dimension and makes new ones."""
    plain = isinstance(weight, Weight) and isinstance(bias, Weight | None)
    if not plain or isinstance(x, Factored) or len(weight.shape) != 2:
        return _linear_of_computed(system, node, x, weight, bias)
    labels = system.labels(x)
    channels = _read(system, labels, labels.ndim - 1)
    out = system.fresh(weight.shape[0])
    write(system, out, channels, weight, bias)
    return Value(along(out, labels.ndim - 1, shape_of(node)))


def _linear_of_computed(system: Constraints, node: Node, x: Any, weight: Any, bias: Any) -> Any:
    """A linear map whose weight or bias is computed; without an activation, a computed weight."""
    ndim = len(shape_of(node))
    lead = ascii_lowercase[: max(ndim - 1, 0)]
    letters = "YX" if ndim_of(weight) == 2 else "X"
    product = sum_of_products(
        system, node, (x, weight), (lead + "X", letters), lead + letters.removesuffix("X")
    )
    if bias is None:
        return product
    labels = [
        t if isinstance(t, Value) else as_value(system, factored(parts_of(system, t), t.shape))
        for t in (product, bias)
    ]
    return Value(unify(system, *(v.labels for v in labels)).expand(shape_of(node)))


def _read(system: Constraints, labels: Tensor, dim: int) -> Tensor:
    """Channels along one dimension; those along others are held, where this one has none."""
    if dim not in moving_dims(labels) and len(torch.unique(core(labels))) > 1:
        system.limits.append(Limit(np.unique(core(labels).numpy()), None, _ACROSS))
    return system.collapse(labels, [dim])


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
    if bias is not None:
        system.consume(bias, Record(0, out.reshape(-1), "bias"))


def addmm(
    system: Constraints, node: Node, bias: Any, x: Any, weight: Any, *args: Any, **kwargs: Any
) -> Value:
    """``bias + x @ weight``, both possibly scaled by numbers, which change no channel."""
    if isinstance(weight, Weight) and isinstance(bias, Weight) and len(bias.shape) == 1:
        return linear(system, node, x, _transpose(weight), bias)
    return baddbmm(system, node, bias, x, weight)


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
        labels = system.labels(as_value(system, x) if isinstance(x, Factored) else x)
        if isinstance(weight, Factored):
            groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
            return _computed_convolution(system, node, labels, weight, bias, groups, transposed)
        if not isinstance(weight, Weight):
            raise Unsupported("a convolution by what is computed from activations")
        if labels.ndim != len(weight.shape):
            raise Unsupported("a convolution without a batch dimension")
        groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
        incoming, out = _read(system, labels, 1), system.fresh(shape_of(node)[1])
        inside = [t.reshape(groups, -1) for t in (incoming, out)]
        if transposed:
            write(system, inside[1], incoming, weight, bias, out_dim=1)
        else:
            write(system, out, inside[0], weight, bias)
        if groups > 1:
            system.block(torch.cat(inside, 1))
        return Value(along(out, 1, shape_of(node)))

    return rule


def _computed_convolution(
    system: Constraints,
    node: Node,
    x: Tensor,
    weight: Factored,
    bias: Any,
    groups: int,
    transposed: bool,
) -> Value:
    """A convolution whose weight is computed; positions of its kernel are held fixed."""
    parts = [_without_kernel(system, part) for part in weight.parts]
    rows = [p.unflatten(0, (groups, -1)) if p.shape[0] > 1 else p[None] for p in parts]
    incoming = system.collapse(x, [1]).reshape(groups, -1)
    channels = [incoming] if incoming.numel() > 1 else []
    letters = ("gio", "goi")[not transposed]
    done = contracted(system, [[core(c) for c in channels], rows], ("gi", letters), "go", [1])
    out = torch.zeros((1, 1), dtype=torch.long)
    for part in sorted(done, key=lambda p: len(moving_dims(p))):
        out = core(multiply_labels(system, out, part))
    shape = shape_of(node)
    labels = along(out.expand(groups, shape[1] // groups).reshape(-1), 1, shape)
    if bias is None:
        return Value(labels)
    b = as_value(system, factored(parts_of(system, bias), bias.shape)).labels
    return Value(unify(system, labels, along(b, 1, (1, len(b), *shape[2:]))).expand(shape))


def _without_kernel(system: Constraints, part: Tensor) -> Tensor:
    """Rows and columns of a part of a weight, held fixed where positions of the kernel differ."""
    first = part[(slice(None), slice(None), *(slice(1),) * (part.ndim - 2))]
    if not torch.equal(first.expand_as(part), part):
        system.freeze(part)
        first = torch.full_like(first, FROZEN)
    return first.squeeze(list(range(2, part.ndim)))


def embedding(system: Constraints, node: Node, weight: Any, *args: Any, **kwargs: Any) -> Value:
    """New channels, one per column of the table."""
    if args and isinstance(args[0], Value) and bool((core(args[0].labels) != 0).any()):
        raise Unsupported("indices that are computed from channels")
    shape = shape_of(node)
    if isinstance(weight, Factored):
        return _computed_table(system, weight, shape)
    out = system.fresh(weight.shape[1])
    system.consume(weight, Record(1, out, "out"))
    return Value(along(out, len(shape) - 1, shape))


def _computed_table(system: Constraints, weight: Factored, shape: Sequence[int]) -> Value:
    """Of a table that is computed the columns are channels; its rows are held fixed."""
    out = torch.zeros(1, dtype=torch.long)
    for part in weight.parts:
        if moving_dims(part) == [1]:
            out = part[0]
        else:
            system.freeze(part)
    return Value(along(out.expand(weight.shape[1]), len(shape) - 1, shape))
