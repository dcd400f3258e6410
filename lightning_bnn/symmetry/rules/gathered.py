"""What an index among channels picks from a stack, such as the matrices of the chosen experts.

``relu(x @ w1[at]) @ w2[at]`` are numbers that every expert would compute, of which each token takes
those of its own. They are followed for all experts, along a dimension in front of all others, while
the index is the same one, until what was chosen is needed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels, unify
from lightning_bnn.symmetry.rules.chosen import chosen_of
from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.factored import factored, parts_of
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Gathered,
    Index,
    Unsupported,
    Value,
    Weight,
    along,
    compress,
    core,
    moving_dims,
    operation_name,
    shape_of,
)

__all__ = [
    "along_row",
    "as_chosen",
    "each_row",
    "is_stack",
    "labels_of",
    "made",
    "moved_rows",
    "of_one_token",
    "order_of",
    "rows_at",
    "sum_of_rows",
    "times_rows",
]


# ------------------------------------------------------------ made and ended
def rows_at(
    system: Constraints, weight: Weight, at: Any, node: Any, shape: torch.Size, lead: int = 0
) -> Any:
    """Rows of a stack, as many as an `Index` picks; rows that the input picks have no channels."""
    lead = lead or len(shape) - len(weight.shape) + 1
    walked = [d for c in weight.coords for d in moving_dims(c)]
    stands = sorted(walked) == [d for d, n in enumerate(weight.shape) if n > 1] and 0 in walked
    if isinstance(at, Index) and stands and len(at.channels) == weight.shape[0]:
        return Gathered(weight, at, order_of(node), shape, lead)
    return _rows_of_table(system, weight, at, shape)


def as_chosen(system: Constraints, x: Any) -> Any:
    """What was chosen by itself: of activations the channels that all rows have in common."""
    if not isinstance(x, Gathered):
        return x
    if isinstance(x.what, Weight):
        return _rows_of_table(system, x.what, x.at, x.shape)
    labels = x.what
    picked = chosen_of(system, labels, 0, x.at) if 0 in moving_dims(labels) else labels[:1]
    picked = core(picked)[(0,) + (None,) * x.lead]
    return Value(compress(picked.expand(x.shape)))


def _rows_of_table(system: Constraints, weight: Weight, at: Any, shape: torch.Size) -> Any:
    """Rows of a table: new channels; matrices of a stack have their rows and columns in common.

    Rows that the input picks are held fixed; those that `topk` picks move with its channels.
    """
    width = len(shape) - len(weight.shape) + 1
    if len(weight.shape) == 2 and not isinstance(at, Index):
        out = system.fresh(weight.shape[1])
        system.consume(weight, Record(1, out, "out"))
        return Value(along(out, len(shape) - 1, shape))
    parts = [
        torch.full([shape[d] if d == k else 1 for d in range(len(shape))], FROZEN)
        for k in range(width)
    ]
    for part in parts_of(system, weight):
        if moving_dims(part) == [0]:
            _tie_rows(system, part.reshape(-1), at)
        elif 0 in moving_dims(part):
            raise Unsupported("a weight indexed by an activation")
        else:
            parts.append(part[(0,) + (None,) * width])
    return factored(parts, shape, active=len(weight.shape) == 2)


def _tie_rows(system: Constraints, row: Tensor, at: Any) -> None:
    system.freeze(row, ("scale", "sign"))
    if isinstance(at, Index) and len(row) == len(at.channels):
        system.tie(row, at.channels, ("permutation",))
    else:
        system.freeze(row)
        if isinstance(at, Index):
            system.freeze(at.channels)


_KEEPS_ORDER = frozenset(
    "view reshape flatten _unsafe_view unsqueeze squeeze to _to_copy type_as contiguous clone "
    "alias detach".split()
)
_PARTS = frozenset("select slice narrow getitem transpose permute".split())


def order_of(node: Any) -> Any:
    """Which index a node is: the same for its copies, whatever their shape, and once sorted.

    Counts of an index, and where these end, are those of the sorted one.
    """
    is_sorted = False
    while isinstance(node, Node) and node.op == "call_function":
        name = operation_name(node)
        source: Any = node.args[0]
        if name == "getitem" and operation_name(source) == "sort" and node.args[1] == 0:
            node, is_sorted = source.args[0], True
        elif name in ("histc", "cumsum"):
            node, is_sorted = source, True
        elif name in _KEEPS_ORDER:
            node = source
        elif name in _PARTS:
            return (name, node.args[1:], order_of(source)), is_sorted
        else:
            break
    return node, is_sorted


# ------------------------------------------------------------ element by element
def each_row(rule: Rule) -> Rule:
    """A function of every element by itself."""

    def on_each(system: Constraints, node: Node, x: Gathered, *args: Any, **kwargs: Any) -> Any:
        done = rule(system, node, Value(labels_of(system, x)), *args, **kwargs).labels
        return made(done, x, shape_of(node))

    return on_each


def along_row(rule: Rule) -> Rule:
    """A function of what lies along one dimension, which must not be one of the index."""

    def on_each(system: Constraints, node: Node, x: Gathered, dim: int = -1, *args: Any) -> Any:
        dim = dim - len(x.shape) if dim >= 0 else dim
        if dim < x.lead - len(x.shape):
            raise Unsupported("what lies along the dimension of an index")
        return each_row(rule)(system, node, x, dim, *args)

    return on_each


def sum_of_rows(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Any:
    """A sum with what is the same for all rows, or with rows of the same index."""
    like, both = _side_by_side(system, x, y)
    return made(unify(system, *both), like, shape_of(node))


def times_rows(inverse: bool = False) -> Rule:
    """A product, or a quotient."""

    def rule(system: Constraints, node: Node, x: Any, y: Any, **kwargs: Any) -> Any:
        like, both = _side_by_side(system, x, y)
        return made(multiply_labels(system, both[0], both[1], inverse), like, shape_of(node))

    return rule


def is_stack(x: Any) -> bool:
    """Whether it is rows of a stack of weights themselves."""
    return isinstance(x, Gathered) and isinstance(x.what, Weight)


def _side_by_side(system: Constraints, x: Any, y: Any) -> tuple[Gathered, list[Tensor]]:
    """The operands with the rows in front; what is the same for all rows has one."""
    like = next((z for z in (x, y) if isinstance(z, Gathered) and not is_stack(z)), None)
    if like is None:
        raise Unsupported("rows of a stack by themselves")
    ndim = len(like.shape)
    return like, [_in_front(system, z, like, ndim) for z in (x, y)]


def _in_front(system: Constraints, x: Any, like: Gathered, ndim: int) -> Tensor:
    if isinstance(x, Gathered):
        if (x.order, x.lead, len(x.shape)) != (like.order, like.lead, ndim):
            raise Unsupported("rows of a stack that two indices pick")
        return labels_of(system, x)
    labels = system.labels(x)
    if labels.ndim > ndim:
        raise Unsupported("rows of a stack beside more dimensions")
    return of_one_token(labels[(None,) * (ndim - labels.ndim)], range(like.lead))[None]


def of_one_token(labels: Tensor, dims: Sequence[int]) -> Tensor:
    """The labels without the dimensions of an index, along which no channel changes."""
    if set(dims) & set(moving_dims(labels)):
        raise Unsupported("channels along the dimension of an index")
    for d in sorted(dims, reverse=True):
        labels = labels.select(d, 0)
    return labels


def labels_of(system: Constraints, x: Gathered) -> Tensor:
    """Labels for all rows; of a stack its elements."""
    return system.raw(x.what).labels if isinstance(x.what, Weight) else x.what


def made(what: Tensor | Weight, like: Gathered, shape: torch.Size) -> Gathered:
    """The same rows of something else; dimensions of the index come first."""
    rest = torch.Size(what.shape[1:])
    lead = len(shape) - len(rest)
    size = torch.broadcast_shapes(rest, shape[lead:])
    if prod(shape[:lead]) != prod(like.shape[: like.lead]) or size != shape[lead:]:
        raise Unsupported("rows of a stack in another order")
    if isinstance(what, Tensor):
        what = compress(what.expand(len(like.at.channels), *size))
    return replace(like, what=what, shape=shape, lead=lead)


# ------------------------------------------------------------ shape
def moved_rows(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A rearrangement that leaves the dimensions of the index in front, in their order."""
    if not isinstance(x, Gathered) or any(isinstance(a, Gathered) for a in tree_leaves(args)):
        raise Unsupported("rows of a stack as a shape")
    if isinstance(x.what, Tensor):
        parts: list[Any] = [_moved(node, x.what, x, args, kwargs)]
    else:
        parts = [_moved(node, c, x, args, kwargs) for c in x.what.coords]
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return made(_whole(x.what, parts), x, value.shape)
    columns = zip(*parts, strict=True)
    return tuple(
        made(_whole(x.what, column), x, v.shape) for column, v in zip(columns, value, strict=True)
    )


