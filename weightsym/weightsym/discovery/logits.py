"""The layer that writes the logits of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from weightsym.dimensions.nodes import operation_of
from weightsym.groups import SoftmaxShift

__all__ = ["find_shift"]

_KEEP_LOGITS = frozenset(
    "view reshape flatten squeeze dropout softmax log_softmax contiguous clone alias".split()
)
"""What may follow the layer that writes the logits without a change of its symmetry."""


def find_shift(results: list[Node], name_of: Callable[[Node], str | None]) -> SoftmaxShift | None:
    """The layer that writes the logits, if only shape operations and softmax follow it.

    Its tensors must be used nowhere else, and all its outputs must see the same inputs.

    Args:
        results: what the network returns.
        name_of: gives the name of a parameter that a node stands for as a whole.
    """
    node: Any = results[0] if len(results) == 1 else None
    while node is not None and node.op == "call_function" and operation_of(node) in _KEEP_LOGITS:
        node = node.args[0] if isinstance(node.args[0], Node) else None
    if node is None or node.op != "call_function":
        return None
    operation, tensors = operation_of(node), [n for n in node.args[1:3] if isinstance(n, Node)]
    grouped = operation == "conv2d" and len(node.args) > 6 and node.args[6] != 1
    names = [name for n in tensors if len(n.users) == 1 and (name := name_of(n)) is not None]
    if operation not in ("linear", "conv2d") or grouped or not names or len(names) < len(tensors):
        return None
    if tensors[0].meta["val"].shape[0] < 2:
        return None
    return SoftmaxShift(
        names[0], names[1] if len(names) > 1 else None, -1 if operation == "linear" else 1
    )
