"""Nodes of traced graphs: what they call, what they write, and what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

__all__ = ["ancestors", "descendants", "first_written", "is_random", "operation_of", "writes"]


def operation_of(node: Node) -> str:
    """The bare name of an operation, such as ``add``, or ``mylib.add`` of others."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).replace("::", ".").removeprefix("aten.")
    return str(getattr(node.target, "__name__", node.target))


def is_random(node: Node) -> bool:
    """True for an operation that may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def writes(node: Node) -> bool:
    """True for an operation that writes into its first argument."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def first_written(node: Node) -> Node:
    """The tensor that a chain of operations in place writes."""
    while writes(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Nodes and everything that they depend on: dead code must not constrain a channel."""
    return _reached(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """Nodes and everything that is computed from them."""
    return _reached(nodes, lambda node: node.users)


def _reached(nodes: Iterable[Node], beside: Callable[[Node], Iterable[Node]]) -> set[Node]:
    reached: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += beside(node)
    return reached