def _whole(what: Tensor | Weight, parts: Sequence[Tensor]) -> Tensor | Weight:
    """Labels, or a view of a weight, from what became of them or of its coordinates."""
    if isinstance(what, Tensor):
        return parts[0]
    return replace(what, coords=tuple(compress(c) for c in parts))


def _moved(node: Node, rows: Tensor, x: Gathered, args: Any, kwargs: Any) -> Any:
    """What becomes of all rows, if the dimensions of the index stay in front."""
    value, target = node.meta["val"], node.target
    assert callable(target)
    if operation_name(node) in ("view", "reshape", "_unsafe_view", "flatten", "unflatten"):
        lead = _prefix(value.shape, prod(x.shape[: x.lead]))
        return rows.reshape(len(rows), *value.shape[lead:])
    between = (1,) * (x.lead - 1)
    moved = target(rows.reshape(len(rows), *between, *rows.shape[1:]), *args, **kwargs)

    def without(t: Tensor) -> Tensor:
        if t.shape[: x.lead] != (len(rows), *between):
            raise Unsupported("rows of a stack in another order")
        return t.reshape(len(rows), *t.shape[x.lead :])

    return tree_map(without, moved)


def _prefix(shape: Sequence[int], count: int) -> int:
    """How many dimensions at the front have so many elements."""
    lead = next((k for k in range(1, len(shape) + 1) if prod(shape[:k]) == count), None)
    if lead is None:
        raise Unsupported("rows of a stack in another order")
    return lead
