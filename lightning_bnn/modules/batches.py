"""What is input and what is target in a batch of any loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["inputs_and_targets", "inputs_only"]

_INPUTS = ("x", "input", "inputs", "image", "images", "features", "data")
_TARGETS = ("y", "target", "targets", "label", "labels")


def inputs_and_targets(batch: Any) -> tuple[tuple[Any, ...], Tensor]:
    """Inputs of the network, by position, and targets.

    In a tuple the last one is the target; in a dict they are known by their usual names.

    >>> import torch
    >>> inputs_and_targets({"image": torch.zeros(2), "label": torch.tensor(3)})
    ((tensor([0., 0.]),), tensor(3))
    """
    if isinstance(batch, Mapping):
        return (_named(batch, _INPUTS, "inputs"),), _named(batch, _TARGETS, "targets")
    if isinstance(batch, Sequence) and len(batch) > 1:
        return tuple(batch[:-1]), batch[-1]
    raise ValueError(
        f"A batch must be a tuple (inputs, targets) or a dict, got {type(batch).__name__}. "
        "For another layout override `inputs_and_targets` of the module."
    )


def inputs_only(batch: Any) -> tuple[Any, ...]:
    """Inputs of the network from a batch that may have no targets."""
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        return (_named(batch, _INPUTS, "inputs"),)
    if isinstance(batch, Sequence) and len(batch) == 1:
        return tuple(batch)
    return inputs_and_targets(batch)[0]


def _named(batch: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    found = [name for name in names if name in batch]
    if len(found) != 1:
        held = ", ".join(map(repr, batch)) or "nothing"
        raise ValueError(
            f"The {what} of a dict batch must have one of the names {', '.join(names)}; it has "
            f"{held}. For another layout override `inputs_and_targets` of the module."
        )
    return batch[found[0]]
