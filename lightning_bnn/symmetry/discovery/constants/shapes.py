"""Rearrangements, executed on the numbers of constants that are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map

from lightning_bnn.symmetry.discovery.constants.operands import (
    Added,
    Followed,
    Scores,
    size_of,
)
from lightning_bnn.symmetry.rules import shape as channel_shapes
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import (
    Unsupported,
    Value,
    Weight,
    along,
    compress,
    moving_dims,
    narrow_except,
    operation_name,
    shape_of,
)

__all__ = ["expanded", "joined", "padded", "picked", "rearranged", "unchanged"]


def rearranged(followed: Followed, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Any rearrangement, executed on the numbers."""
    if isinstance(x, Scores):
        return _kept_rows(followed, node, x)
    inside = Value(x.numbers) if isinstance(x, Added) else x
    found = channel_shapes.rearrange(Constraints(), node, inside, *args, **kwargs)
    return tree_map(lambda v: followed.added(v.labels) if isinstance(v, Value) else v, found)


def _kept_rows(followed: Followed, node: Node, x: Scores) -> Scores | None:
    """Scores stay scores where their last dimension does."""
    before, after = size_of(node.args[0]), node.meta["val"]
    moves = operation_name(node) in ("transpose", "permute", "t", "mT", "movedim", "swapaxes")
    if moves or not isinstance(after, Tensor) or after.shape[-1:] != before[-1:]:
        followed.see(x)
        return None
    return x


def expanded(followed: Followed, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Copies along new dimensions gain the same."""
    if isinstance(x, Weight):
        return rearranged(followed, node, x, *args, **kwargs)
    if isinstance(x, Scores):
        return _kept_rows(followed, node, x)
    return followed.added(x.numbers.expand(shape_of(node)))


def joined(followed: Followed, node: Node, parts: Sequence[Any], dim: int = 0) -> Any:
    """Tensors side by side, along a dimension or along a new one."""
    assert callable(node.target)
    sources: Any = node.args[0]
    full = [_whole(followed, n, x) for n, x in zip(sources, parts, strict=True)]
    kept = [t for t in full if t.shape != (0,)]
    return Added(compress(node.target(kept, dim)))


def _whole(followed: Followed, node: Node, x: Any) -> Tensor:
    size = size_of(node)
    if isinstance(x, Scores):
        followed.see(x)
    numbers = None if isinstance(x, Scores) else followed.numbers(x)
    if isinstance(x, Weight):  # a part of a bias takes up what it must not gain
        numbers = followed.elements_of(x)
    return torch.zeros(size, dtype=torch.long) if numbers is None else numbers.expand(size)


def padded(
    followed: Followed, node: Node, x: Any, widths: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """To constants at the border nothing is added."""
    mode = args[0] if args and isinstance(args[0], str) else "constant"
    numbers = followed.numbers(x)
    if mode != "constant" or numbers is None or isinstance(x, Scores):
        raise Unsupported("another padding")
    return followed.added(compress(torch.nn.functional.pad(numbers, list(widths))))


def picked(followed: Followed, node: Node, x: Any, which: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows that are picked, where the same is added to all of them; rows or columns of a table."""
    by_dim = isinstance(which, int)
    sources: Any = node.args[1]
    dims = [which] if by_dim else [k for k, i in enumerate(sources) if i is not None]
    size, shape = size_of(node.args[0]), shape_of(node)
    if len(dims) != 1:
        raise Unsupported("several indices")
    at = dims[0] % len(size)
    if isinstance(x, Weight) and len(size) == 2 and x.shape == x.full_shape:
        kept = 0 if at else len(shape) - 1
        return followed.added(along(followed.columns_of(x, 1 - at), kept, shape))
    numbers = followed.numbers(x)
    if isinstance(x, Scores) or numbers is None or at in moving_dims(numbers):
        raise Unsupported("rows that differ")
    longer = len(shape) - len(size)
    view = narrow_except(numbers, moving_dims(numbers)).select(at, 0)
    for _ in range(longer + 1):
        view = view.unsqueeze(at)
    return followed.added(view.expand(shape))


def unchanged(followed: Followed, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Element by element the same."""
    return x
