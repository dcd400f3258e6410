"""Random weights that preserve the size of signals, so that deep networks stay sensitive.

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
from weightsym.discovery.random_weights import RandomWeights, WeightDraw
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


def draw_that_keeps_signals(
    graph: Graph, inputs: Inputs, weights: RandomWeights, size: float, is_centred: bool
) -> WeightDraw:
    """Rescale weights so that products with signals have a given size.

    Args:
        graph: what the network computes.
        inputs: what it runs on.
        weights: to be rescaled.
        size: of the products.
        is_centred: whether that is the size of what differs between the rows of a batch, and biases
            take away what does not. So signals pass functions that are flat at both ends.
    """
    for _ in range(2):  # the second time, factors of sums and products of weights meet each other
        measuring, draw = _Measuring(graph, size, is_centred), weights.draw
        lookup = weights.by_any_name(weights.read)
        streamed_outputs(graph, inputs, lookup, torch.float64, measuring.call)
        new = measuring.factors
        factors = {n: new.get(n, 1.0) * draw.factors.get(n, 1.0) for n in {*new, *draw.factors}}
        offsets = {n: new.get(n, 1.0) * t for n, t in draw.offsets.items()}
        for name, offset in measuring.offsets.items():
            offsets[name] = offset + offsets.get(name, 0.0)
        weights.draw = draw._replace(factors=factors, offsets=offsets)
    return weights.draw


class _Operand(NamedTuple):
    """An argument of an operation that is computed from weights alone."""

    place: int
    names: frozenset[str]
    is_added: bool


class _Measuring:
    """A sequence of operation calls that rescales weights.

    Attributes:
        factors: by parameter.
        offsets: by bias, what is added to it.
    """

    def __init__(self, graph: Graph, size: float, is_centred: bool) -> None:
        self.factors: dict[str, float] = {}
        self.offsets: dict[str, Tensor] = {}
        self._size, self._graph, self._is_centred = size, graph, is_centred
        weights = (s for s in graph.sources.values() if s.kind == "parameter")
        self._shapes = {source.name: source.tensor.shape for source in weights}
        self._behind: dict[Node, frozenset[str] | None] = {}
        for node in graph.module.graph.nodes:
            self._behind[node] = self._weights_behind(node)

    def _weights_behind(self, node: Node) -> frozenset[str] | None:
        """Return the parameters of which a node is a linear function, or None for other nodes."""
        if node.op == "placeholder":
            source = self._graph.sources[node]
            if source.kind == "parameter":
                return frozenset({source.name})
            return None if source.kind == "input" else frozenset()
        if node.op != "call_function":
            return frozenset()
        parts = [self._behind[n] for n in node.all_input_nodes]
        if is_random(node) or any(sources is None for sources in parts):
            return None
        names = frozenset[str]().union(*(sources for sources in parts if sources))
        return None if names and _name(node) not in _OF_WEIGHTS else names

    def call(self, node: Node, args: Any, kwargs: Any, cast: Cast) -> Any:
        """Call an operation, and rescale its weights if it also takes a signal."""
        operands = list(self._operands(node))
        if not operands:
            return called(node, args, kwargs, cast)
        leaves, spec = tree_flatten((args, kwargs))

        def result(position: int | None = None) -> Any:
            zeroed = [torch.zeros_like(x) if k == position else x for k, x in enumerate(leaves)]
            if writes(node):
                zeroed[0] = zeroed[0].clone()
            args, kwargs = tree_unflatten(zeroed, spec)
            return called(node, args, kwargs, cast)

        for operand in sorted(operands, key=lambda o: o.is_added):
            factors = [self.factors[n] for n in operand.names if n in self.factors]
            if factors:
                factor = math.prod(factors)
            else:
                factor = self._factor(operand, result(), result(operand.place))
                each = factor ** (1 / len(operand.names))
                self.factors |= dict.fromkeys(operand.names if factor != 1 else (), each)
            leaves[operand.place] = leaves[operand.place] * factor
            whole = tree_leaves(result())[0] if self._is_centred else None
            if whole is not None and not factors and self._is_bias(operand, whole):
                (name,) = operand.names
                self.offsets[name] = -whole.mean(tuple(range(whole.ndim - 1)))
                leaves[operand.place] = leaves[operand.place] + self.offsets[name]
        return result()

    def _is_bias(self, operand: _Operand, whole: Tensor) -> bool:
        """Return whether an operand is one parameter that is added along the last dimension."""
        shapes = {self._shapes.get(name) for name in operand.names}
        is_one = len(operand.names) == 1 and shapes == {whole.shape[-1:]}
        return operand.is_added and whole.ndim > 1 and is_one

    def _factor(self, operand: _Operand, whole: Any, remainder: Any) -> float:
        """Return the factor that brings the contribution of an operand to the target size."""
        whole, remainder = tree_leaves(whole)[0], tree_leaves(remainder)[0]
        share = whole - remainder
        if self._is_centred and not operand.is_added and len(share) > 1:
            share = share - share.mean(0)
        share = _size(share)
        wanted = _ADDED * _size(remainder) if operand.is_added else self._size
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
        for position, leaf in enumerate(tree_leaves((node.args, node.kwargs))):
            names = self._behind.get(leaf) if isinstance(leaf, Node) else None
            if names:
                is_added = name in _SUMS or id(leaf) in biases
                yield _Operand(position, names, is_added)


def _name(node: Node) -> str:
    return operation_of(node).removesuffix("_")


def _size(t: Tensor) -> float:
    return float(t.double().norm()) / math.sqrt(max(1, t.numel()))
