"""Averages, pools and norms: they pass on what all places gain, or forget it, or see it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.discovery.constants.operands import Followed, Scores, size_of
from lightning_bnn.symmetry.rules.labels import (
    Unsupported,
    Weight,
    moving_dims,
    narrow_except,
    operation_name,
    shape_of,
)

__all__ = [
    "forgets",
    "mean",
    "norm_of_batch",
    "norm_of_groups",
    "norm_of_instances",
    "norm_of_rows",
    "pooled",
    "total",
]


def mean(followed: Followed, node: Node, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """An average, or an extreme, of what gains the same gains it."""
    return _reduced(followed, node, x, dim, args, kwargs, 1)


def total(
    followed: Followed, node: Node, x: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """A sum of what gains the same gains it as often as there are summands."""
    return _reduced(followed, node, x, dim, args, kwargs, 0)


def forgets(
    followed: Followed, node: Node, x: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> None:
    """A variance, which does not see what all gain."""
    _reduced(followed, node, x, dim, args, kwargs, 1)


def _reduced(
    followed: Followed, node: Node, x: Any, dim: Any, args: Any, kwargs: Any, times: int
) -> Any:
    value = node.meta["val"]
    if isinstance(x, Scores) and operation_name(node) in ("amax", "max"):
        return _largest(node, x, dim)
    numbers = followed.numbers(x)
    if numbers is None or isinstance(x, Scores):
        raise Unsupported("no constant")
    dims = [dim] if isinstance(dim, int) else dim
    dims = [d % numbers.ndim for d in (dims or range(numbers.ndim))]
    if set(dims) & set(moving_dims(numbers)):
        raise Unsupported("channels that are summed")
    count = times or prod(numbers.shape[d] for d in dims)
    first = value[0] if isinstance(value, tuple | list) else value
    kept = first.ndim == numbers.ndim
    for d in sorted(dims, reverse=True):
        numbers = numbers.narrow(d, 0, 1) if kept else numbers.select(d, 0)
    if count != 1:
        found = followed.system.combine([(numbers, count)])
        return None if found is None else followed.added(found.expand(first.shape))
    result = followed.added(numbers.expand(first.shape))
    return result if isinstance(value, Tensor) else (result, *(None,) * (len(value) - 1))


def _largest(node: Node, x: Scores, dim: Any) -> Any:
    """The largest of every row of scores gains what they gain."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    last = len(size_of(node.args[0])) - 1
    dims = [dim] if isinstance(dim, int) else dim
    if dims is None or [d % (last + 1) for d in dims] != [last] or first.ndim != last + 1:
        raise Unsupported("another largest")
    found = Scores(x.numbers, largest=x)
    return found if isinstance(value, Tensor) else (found, *(None,) * (len(value) - 1))


def pooled(followed: Followed, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Averages, extremes and interpolations over space."""
    numbers = followed.numbers(x)
    name = operation_name(node)
    padding = kwargs.get("padding", args[2] if len(args) > 2 else 0)
    averages = name.startswith("avg_pool") and bool(torch.as_tensor(padding).any())
    if numbers is None or isinstance(x, Scores) or averages:
        raise Unsupported("zeros beside what is shifted")
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    changed = [d for d in range(numbers.ndim) if d > 1 or first.ndim < 3]
    if set(changed) & set(moving_dims(numbers)):
        raise Unsupported("places that differ")
    result = followed.added(narrow_except(numbers, moving_dims(numbers)).expand(first.shape))
    return result if isinstance(value, Tensor) else (result, *(None,) * (len(value) - 1))


def norm_of_rows(
    followed: Followed,
    node: Node,
    x: Any,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
) -> Any:
    """A layer norm sees what is added; its bias writes."""
    followed.see(x)
    return _norm(followed, node, weight, bias, len(shape_of(node)) - len(shape))


def norm_of_groups(
    followed: Followed,
    node: Node,
    x: Any,
    groups: Any,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
) -> Any:
    """A group norm sees what is added, too; its bias writes."""
    followed.see(x)
    return _norm(followed, node, weight, bias, 1)


def norm_of_batch(
    followed: Followed,
    node: Node,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A batch norm sees what is added, too; its statistics are those of a constant of its own."""
    followed.see(x)
    found = _norm(followed, node, weight, bias, 1)
    value = node.meta["val"]
    return found if isinstance(value, Tensor) else (found, *(None,) * (len(value) - 1))


def norm_of_instances(
    followed: Followed,
    node: Node,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    mean: Any = None,
    var: Any = None,
    own: bool = True,
    *args: Any,
) -> Any:
    """By statistics of its own it forgets what is added to all places."""
    numbers = followed.numbers(x)
    constant = numbers is not None and not set(moving_dims(numbers)) - {0, 1}
    if not own or not constant:
        followed.see(x)
    return _norm(followed, node, weight, bias, 1)


def _norm(followed: Followed, node: Node, weight: Any, bias: Any, dim: int) -> Any:
    followed.see(weight)
    if not isinstance(bias, Weight):
        followed.see(bias)
        return None
    value = node.meta["val"]
    shape = (value[0] if isinstance(value, tuple | list) else value).shape
    numbers = followed.elements_of(bias)
    view = [1] * len(shape)
    view[dim : dim + numbers.ndim] = numbers.shape
    return followed.added(numbers.reshape(view).expand(shape))
