"""Indices that are chosen among channels, such as those of the experts that ``topk`` picks.

They are an `Index`: their values move when the channels do, so that they may only be used to find
these channels again, or to sort tokens by them and to count how many have each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Chosen,
    Constant,
    Counts,
    Ends,
    Index,
    Unsupported,
    Value,
    along,
    core,
    fixed,
    moving_dims,
    shape_of,
)
from lightning_bnn.symmetry.rules.reduction import reduce_channels, reduction

__all__ = [
    "argmax",
    "cast_index",
    "chosen_of",
    "compare_index",
    "count_index",
    "extreme_with_index",
    "one_hot",
    "scatter_channels",
    "sort_index",
    "sum_of_counts",
    "taken_from",
    "topk",
]


def argmax(system: Constraints, node: Node, x: Any, dim: Any = None, *args: Any) -> Any:
    """The place of the largest (or smallest) of some channels, which all may be exchanged."""
    labels = system.labels(x)
    if dim is None or moving_dims(labels) != [dim % labels.ndim]:
        raise Unsupported("the largest along a dimension that is not of channels alone")
    system.freeze(labels, ("scale", "sign"))
    return Index(fixed(shape_of(node)).labels, core(labels).reshape(-1))


def topk(
    system: Constraints, node: Node, x: Any, k: int, dim: int = -1, *args: Any, **kwargs: Any
) -> Any:
    """The largest of some channels, which all may be exchanged: values by rank, and an `Index`."""
    labels = system.labels(x)
    dim %= labels.ndim
    values, places = node.meta["val"]
    moving = moving_dims(labels)
    if dim not in moving:
        if bool((core(labels) != FROZEN).any()):
            raise Unsupported("the largest along a dimension that is not of channels")
        return fixed(values.shape), fixed(places.shape)
    if moving != [dim]:
        raise Unsupported("the largest channels of several rows")
    system.freeze(labels, ("scale", "sign"))
    row = core(labels).reshape(-1)
    return fixed(values.shape), Index(fixed(places.shape).labels, row)


def extreme_with_index(
    system: Constraints, node: Node, x: Any, dim: Any = None, keepdim: bool = False
) -> Any:
    """``max(dim)``: the values, and where they stand; of channels, what ``topk(1)`` returns."""
    rule = reduction("passes", "stops")
    if dim is None:
        return rule(system, node, x)
    asked = any(user.args[1] == 1 and user.users for user in node.users if len(user.args) > 1)
    labels = system.labels(x)
    if asked and dim % labels.ndim in moving_dims(labels):
        return topk(system, node, x, 1, dim)
    values, _ = rule(system, node, x, dim, keepdim)
    return values, Value(system.follow(values.labels, ()))


def chosen_of(system: Constraints, labels: Tensor, dim: int, at: Index) -> Tensor:
    """What the chosen channels hold, in the order of the choice, along which nothing moves.

    Where each of them holds channels of its own, such as the outputs of an expert, these are the
    sum of all, times one for the chosen and zero for the others.
    """
    moving = moving_dims(labels)
    if dim not in moving or labels.shape[dim] != len(at.channels):
        raise Unsupported("an index among other channels")
    if moving == [dim]:
        row = core(labels).reshape(-1)
        system.tie(row, at.channels, ("permutation",))
        system.freeze(row, ("scale", "sign"))
        return fixed([1] * labels.ndim).labels
    chosen = _along_channels(system, at, dim, [len(at.channels)] * labels.ndim).labels
    product = multiply_labels(system, core(chosen), core(labels), summed=[dim])
    return reduce_channels(system, product, [dim]).narrow(dim, 0, 1)


def scatter_channels(
    system: Constraints, node: Node, x: Any, dim: int, at: Index, source: Any
) -> Value:
    """What is sent to channels, such as the weights of the chosen experts, has their places."""
    shape = shape_of(node)
    uniform = isinstance(x, Constant) and bool((x.tensor == x.tensor.reshape(-1)[0]).all())
    number = isinstance(source, int | float | Constant)
    still = number or bool((core(system.labels(source)) == FROZEN).all())
    if shape[dim] != len(at.channels) or not still:
        raise Unsupported("channels sent to channels")
    if isinstance(source, Constant) and not bool(
        (source.tensor == source.tensor.reshape(-1)[0]).all()
    ):
        raise Unsupported("a constant sent to channels")
    if not uniform:
        labels = system.labels(x)
        if moving_dims(labels) != [dim]:
            raise Unsupported("an index among other channels")
        system.tie(core(labels).reshape(-1), at.channels, ("permutation",))
    return _along_channels(system, at, dim, shape)


def _along_channels(system: Constraints, at: Index, dim: int, shape: Sequence[int]) -> Value:
    row = system.follow(at.channels, ())
    return Value(along(row, dim, shape))


def one_hot(system: Constraints, node: Node, at: Any, classes: int = -1) -> Value:
    """Which channel was chosen; without channels, which class: fixed."""
    shape = shape_of(node)
    if not isinstance(at, Index):
        raise Unsupported("a class of channels")
    row = system.follow(at.channels, ())
    if shape[-1] > len(row):
        row = torch.cat([row, torch.full((shape[-1] - len(row),), FROZEN)])
    return Value(along(row, len(shape) - 1, shape))


def compare_index(system: Constraints, node: Node, x: Any, y: Any) -> Value:
    """An `Index` compared with all of its values, or with one: which channel was chosen."""
    at, values = (x, y) if isinstance(x, Index) else (y, x)
    shape = shape_of(node)
    if isinstance(at, Index) and type(values) is int and 0 <= values < len(at.channels):
        one = system.follow(at.channels, ())[values]
        return Value(one.expand((1,) * len(shape)).expand(shape))
    if not (isinstance(at, Index) and isinstance(values, Constant)):
        raise Unsupported("an index among channels compared with another")
    n = len(at.channels)
    dims = [
        d
        for d in range(values.tensor.ndim)
        if values.tensor.shape[d] == n and values.tensor.numel() == n
    ]
    if len(dims) != 1 or values.tensor.reshape(-1).tolist() != list(range(n)):
        raise Unsupported("an index among channels compared with numbers")
    dim = len(shape) - values.tensor.ndim + dims[0]
    if at.labels.ndim >= len(shape) - dim and at.labels.shape[dim - len(shape)] != 1:
        raise Unsupported("an index among channels compared with numbers")
    return _along_channels(system, at, dim, shape)


# ------------------------------------------------------------ tokens sorted by their channel
def taken_from(index: Chosen, shape: Sequence[int]) -> Index:
    """Some elements of an `Index`, which are one."""
    if not isinstance(index, Index):
        raise Unsupported("counts of an index among channels, taken one by one")
    return Index(fixed(shape).labels, index.channels)


def cast_index(node: Node, x: Chosen) -> Chosen:
    """The same numbers in another type."""
    if node.meta["val"].dtype == torch.bool:
        raise Unsupported("an index among channels")
    return type(x)(x.labels, x.channels)


def sort_index(x: Chosen) -> tuple[Index, Value]:
    """An `Index` in order, and where its elements stood.

    That order changes when channels do. It is that of tokens, which nothing is tied to, and the
    check would refute the exchange if it did not end where it began.
    """
    return taken_from(x, x.labels.shape), fixed(x.labels.shape)


def count_index(
    system: Constraints,
    node: Node,
    x: Any,
    bins: int = 100,
    low: int | float = 0,
    high: int | float = 0,
) -> Counts:
    """``histc`` of an `Index` with one bin for each of its channels."""
    if not isinstance(x, Index) or (bins, low, high) != (len(x.channels), 0, len(x.channels) - 1):
        raise Unsupported("counts of numbers")
    return Counts(fixed(shape_of(node)).labels, x.channels)


def sum_of_counts(node: Node, x: Chosen) -> Ends:
    """Where the tokens of every channel end, once sorted."""
    if not isinstance(x, Counts):
        raise Unsupported("an index among channels, summed up")
    return Ends(fixed(shape_of(node)).labels, x.channels)
