"""Random weights through which signals keep their size, so that the first of many layers is seen.

Every product of a signal and weights is measured, one operation after the other, and the weights
are rescaled until it has the size that is asked for; what is added to it becomes a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weightsym.discovery.dimensions.nodes import is_random, operation_of, writes
from weightsym.discovery.graph import Graph
from weightsym.discovery.random_weights import RandomWeights
from weightsym.discovery.streaming import Cast, called, streamed_outputs
from weightsym.discovery.unread import MOVES
from weightsym.networks.forward import Inputs

_PRODUCTS = frozenset(
    "linear matmul mm bmm addmm baddbmm mv mul div einsum conv1d conv2d conv3d convolution "
    "conv_transpose1d conv_transpose2d conv_transpose3d embedding layer_norm group_norm "
    "batch_norm rms_norm instance_norm index index_select gather bilinear".split()
)
_SUMS = frozenset("add sub".split())
_OF_WEIGHTS = MOVES | _PRODUCTS | _SUMS | {"_weight_norm", "weight_norm"}
"""What may lie between weights and the place where they meet a signal: it is linear in them."""
_ADDED = 0.2
"""The size of a bias, relative to what it is added to."""
_MOST = 1e4


def factors_that_keep_signals(
    graph: Graph, inputs: Inputs, weights: RandomWeights, size: float
) -> dict[str, float]:
    """By parameter, the factor after which products of signals and weights have a size."""
    factors: dict[str, float] = {}
    for _ in range(2):  # the second time, factors of sums and products of weights meet each other
        measuring = _Measuring(graph, size)

        def read(name: str) -> Tensor:
            t = weights.read(name)
            return t.mul_(factors[name]) if name in factors else t

        streamed_outputs(graph, inputs, weights.by_any_name(read), torch.float64, measuring.call)
        for name, factor in measuring.factors.items():
            factors[name] = factors.get(name, 1.0) * factor
    return factors


class _Operand(NamedTuple):
    """A leaf among the arguments of an operation that is made of weights alone."""

    place: int
    names: frozenset[str]
    is_added: bool


class _Measuring:
    """Calls of operations, in which weights are rescaled.

    Attributes:
        factors: by parameter.
    """

    def __init__(self, graph: Graph, size: float) -> None:
        self.factors: dict[str, float] = {}
        self._size, self._graph = size, graph
        self._behind: dict[Node, frozenset[str] | None] = {}
        for node in graph.module.graph.nodes:
            self._behind[node] = self._weights_behind(node)

    def _weights_behind(self, node: Node) -> frozenset[str] | None:
        """The parameters that a node is a linear function of; None if it is another function."""
        if node.op == "placeholder":
            source = self._graph.sources[node]
            if source.kind == "parameter":
                return frozenset({source.name})
            return None if source.kind == "input" else frozenset()
        if node.op != "call_function":
            return frozenset()
        parts = [self._behind[n] for n in node.all_input_nodes]
        if is_random(node) or any(part is None for part in parts):
            return None
        names = frozenset[str]().union(*(part for part in parts if part))
        return None if names and _name(node) not in _OF_WEIGHTS else names

    def call(self, node: Node, args: Any, kwargs: Any, cast: Cast) -> Any:
        """Call an operation, and rescale its weights if it has a signal, too."""
        operands = list(self._operands(node))
        if not operands:
            return called(node, args, kwargs, cast)
        leaves, spec = tree_flatten((args, kwargs))

        def result(place: int | None = None) -> Any:
            zeroed = [torch.zeros_like(x) if k == place else x for k, x in enumerate(leaves)]
            if writes(node):
                zeroed[0] = zeroed[0].clone()
            args, kwargs = tree_unflatten(zeroed, spec)
            return called(node, args, kwargs, cast)

        for operand in sorted(operands, key=lambda o: o.is_added):
            known = [self.factors[n] for n in operand.names if n in self.factors]
            if known:
                factor = math.prod(known)
            else:
                factor = self._factor(operand, result(), result(operand.place))
                each = factor ** (1 / len(operand.names))
                self.factors |= dict.fromkeys(operand.names if factor != 1 else (), each)
            leaves[operand.place] = leaves[operand.place] * factor
        return result()

    def _factor(self, operand: _Operand, whole: Any, rest: Any) -> float:
        """What a share of a result must be multiplied by."""
        whole, rest = tree_leaves(whole)[0], tree_leaves(rest)[0]
        share = _size(whole - rest)
        wanted = _ADDED * _size(rest) if operand.is_added else self._size
        factor = wanted / share if share else math.nan
        return factor if 1 / _MOST < factor < _MOST else 1.0

    def _operands(self, node: Node) -> Iterator[_Operand]:
        name = _name(node)
        if name not in _PRODUCTS | _SUMS or self._behind[node] is not None:
            return
        schema = getattr(node.target, "_schema", None)
        arguments = [a.name for a in schema.arguments] if schema is not None else []
        biases = {id(a) for a, n in zip(node.args, arguments, strict=False) if n == "bias"}
        biases |= {id(node.args[0])} if name in ("addmm", "baddbmm") else set()
        for place, leaf in enumerate(tree_leaves((node.args, node.kwargs))):
            names = self._behind.get(leaf) if isinstance(leaf, Node) else None
            if names:
                is_added = name in _SUMS or id(leaf) in biases
                yield _Operand(place, names, is_added)


def _name(node: Node) -> str:
    return operation_of(node).removesuffix("_")


def _size(t: Tensor) -> float:
    return float(t.double().norm()) / math.sqrt(max(1, t.numel()))
