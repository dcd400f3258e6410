"""How repetition treats channels: copies may be exchanged, where they are told apart later."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import copies
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import Value, compress, moving_dims
from lightning_bnn.symmetry.rules.shape import rearrange

__all__ = ["repeat", "repeat_interleave", "repeated"]


def repeat_interleave(
    system: Constraints, node: Node, x: Any, repeats: Any = None, dim: Any = None, **kwargs: Any
) -> Any:
    """Every channel, several times in a row."""
    if not isinstance(x, Value) or not isinstance(repeats, int) or dim is None:
        again = {} if dim is None else {"dim": dim}
        return rearrange(system, node, x, repeats, **again, **kwargs)
    return Value(repeated(system, x.labels, dim % x.labels.ndim, repeats))


def repeat(system: Constraints, node: Node, x: Any, sizes: Any, *args: Any) -> Any:
    """All channels, one set after the other."""
    if not isinstance(x, Value):
        return rearrange(system, node, x, sizes, *args)
    labels = x.labels[(None,) * (len(sizes) - x.labels.ndim)]
    for dim, number in enumerate(sizes):
        if labels.shape[dim] > 1:  # else it is what broadcasting makes, and stays visible
            labels = repeated(system, labels, dim, number, in_turn=True)
    return Value(labels)


def repeated(
    system: Constraints, labels: Tensor, dim: int, number: int, in_turn: bool = False
) -> Tensor:
    """Labels repeated along a dimension: as copies where it has channels, or one element only.

    Args:
        system: where copies are stated to belong together.
        labels: those to repeat.
        dim: dimension along which they are repeated.
        number: how often.
        in_turn: all of them one after the other, instead of each several times.
    """
    has_channels = dim in moving_dims(labels) or (labels.shape[dim] == 1 and dim > 0)
    if number == 1:
        return labels
    if not has_channels:
        return compress(labels.repeat_interleave(number, dim))
    at = dim if in_turn else dim + 1
    return compress(copies(system, labels.unsqueeze(at), at, number).flatten(dim, dim + 1))
