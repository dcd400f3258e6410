"""How running sums, sorting and windows treat channels: along tokens or space they leave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.chosen import sort_index, sum_of_counts
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.elementwise import nonlinear
from lightning_bnn.symmetry.rules.labels import (
    Chosen,
    Unsupported,
    Value,
    along,
    moving_dims,
    operation_name,
    shape_of,
)

__all__ = [
    "argsort",
    "col2im",
    "cumulative_extreme",
    "cumulative_product",
    "cumulative_sum",
    "im2col",
    "masked_scatter",
    "sort",
    "strided",
    "triangle",
]


def _beside_channels(system: Constraints, x: Any, dims: Sequence[int], what: str) -> Tensor:
    """Labels of an operand, which do not change along some dimensions."""
    labels = system.labels(x)
    if {d % labels.ndim for d in dims} & set(moving_dims(labels)):
        raise Unsupported(f"{what} over channels")
    return labels


def cumulative_sum(system: Constraints, node: Node, x: Any, dim: int, **kwargs: Any) -> Value:
    """Running sums over tokens: everything passes."""
    if isinstance(x, Chosen):
        return sum_of_counts(node, x)
    return Value(_beside_channels(system, x, [dim], "a running sum"))


def cumulative_product(system: Constraints, node: Node, x: Any, dim: int, **kwargs: Any) -> Value:
    """Running products over tokens, and others that are not linear: permutations pass."""
    labels = _beside_channels(system, x, [dim], "a running product")
    return nonlinear(system, node, Value(labels))


def cumulative_extreme(system: Constraints, node: Node, x: Any, dim: int) -> Any:
    """Running extremes over tokens, and where they stand: scales pass, signs do not."""
    labels = _beside_channels(system, x, [dim], "a running extreme")
    system.freeze(labels, ("sign",))
    return Value(labels), Value(system.follow(labels, ()))


def sort(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Every channel by itself, sorted over tokens: scales pass, signs do not."""
    if isinstance(x, Chosen):
        return sort_index(x)
    numbers = [a for a in args if not isinstance(a, bool) and a is not None]
    dim = kwargs.get("dim", numbers[0] if numbers else -1)
    labels = _beside_channels(system, x, [dim], "sorting")
    system.freeze(labels, ("sign",))
    return Value(labels), Value(system.follow(labels, ()))


def argsort(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """Where the sorted tokens of every channel stood."""
    places: Value = sort(system, node, x, *args, **kwargs)[1]
    return places


def triangle(system: Constraints, node: Node, x: Any, *args: Any) -> Value:
    """Zeros on one side of the diagonal of pairs of tokens."""
    return Value(_beside_channels(system, x, [-1, -2], "a triangle"))


def strided(system: Constraints, node: Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    """A view by strides says nothing about dimensions."""
    raise Unsupported("a view by strides, whose dimensions are not known")


def im2col(system: Constraints, node: Node, x: Any, kernel: Sequence[int], *args: Any) -> Value:
    """Every channel, once for each place in a window."""
    labels = _beside_channels(system, x, [-1, -2], "windows")
    channels = system.collapse(labels, [labels.ndim - 3])
    windows = channels.repeat_interleave(kernel[0] * kernel[1])
    return Value(along(windows, labels.ndim - 3, shape_of(node)))


def col2im(
    system: Constraints, node: Node, x: Any, size: Any, kernel: Sequence[int], *args: Any
) -> Value:
    """Places in windows are summed: those of a channel are that channel."""
    labels = _beside_channels(system, x, [-1], "windows")
    rows = system.collapse(labels, [labels.ndim - 2]).reshape(-1, kernel[0] * kernel[1])
    return Value(along(system.collapse(rows, [0]), labels.ndim - 2, shape_of(node)))


def masked_scatter(system: Constraints, node: Node, x: Any, mask: Any, source: Any) -> Value:
    """Whole tokens replaced by others, such as those of an image."""
    into, what = system.labels(x), system.labels(source)
    last = shape_of(node)[-1]
    if not _by_tokens(node.args[1]) or what.shape[-1] not in (1, last):
        raise Unsupported("a scatter of single elements")
    into, what = (t.expand(*t.shape[:-1], last) for t in (into, what))
    rows = [system.collapse(t, [t.ndim - 1]) for t in (into, what)]
    return Value(along(unify(system, *rows), len(shape_of(node)) - 1, shape_of(node)))


def _by_tokens(mask: Any) -> bool:
    """Whether a mask is the same along its last dimension, as one that was expanded is."""
    names = ("expand", "expand_as", "broadcast_to")
    if not isinstance(mask, Node) or operation_name(mask) not in names:
        return False
    before = mask.args[0]
    return isinstance(before, Node) and before.meta["val"].shape[-1:] == (1,)
