"""Nodes of traced graphs: their operations, side effects and dependencies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node


def operation_of(node: Node) -> str:
    """Return the name of an operation, such as ``add``, or ``mylib.add`` outside of aten."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).replace("::", ".").removeprefix("aten.")
    return str(getattr(node.target, "__name__", node.target))


def leaves_of(x: Any) -> list[Any]:
    """List the leaves of nested lists, tuples and dicts, faster than the general `tree_leaves`."""
    if isinstance(x, dict):
        x = list(x.values())
    return [y for item in x for y in leaves_of(item)] if isinstance(x, list | tuple) else [x]


def called(graph: Graph, target: Any, *args: Any, **named: Any) -> Node:
    """Add a call to a graph, with the size of its result."""
    node = graph.call_function(target, args, named)
    sizes = torch.fx.map_arg((args, named), lambda n: _empty(n.meta["val"]))
    node.meta["val"] = target(*sizes[0], **sizes[1])
    return node


def _empty(size: Tensor) -> Tensor:
    """Return a tensor of the same size on the meta device."""
    return torch.empty(size.shape, dtype=size.dtype, device="meta")


def is_random(node: Node) -> bool:
    """Return whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_symmetric(node: Node) -> bool:
    """Return whether positional operands commute; those with keywords, such as `alpha`, do not."""
    names = ("add", "mul", "cat", "maximum", "minimum", "hypot")
    return operation_of(node) in names and not node.kwargs


def writes(node: Node) -> bool:
    """Return whether an operation writes to its first argument."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def first_written(node: Node) -> Node:
    """Return the tensor that a chain of in-place operations modifies."""
    while writes(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def ancestors(nodes: Iterable[Node], known: Collection[Node] = ()) -> set[Node]:
    """Return nodes and all their dependencies: dead code must not constrain a channel.

    What is ``known`` depends on nothing.
    """
    return _reached(nodes, lambda node: () if node in known else node.all_input_nodes)


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """Return nodes and everything that is computed from them."""
    return _reached(nodes, lambda node: node.users)


def numbered(nodes: Iterable[Node], is_signed: bool = True) -> dict[Node, int]:
    """Number nodes by value: equal computations have equal numbers, up to sign if not signed."""
    numbers: dict[object, int] = {}
    number: dict[Node, int] = {}
    for node in nodes:
        is_own = node.op != "call_function" or is_random(node)
        text = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        words = node if is_own else repr(text)
        number[node] = numbers.setdefault((node.target, words), len(numbers))
        if not is_signed and operation_of(node) == "neg":
            number[node] = number[node.all_input_nodes[0]]
    return number


def second_halves(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Pair sums that have the factors of an earlier sum with it: the halves of rotated planes.

    They are ``x * c - y * s`` and ``y * c + x * s``, however their terms are ordered.
    """
    number = numbered(nodes, is_signed=False)
    earlier: dict[frozenset[int], tuple[Node, set[frozenset[int]]]] = {}
    halves = {}
    for node in nodes:
        if operation_of(node) not in ("add", "sub"):
            continue
        terms = [a for a in node.args if isinstance(a, Node) and operation_of(a) == "mul"]
        pairs = {frozenset(number[f] for f in t.all_input_nodes) for t in terms}
        factors = frozenset[int]().union(*pairs)
        if len(terms) == len(pairs) == 2 and len(factors) == 4:
            first, other_pairs = earlier.setdefault(factors, (node, pairs))
            if other_pairs != pairs:
                halves[node] = first
    return halves


def _reached(nodes: Iterable[Node], beside: Callable[[Node], Iterable[Node]]) -> set[Node]:
    reached: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += beside(node)
    return reached
