"""What a node computes where no rule is needed: something unknown, a constant, a random draw."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map

from lightning_bnn.symmetry.rules.broadcasting import copies
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import (
    Chosen,
    Constant,
    Factored,
    Gathered,
    Noise,
    Unsupported,
    Value,
    Weight,
    core,
    fixed,
    is_operand,
    noise_of,
    operation_name,
)
from lightning_bnn.symmetry.rules.table import TAKE_WEIGHTS

__all__ = [
    "draw",
    "fold",
    "full_size",
    "has_channels",
    "is_applied",
    "one_law",
    "unknown",
    "with_copies",
]


def has_channels(x: Any) -> bool:
    """Whether a symmetry might move it."""
    return isinstance(x, Weight | Factored | Chosen | Gathered) or (
        isinstance(x, Value) and bool((core(x.labels) != 0).any())
    )


def is_applied(node: Node, active: Container[Node]) -> bool:
    """Whether a layer applies what is computed from weights to an activation."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in active and operation_name(user).removesuffix("_") in TAKE_WEIGHTS:
                return True
            if user not in active and user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def one_law(operands: Iterable[Any]) -> bool:
    """Whether every operand has, in all of its elements, one value or draws of one law."""
    return all(isinstance(x, Noise) or _is_uniform(x) for x in operands)


def _is_uniform(x: Any) -> bool:
    if not isinstance(x, Constant):
        return False
    return not x.tensor.numel() or bool((x.tensor == x.tensor.reshape(-1)[0]).all())


def draw(node: Node, operands: Iterable[Any]) -> Any:
    """A draw, unless the law of what it depends on differs between elements."""
    value = node.meta.get("val")
    return noise_of(node) if one_law(operands) and isinstance(value, Tensor) else unknown(value)


def full_size(values: Mapping[Node, Any]) -> Callable[[Node], Any]:
    """Values by node; what was broadcast gets the size that most rules expect."""

    def get(node: Node) -> Any:
        value, meta = values[node], node.meta.get("val")
        if isinstance(value, Value) and isinstance(meta, Tensor):
            return replace(value, labels=value.labels.expand(meta.shape))
        return value

    return get


def with_copies(system: Constraints, values: Mapping[Node, Any]) -> Callable[[Node], Any]:
    """Values by node; what was broadcast, over other dimensions than the first, becomes copies."""

    def get(node: Node) -> Any:
        value, meta = values[node], node.meta.get("val")
        if type(value) is Value and isinstance(meta, Tensor):
            labels = value.labels
            for dim in range(1, labels.ndim):
                if labels.shape[dim] == 1 < meta.shape[dim]:
                    labels = copies(system, labels, dim, meta.shape[dim])
            return Value(labels.expand(meta.shape))
        return value

    return get


def unknown(value: Any) -> Any:
    """Something that depends on the input alone: fixed under every symmetry."""
    return tree_map(lambda v: fixed(v.shape) if isinstance(v, Tensor) else v, value)


def fold(node: Node, args: Any, kwargs: Any) -> Any:
    """Compute what depends on constants only."""
    args, kwargs = tree_map(
        lambda x: x.tensor if isinstance(x, Constant) else x, (args, kwargs), is_leaf=is_operand
    )
    assert callable(node.target)
    try:
        with torch.no_grad():
            result = node.target(*args, **kwargs)
    except RuntimeError as error:
        if "vmap" in str(error):
            raise Unsupported("a constant that exists only inside of `vmap`") from None
        raise
    return tree_map(lambda v: Constant(v) if isinstance(v, Tensor) else v, result)
