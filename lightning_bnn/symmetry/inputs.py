"""What a forward is called with, by position and by name, and the tensors that it returns."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Inputs", "check_filled", "described", "doubled", "on_network", "tensors_of"]


class Inputs(NamedTuple):
    """Arguments of a forward; a pytree, so that `tree_map` reaches its tensors."""

    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}


def on_network(model: nn.Module, inputs: Inputs) -> Inputs:
    """Inputs on the device, and in the floating type, of the network."""
    parameters = list(model.parameters())
    types = {p.dtype for p in parameters if p.is_floating_point()}
    if not parameters:
        return inputs

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype = next(iter(types)) if len(types) == 1 and x.is_floating_point() else x.dtype
        return x.to(parameters[0].device, dtype)

    moved: Inputs = tree_map(move, inputs)
    return moved


def check_filled(inputs: Inputs) -> None:
    """An input without a row shows nothing of a network."""
    empty = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and not t.numel()]
    if empty:
        raise ValueError(
            f"`example` is empty: it holds a tensor of shape {tuple(empty[0].shape)}; "
            "pass at least one row."
        )


def doubled(inputs: Inputs) -> Inputs | None:
    """A batch of one row as a batch of two; None where that is not what it is.

    Batch norm does not train on one row.
    """
    sizes = {t.shape[:1] for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim}
    if sizes != {torch.Size([1])}:
        return None

    def twice(t: Any) -> Any:
        return torch.cat([t, t]) if isinstance(t, Tensor) and t.ndim else t

    pair: Inputs = tree_map(twice, inputs)
    return pair


def tensors_of(outputs: Any) -> list[Tensor]:
    """All tensors in what a forward returns; a cache, or another object of its own, is none."""
    tensors = []
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf):
            tensors += tensors_of([getattr(leaf, f.name) for f in fields(leaf)])
    return tensors


def described(inputs: Inputs) -> str:
    """The inputs in the words of an error message."""
    parts = [_describe(x) for x in inputs.args]
    parts += [f"`{name}` = {_describe(x)}" for name, x in inputs.named.items()]
    return ", ".join(parts) or "a call without inputs"


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        kind = "" if x.dtype == torch.float32 else f" ({str(x.dtype).removeprefix('torch.')})"
        return f"an input of shape {tuple(x.shape)}{kind}"
    hint = " (unpack it with *)" if isinstance(x, tuple | list) else ""
    return f"a {type(x).__name__}{hint}"
