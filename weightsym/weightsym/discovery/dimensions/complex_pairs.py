"""Complex numbers that are moved, added and multiplied, rewritten as pairs of real numbers.

Rotary positions turn planes in both ways of writing: `view_as_complex(x) * turns`, and sums of
products with cosines and sines.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from weightsym.discovery.dimensions.moves import MOVES, UNCHANGED
from weightsym.discovery.dimensions.nodes import called, descendants, operation_of

aten: Any = torch.ops.aten
_EACH = (MOVES | {"expand", "sum", "mean"}) - UNCHANGED - {"as_strided"}
"""What acts on real and on imaginary parts alike."""
_Pair = tuple[Node, Node]


def in_pairs(graph: Graph, parameters: Collection[str]) -> None:
    """Replace `view_as_real` of complex numbers by the real numbers that they were built from.

    Args:
        graph: is changed; what has no more users stays.
        parameters: the names of its placeholders that stand for parameters.
    """
    nodes = list(graph.nodes)
    if not any(operation_of(n) in ("view_as_complex", "complex") for n in nodes):
        return
    moving = descendants(n for n in nodes if n.op == "placeholder" and n.name in parameters)
    pairs = _Pairs(graph, moving)
    for node in nodes:
        if node.op == "call_function" and node in moving:
            with graph.inserting_before(node):
                pairs.follow(node)


class _Pairs:
    """Real and imaginary parts by node."""

    def __init__(self, graph: Graph, moving: Collection[Node]) -> None:
        self._graph, self._moving = graph, moving
        self._pairs: dict[Node, _Pair] = {}

    def follow(self, node: Node) -> None:
        """Find the real and imaginary parts of the result of an operation."""
        name = operation_of(node)
        pair = self._made(node, name) or self._combined(node, name) or self._moved(node, name)
        if pair is not None:
            self._pairs[node] = pair
        elif name == "view_as_real" and node.all_input_nodes[0] in self._pairs:
            node.replace_all_uses_with(self._joined(self._pairs[node.all_input_nodes[0]]))

    def _made(self, node: Node, name: str) -> _Pair | None:
        if name == "view_as_complex":
            return self._halves(node.args[0])
        args: Any = node.args
        if name == "polar":
            waves = (self._new(f, args[1]) for f in (aten.cos.default, aten.sin.default))
            real, imaginary = (self._new(aten.mul.Tensor, args[0], wave) for wave in waves)
            return real, imaginary
        sizes = {x.meta["val"].shape for x in args} if name == "complex" else ()
        return args if len(sizes) == 1 else None

    def _combined(self, node: Node, name: str) -> _Pair | None:
        """Return the parts of a sum or product with at least one operand whose parts are known."""
        has_pair = any(x in self._pairs for x in node.all_input_nodes)
        if name not in ("mul", "add", "sub") or node.kwargs or not has_pair:
            return None
        first, second = map(self._parts, node.args)
        if first is None or second is None:
            return None
        (a, b), (c, d) = first, second
        if name != "mul":
            return self._new(node.target, a, c), self._new(node.target, b, d)
        products = [self._new(aten.mul.Tensor, *xy) for xy in ((a, c), (b, d), (b, c), (a, d))]
        real = self._new(aten.sub.Tensor, *products[:2])
        return real, self._new(aten.add.Tensor, *products[2:])

    def _moved(self, node: Node, name: str) -> _Pair | None:
        inputs, args = node.all_input_nodes, node.args
        pair = self._pairs.get(inputs[0]) if len(inputs) == 1 else None
        if pair is None:
            return None
        if name in UNCHANGED:
            return pair
        if name in ("_conj", "conj_physical"):
            return pair[0], self._new(aten.neg.default, pair[1])
        if name not in _EACH:
            return None
        a, b = (self._new(node.target, x, *args[1:], **node.kwargs) for x in pair)
        return a, b

    def _parts(self, x: Any) -> _Pair | None:
        """Return the parts of an operand, if they are known or it is a complex constant."""
        if not isinstance(x, Node) or not x.meta["val"].is_complex():
            return None
        if x in self._pairs or x in self._moving:
            return self._pairs.get(x)
        return self._halves(self._new(aten.view_as_real.default, x))

    def _halves(self, x: Any) -> _Pair:
        return self._new(aten.select.int, x, -1, 0), self._new(aten.select.int, x, -1, 1)

    def _joined(self, pair: _Pair) -> Node:
        rows = [self._new(aten.unsqueeze.default, x, -1) for x in pair]
        return self._new(aten.cat.default, rows, -1)

    def _new(self, target: Any, *args: Any, **named: Any) -> Node:
        return called(self._graph, target, *args, **named)
