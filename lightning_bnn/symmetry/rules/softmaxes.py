"""Softmaxes by the graph: whose rows sum to one, and what only a softmax sees."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from lightning_bnn.symmetry.rules.labels import operation_name

__all__ = ["is_forgotten_by_softmax", "rows_sum_to_one"]

_KEEPS_ROWS = frozenset(
    "to _to_copy type_as clone contiguous alias view reshape expand _unsafe_view".split()
)
_ADDS = frozenset("add sub masked_fill where".split())
_MULTIPLIES = frozenset("mul div multiply divide".split())


def rows_sum_to_one(node: Any) -> bool:
    """Whether a tensor is what a softmax over its last dimension returns."""
    while isinstance(node, Node) and node.op == "call_function":
        name, size = operation_name(node).removesuffix("_"), node.meta["val"].shape[-1:]
        if name in ("softmax", "_softmax"):
            return bool(node.args[1] in (-1, node.meta["val"].ndim - 1))
        if name in ("div", "divide") and _is_sum_of_rows(node.args[1], node.args[0]):
            return True
        keeps_all = name == "dropout" and not (node.args[1] and node.args[2])
        if keeps_all or name in _KEEPS_ROWS:
            node = node.args[0]
        else:
            return False
        if not isinstance(node, Node) or node.meta["val"].shape[-1:] != size:
            return False
    return False


def _is_sum_of_rows(node: Any, rows: Any) -> bool:
    """Whether a tensor holds the sums of another one over its last dimension, which it keeps."""
    if not isinstance(node, Node) or node.op != "call_function" or operation_name(node) != "sum":
        return False
    last = node.meta["val"].ndim - 1
    return node.args[0] is rows and node.args[1:] in (([-1], True), ([last], True))


def is_forgotten_by_softmax(node: Node) -> bool:
    """Whether all that becomes of a tensor is a softmax over its last dimension."""
    if not node.meta["val"].ndim:
        return False
    size = node.meta["val"].shape[-1]
    for user in node.users:
        name = operation_name(user).removesuffix("_") if user.op == "call_function" else "output"
        if name in ("softmax", "_softmax"):
            if user.args[0] is node and user.args[1] in (-1, node.meta["val"].ndim - 1):
                continue
            return False
        scaled = name in _MULTIPLIES and user.args[0] is node and not _varies(user.args[1])
        passes = scaled or name in _ADDS or name in _KEEPS_ROWS
        if (
            not passes
            or user.meta["val"].shape[-1:] != (size,)
            or not is_forgotten_by_softmax(user)
        ):
            return False
    return bool(node.users)


def _varies(factor: Any) -> bool:
    """Whether a factor may differ between the elements of a row."""
    return isinstance(factor, Node) and bool(factor.meta["val"].ndim)
