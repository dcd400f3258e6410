"""How indices treat channels: gathers and scatters, along batch dimensions or among channels.

What depends on the input alone (the edges of a graph, the tokens of a text) picks positions that no
symmetry moves, so that they pick among whatever is not a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.chosen import chosen_of, scatter_channels, taken_from
from lightning_bnn.symmetry.rules.constraints import Constraints, Record
from lightning_bnn.symmetry.rules.gathered import rows_at
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Chosen,
    Constant,
    Index,
    Unsupported,
    Value,
    Weight,
    along,
    core,
    fixed,
    moving_dims,
    operation_name,
    shape_of,
)
from lightning_bnn.symmetry.rules.lookahead import is_added_to_scores
from lightning_bnn.symmetry.rules.shape import rearrange

__all__ = [
    "embedding_bag",
    "gather",
    "index",
    "index_put",
    "scatter",
]


def _depends_on_channels(x: Any) -> bool:
    return isinstance(x, Chosen) or (
        isinstance(x, Value) and bool((core(x.labels) != FROZEN).any())
    )


def _kept(labels: Tensor, dims: Sequence[int], why: str) -> None:
    if set(dims) & set(moving_dims(labels)):
        raise Unsupported(why)


# ------------------------------------------------------------ picked by the input
def index(system: Constraints, node: Node, x: Any, *args: Any) -> Any:
    """``x[i]`` and ``index_select``: rows of what is not a channel, or rows of a table."""
    by_select = operation_name(node) == "index_select"
    where = [None] * (args[0] % ndim_of(x)) + [args[1]] if by_select else list(args[0])
    if isinstance(x, Chosen):
        return _of_index(x, where, shape_of(node))
    if not any(isinstance(i, Value) for i in where):
        if isinstance(x, Weight) and _is_table_of_positions(x, where) and is_added_to_scores(node):
            return _table_of_positions(system, x, where, shape_of(node))
        return rearrange(system, node, x, *args)
    picked = [d for d, i in enumerate(where) if i is not None]
    shape = shape_of(node)
    if isinstance(x, Weight) and picked == [0] and not _is_hidden(where[0]):
        at = node.args[2] if by_select else node.args[1][0]  # type: ignore[index]
        return rows_at(system, x, where[0], at, shape)
    among = [d for d, i in enumerate(where) if _depends_on_channels(i)]
    if len(among) > 1 or not all(isinstance(where[d], Index) for d in among):
        raise Unsupported("an index computed from channels")
    if isinstance(x, Weight):
        raise Unsupported("a weight indexed by an activation")
    labels = system.labels(x)
    for d in among:
        labels = chosen_of(system, labels, d, where[d])
    _kept(labels, picked, "channels picked by an index computed from the input")
    return Value(_after_index(labels, where, picked, shape))


def _of_index(x: Chosen, where: Sequence[Any], shape: torch.Size) -> Index:
    """Some elements of an `Index`, picked by what no symmetry moves."""
    if any(_depends_on_channels(i) for i in where):
        raise Unsupported("an index computed from channels")
    return taken_from(x, shape)


def _is_table_of_positions(weight: Weight, where: Sequence[Any]) -> bool:
    """Whether constants pick rows (or columns) of a parameter, some of them more than once."""
    at = [i for i in where if i is not None]
    if weight.is_buffer or len(weight.full_shape) != 2 or weight.shape != weight.full_shape:
        return False
    picks = at[0].tensor if len(at) == 1 and isinstance(at[0], Constant) else None
    return (
        picks is not None and picks.dtype == torch.long and picks.numel() > picks.unique().numel()
    )


def _table_of_positions(
    system: Constraints, weight: Weight, where: Sequence[Any], shape: torch.Size
) -> Value:
    """Relative positions: what every head adds to its scores is one channel."""
    heads = 1 if where[0] is not None else 0
    out = system.fresh(weight.shape[heads])
    system.consume(weight, Record(heads, out, "out"))
    return Value(along(out, len(shape) - 1 if heads else 0, shape))


def ndim_of(x: Any) -> int:
    """How many dimensions an operand has."""
    return x.labels.ndim if isinstance(x, Value) else len(getattr(x, "tensor", x).shape)


def _after_index(
    labels: Tensor, where: Sequence[Any], picked: Sequence[int], shape: torch.Size
) -> Tensor:
    """Labels of what is picked: dimensions of the indices stand where advanced indexing says."""
    width = max(ndim_of(where[d]) for d in picked)
    adjacent = list(picked) == list(range(picked[0], picked[-1] + 1))
    first = picked[0] if adjacent else 0
    for d in reversed(picked):
        labels = labels.select(d, 0)
    for _ in range(width):
        labels = labels.unsqueeze(first)
    return labels.expand(shape)


def _is_hidden(at: Any) -> bool:
    return not isinstance(at, Index) and _depends_on_channels(at)


def gather(system: Constraints, node: Node, x: Any, dim: int, at: Any, **kwargs: Any) -> Value:
    """Elements along one dimension: positions that do not move, or channels that ``topk`` found."""
    if isinstance(x, Chosen):
        return _of_index(x, [at], shape_of(node))
    labels, shape = system.labels(x), shape_of(node)
    dim %= labels.ndim
    if isinstance(at, Index):
        return Value(core(chosen_of(system, labels, dim, at)).expand(shape))
    if _depends_on_channels(at):
        raise Unsupported("an index computed from channels")
    _kept(labels, [dim], "channels picked by an index computed from the input")
    return Value(
        labels.narrow(dim, 0, 1).expand(*labels.shape[:dim], shape[dim], *labels.shape[dim + 1 :])[
            tuple(slice(n) for n in shape)
        ]
    )


def scatter(
    system: Constraints,
    node: Node,
    x: Any,
    dim: int,
    at: Any,
    source: Any,
    *args: Any,
    **kwargs: Any,
) -> Value:
    """Sums, means, extremes or copies of what is sent to each position: channels must agree."""
    if isinstance(x, Chosen) or isinstance(source, Chosen):
        raise Unsupported("an index among channels")
    shape, base = shape_of(node), system.labels(x)
    dim %= len(shape)
    if isinstance(at, Index):
        return scatter_channels(system, node, x, dim, at, source)
    if _depends_on_channels(at):
        raise Unsupported("an index computed from channels")
    sent = system.labels(source) if not isinstance(source, int | float) else fixed(shape).labels
    _kept(base, [dim], "channels written by an index computed from the input")
    if isinstance(source, int | float) and source != 0:
        system.freeze(base, ("scale", "sign"))
    _kept(sent, [dim], "channels sent by an index computed from the input")
    reduces = kwargs.get("reduce", next((a for a in args if isinstance(a, str)), "sum"))
    if reduces in ("amax", "amin"):
        system.freeze(base, ("sign",))
        system.freeze(sent, ("sign",))
    if reduces in ("prod", "multiply"):
        raise Unsupported("a product over what is scattered")
    return Value(_written(system, base, sent, dim, shape, isinstance(source, int | float)))


def _written(
    system: Constraints, base: Tensor, sent: Tensor, dim: int, shape: torch.Size, number: bool
) -> Tensor:
    base = base.narrow(dim, 0, 1) if base.shape[dim] > 1 else base
    if number:
        return base.expand(shape)
    if sent.ndim != base.ndim:
        raise Unsupported("a scatter between different dimensions")
    return unify(system, base, sent.narrow(dim, 0, 1)).expand(shape)


def index_put(
    system: Constraints, node: Node, x: Any, where: Sequence[Any], source: Any, *args: Any
) -> Value:
    """``x[i] = source`` and ``x[i] += source`` for rows of the first dimension."""
    at = where[0]
    if len(where) != 1 or at is None or ndim_of(at) != 1 or ndim_of(source) != ndim_of(x):
        raise Unsupported("a write to several dimensions")
    return scatter(system, node, x, 0, at, source)


def embedding_bag(system: Constraints, node: Node, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums, means or maxima of rows of a table."""
    shape = node.meta["val"][0].shape
    if not isinstance(weight, Weight):
        raise Unsupported("a table that is computed")
    if any(_depends_on_channels(x) for x in (*args, *kwargs.values())):
        raise Unsupported("indices or weights of a bag that are computed from channels")
    out = system.fresh(weight.shape[1])
    system.consume(weight, Record(1, out, "out"))
    mode = args[3] if len(args) > 3 else kwargs.get("mode", 0)
    if mode == 2:
        system.freeze(out, ("sign",))
        system.mark(out, "diagonal")
    rest = (fixed(v.shape) for v in node.meta["val"][1:])
    return (Value(along(out, len(shape) - 1, shape)), *rest)
