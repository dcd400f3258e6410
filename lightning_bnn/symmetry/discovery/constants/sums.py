"""Sums, multiples and softmaxes of what constants are added to."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from lightning_bnn.symmetry.discovery.constants.layers import layer, with_bias
from lightning_bnn.symmetry.discovery.constants.operands import (
    Added,
    Followed,
    Scores,
    Unbiased,
    equal_along,
    size_of,
)
from lightning_bnn.symmetry.rules.labels import (
    Unsupported,
    Weight,
    core,
    operation_name,
    shape_of,
)

__all__ = [
    "add",
    "dropout",
    "layer_without_bias",
    "masked",
    "multiplied",
    "negated",
    "softmax",
    "where",
]


def dropout(
    followed: Followed, node: Node, x: Any, p: float = 0.5, train: bool = True, *args: Any
) -> Any:
    """In training what is added would be dropped, too."""
    if train and p > 0:
        followed.see(x)
        return None
    return x


def add(followed: Followed, node: Node, x: Any, y: Any, alpha: Any = 1, **kwargs: Any) -> Any:
    """What is added to a sum is the sum of what is added to its parts."""
    sign = -1 if operation_name(node).removesuffix("_") in ("sub", "subtract") else 1
    times = sign * alpha
    if times != int(times):
        raise Unsupported("a fraction")
    if times == 1 and (found := _by_hand(followed, node, x, y)) is not None:
        return found[0]
    x, y = (layer_without_bias(followed, n, v) for n, v in zip(node.args[:2], (x, y), strict=True))
    if isinstance(x, Scores) or isinstance(y, Scores):
        return _sum_of_scores(followed, node, x, y, int(times))
    parts = [(followed.numbers(v), t) for v, t in ((x, 1), (y, int(times)))]
    whole = [(n.expand(shape_of(node)), t) for n, t in parts if n is not None]
    return followed.added(followed.system.combine(whole)) if whole else None


def _by_hand(followed: Followed, node: Node, x: Any, y: Any) -> tuple[Any] | None:
    """A bias that is added to what a matrix has made."""
    for product, bias, at in ((x, y, 0), (y, x, 1)):
        source: Any = node.args[at]
        single = isinstance(product, Unbiased) and len(source.users) == 1
        if single and isinstance(bias, Weight) and bias.shape == shape_of(node)[-1:]:
            return (with_bias(followed, node, product, bias),)
    return None


def layer_without_bias(followed: Followed, node: Any, x: Any) -> Any:
    """A layer to which no bias was added."""
    if not isinstance(x, Unbiased):
        return x
    return layer(followed, node, x.incoming, x.weight, None, x.out_dim)


def _sum_of_scores(followed: Followed, node: Node, x: Any, y: Any, times: int) -> Any:
    """Scores and what does not vary along their rows; the largest of a row cancels it."""
    if times == -1 and isinstance(y, Scores) and y.largest is not None and y.largest is x:
        return None
    found = []
    for v in (x, y):
        if not isinstance(v, Scores):
            equal_along(followed, v, -1)
        numbers = followed.numbers(v)
        if numbers is not None:
            found.append(core(numbers).reshape(-1).unique())
    wide = [size_of(n)[-1:] for n in node.args[:2] if isinstance(n, Node)]
    if any(size not in (shape_of(node)[-1:], (1,), ()) for size in wide):
        raise Unsupported("rows of another length")
    return Scores(torch.cat(found).unique())


def negated(followed: Followed, node: Node, x: Any) -> Any:
    """What is negated gains the opposite."""
    if isinstance(x, Scores):
        return Scores(x.numbers)
    numbers = followed.numbers(x)
    return None if numbers is None else followed.added(followed.system.combine([(numbers, -1)]))


def multiplied(followed: Followed, node: Node, x: Any, y: Any) -> Any:
    """Times a number; times numbers of the network, a constant that no layer takes up."""
    first, second = node.args[:2]
    divides = operation_name(node).removesuffix("_") in ("div", "divide", "true_divide")
    if not divides and not isinstance(x, Added | Scores):
        x, y, first, second = y, x, second, first
    if not isinstance(x, Added | Scores) or isinstance(y, Added | Scores):
        raise Unsupported("a product of what is added to")
    followed.see(y)
    if isinstance(x, Scores):
        if _varies_along_rows(second):
            raise Unsupported("scores that are scaled one by one")
        return Scores(x.numbers)
    if isinstance(second, int) and second and not divides:
        return followed.added(followed.system.combine([(x.numbers, second)]))
    if isinstance(second, int | float):
        return followed.added(followed.made_of(x.numbers))
    if not isinstance(y, Weight):
        raise Unsupported("a product of activations")
    shape = shape_of(node)
    beside = tuple(c.expand(shape) for c in y.coords)
    return followed.added(followed.made_of(x.numbers.expand(shape), beside))


def _varies_along_rows(factor: Any) -> bool:
    if not isinstance(factor, Node):
        return False
    return size_of(factor)[-1:] not in ((), (1,))


def softmax(followed: Followed, node: Node, x: Any, dim: int, *args: Any, **kwargs: Any) -> None:
    """Forgets what is added to all that it compares."""
    if isinstance(x, Scores):
        if dim % len(shape_of(node)) != len(shape_of(node)) - 1:
            followed.see(x)
        return
    numbers = followed.numbers(x)
    if numbers is not None:
        equal_along(followed, x, dim)


def masked(followed: Followed, node: Node, x: Any, mask: Any, value: Any) -> Any:
    """Scores of which some are hidden."""
    if isinstance(x, Scores) and mask is None and value is None:
        return x
    raise Unsupported("a mask")


def where(followed: Followed, node: Node, condition: Any, x: Any, y: Any) -> Any:
    """Scores of which some are hidden."""
    scores = [v for v in (x, y) if isinstance(v, Scores)]
    if condition is None and len(scores) == 1 and (x is None or y is None):
        return scores[0]
    raise Unsupported("a choice")
