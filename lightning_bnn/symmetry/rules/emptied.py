"""Slices of which the example leaves nothing: what a longer one would put there is not known."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.labels import operation_name

__all__ = ["REASON", "is_emptied", "would_be_longer"]

REASON = "nothing is left of a slice in the example; pass a longer one"


def would_be_longer(node: Node) -> bool:
    """Whether a slice is empty for the length of what it cuts: ``x[:, 1:]``, ``x[:, :-1]``.

    ``x[:, :0]`` is empty whatever the length is.
    """
    cut, (start, end) = node.args[0], (*node.args[2:4], None, None)[:2]
    if not isinstance(cut, Node) or node.meta["val"].numel() or not cut.meta["val"].numel():
        return False
    return start not in (None, 0) or (isinstance(end, int) and end < 0)


def is_emptied(node: Node) -> bool:
    """Whether a tensor is empty because such a slice is, however it was computed from it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.numel():
        return False
    if operation_name(node) == "slice" and would_be_longer(node):
        return True
    return any(is_emptied(source) for source in node.all_input_nodes)
