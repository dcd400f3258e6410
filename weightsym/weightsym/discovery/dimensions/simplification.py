"""Simpler graphs: sizes without values, diagonal matrices as factors, sums of stacks as sums."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch.fx import Graph, Node

from weightsym.discovery.dimensions.moves import RESHAPES
from weightsym.discovery.dimensions.nodes import called, operation_of

aten: Any = torch.ops.aten
_ASKS_FOR_SIZE = re.compile("[a-z]+_like|new_[a-z_]+|fill")
"""Names of operations that do not read the numbers of their first tensor."""
_MOST = 64
"""Rows that are added one by one. More are steps of a loop."""


def simplify(graph: Graph) -> None:
    """Rewrite operations in simpler ones. Unused nodes remain in the graph."""
    for node in graph.nodes:
        if node.op == "call_function":
            with graph.inserting_before(node):
                _forget_numbers(graph, node)
                for words in (_scaled, _added):
                    result = words(graph, node)
                    if result is not None:
                        node.replace_all_uses_with(result)


def _forget_numbers(graph: Graph, node: Node) -> None:
    """Replace a tensor by an empty one where an operation only asks for its size."""
    source = node.args[0] if node.args else None
    if _ASKS_FOR_SIZE.fullmatch(operation_of(node)) and isinstance(source, Node):
        size = source.meta["val"]
        options = {"dtype": size.dtype, "device": size.device}
        empty = graph.call_function(aten.empty.memory_format, (list(size.shape),), options)
        empty.meta["val"] = size
        node.replace_input_with(source, empty)


def _scaled(graph: Graph, node: Node) -> Node | None:
    """Rewrite a product with a diagonal matrix as an elementwise product."""
    operands: Any = node.args if operation_of(node) in ("mm", "bmm", "matmul") else ()
    for k, operand in enumerate(operands):
        is_diagonal = operation_of(operand) == "diag_embed" and len(operand.args) == 1
        if is_diagonal and operands[1 - k].meta["val"].ndim > 1:
            row = called(graph, aten.unsqueeze.default, operand.args[0], -1 - k)
            return called(graph, aten.mul.Tensor, operands[1 - k], row)
    return None


def _added(graph: Graph, node: Node) -> Node | None:
    """Rewrite the sum or mean of a stack as the sum or mean of its tensors."""
    name, args = operation_of(node), list[Any](node.args)
    if name not in ("sum", "mean") or len(args) != 2 or node.kwargs or len(args[1] or ()) != 1:
        return None
    rows = _stacked(args[0], args[1][0])
    if len({row.meta["val"].shape for row in rows}) != 1 or len(rows) > _MOST:
        return None
    total = functools.reduce(functools.partial(called, graph, aten.add.Tensor), rows)
    return total if name == "sum" else called(graph, aten.div.Tensor, total, len(rows))


def _stacked(stack: Any, d: int) -> list[Node]:
    """Return the tensors stacked along a dimension, or none for any other tensor."""
    shape, source = list(stack.meta["val"].shape), stack
    if operation_of(stack) in RESHAPES and d % len(shape) == 0:  # as `stack` does
        source = stack.args[0]
    if operation_of(source) != "cat":
        return []
    rows, along = source.args[0], source.args[1] if len(source.args) > 1 else 0
    if source is not stack:
        is_stack = along == 0 and shape == [len(rows), *rows[0].meta["val"].shape]
        return rows if is_stack else []
    places = {r.args[1] % len(shape) if operation_of(r) == "unsqueeze" else None for r in rows}
    is_stack = places == {d % len(shape)} and (along - d) % len(shape) == 0
    return [r.args[0] for r in rows] if is_stack else []
