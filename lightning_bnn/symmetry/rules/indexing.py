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

from lightning_bnn.symmetry.rules.broadcasting import tie_to_choice, unify
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
    narrow_except,
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
    "take_along_dim",
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
    labels = system.labels(x).expand(_shape_of_argument(node, 0))
    if isinstance(at, Index):
        chosen = chosen_of(system, labels, dim % labels.ndim, at)
        return Value(core(chosen).expand(shape_of(node)))
    return _picked(system, node, labels, dim, at)


def take_along_dim(system: Constraints, node: Node, x: Any, at: Any, dim: Any = None) -> Value:
    """As `gather`, of operands that are broadcast."""
    if dim is None or isinstance(x, Chosen) or isinstance(at, Chosen):
        raise Unsupported("an index among flattened elements, or among channels")
    return _picked(system, node, system.labels(x), dim, at)


def _picked(system: Constraints, node: Node, labels: Tensor, dim: int, at: Any) -> Value:
    """What positions along one dimension hold; channels mix where these are the same for all."""
    if _depends_on_channels(at):
        raise Unsupported("an index computed from channels")
    shape = shape_of(node)
    dim %= len(shape)
    _kept(labels, [dim], "channels picked by an index computed from the input")
    one = labels.narrow(dim, 0, 1)
    one = one[tuple(slice(1 if d == dim else n) for d, n in enumerate(shape))]
    tie_to_choice(system, system.labels(at), one)
    return Value(one.expand(shape))


def _shape_of_argument(node: Node, position: int) -> torch.Size:
    argument = node.args[position]
    assert isinstance(argument, Node)
    return shape_of(argument)


# ------------------------------------------------------------ written where the input says
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
    shape = shape_of(node)
    dim %= len(shape)
    if isinstance(at, Index):
        return scatter_channels(system, node, x, dim, at, source)
    if _depends_on_channels(at):
        raise Unsupported("an index computed from channels")
    labels = system.labels(x).expand(shape).narrow(dim, 0, 1)
    _kept(system.labels(x), [dim], "channels written by an index computed from the input")
    if isinstance(source, int | float):
        sent = system.labels(source)[(None,) * len(shape)]
    else:
        sent = system.labels(source).expand(_shape_of_argument(node, 3))
    _kept(sent, [dim], "channels sent by an index computed from the input")
    labels = _joined(system, labels, sent.narrow(dim, 0, 1))
    where = system.labels(at)
    if where.ndim == len(shape):
        tie_to_choice(system, where, labels)
    reduces = kwargs.get("reduce", next((a for a in args if isinstance(a, str)), "sum"))
    if reduces in ("prod", "multiply"):
        raise Unsupported("a product over what is scattered")
    if reduces in ("amax", "amin"):
        system.freeze(labels, ("sign",))
        system.mark(labels, "diagonal")
    return Value(labels.expand(shape))


def _joined(system: Constraints, base: Tensor, sent: Tensor) -> Tensor:
    """Channels of a tensor and of what is written into it, if it reaches all of them."""
    moving = moving_dims(base, sent)
    if base.ndim != sent.ndim or any(1 < sent.shape[d] < base.shape[d] for d in moving):
        raise Unsupported("a scatter to some of the channels")
    return unify(system, *(narrow_except(t, moving) for t in (base, sent)))


def index_put(
    system: Constraints, node: Node, x: Any, where: Sequence[Any], source: Any, *args: Any
) -> Value:
    """``x[i] = source`` and ``x[i] += source``: channels that are written agree with the others."""
    if any(isinstance(i, Chosen) for i in (x, source, *where)):
        raise Unsupported("an index among channels")
    if any(_depends_on_channels(i) for i in where):
        raise Unsupported("an index computed from channels")
    shape, nodes = shape_of(node), node.args[1]
    assert isinstance(nodes, Sequence)
    picked, width = _dims_of_indices(nodes)
    base = system.labels(x).expand(shape)
    _kept(base, picked, "channels written by an index computed from the input")
    first = picked[0] if picked == list(range(picked[0], picked[-1] + 1)) else 0
    sent = system.labels(source)
    sent = sent[(None,) * (len(shape) - len(picked) + width - sent.ndim)]
    _kept(sent, range(first, first + width), "channels sent by an index computed from the input")
    sent = sent[(slice(None),) * first + (0,) * width]
    for d in picked:
        base, sent = base.narrow(d, 0, 1), sent.unsqueeze(d)
    return Value(_joined(system, base, sent).expand(shape))


def _dims_of_indices(nodes: Sequence[Any]) -> tuple[list[int], int]:
    """The dimensions that indices take, masks several at once; how many stand in their place."""
    picked: list[int] = []
    dim, widths = 0, [0]
    for at in nodes:
        index = None if at is None else at.meta["val"]
        is_mask = index is not None and index.dtype == torch.bool
        size = index.ndim if index is not None and is_mask else 1
        if index is not None:
            picked += range(dim, dim + size)
            widths.append(1 if is_mask else index.ndim)
        dim += size
    return picked, max(widths)


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
