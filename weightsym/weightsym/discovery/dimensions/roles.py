"""Roles of tensor axes: whether they write, read, scale or shift channels."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import Node

from weightsym.discovery.dimensions.nodes import descendants, leaves_of, operation_of
from weightsym.discovery.dimensions.reading import Reading
from weightsym.discovery.dimensions.values import Value

_PRODUCTS = ("mm", "bmm", "mv", "dot", "matmul")
_BESIDE = {"mul": "gain", "div": "gain", "add": "bias", "sub": "bias"}
_USE = (*_PRODUCTS, "convolution", "embedding", "mul", "div")
_OF_NORMS = ("gain", "bias", "mean", "variance")
_ROLES = ("raw", "in", "out", *_OF_NORMS)


class Roles:
    """The role of every label of a parameter, and where it was last read.

    A label that a product sums over reads (``in``), other labels of its operands write (``out``);
    gains of norms and factors are ``gain``, summands ``bias``; all others are ``raw``.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        count = reading.system.count
        self._of = np.full(count, _ROLES.index("raw"))
        self._last = np.full(count, -1)
        self._first = np.full(count, len(reading.operations))
        self._met = np.full(count, len(reading.operations))
        weights = _weight_nodes(reading)
        met = _meetings(reading, weights)
        for k, node in enumerate(reading.operations):
            for labels, role in self._uses(node, weights):
                present = labels[labels > 0]
                new = present[self._first[present] == len(reading.operations)]
                self._of[new], self._first[new] = _ROLES.index(role), k
                self._met[present] = np.minimum(self._met[present], met[node])
                if role == "in":
                    self._last[present] = k

    def of(self, labels: NDArray[np.int64]) -> tuple[str, int]:
        """Return the role of an axis by its labels, and the operation that last reads it."""
        used = labels[self._first[labels] < len(self._reading.operations)]
        role = self._of[used.min()] if used.size else _ROLES.index("raw")
        return _ROLES[role], int(self._last[labels].max(initial=-1))

    def first_use(self, labels: Iterable[NDArray[np.int64]]) -> int:
        """Return the first operation in which any of some labels meets the input."""
        uses = [int(self._met[group_labels].min()) for group_labels in labels]
        return min(uses, default=len(self._reading.operations))

    def _uses(self, node: Node, weights: set[Node]) -> Iterator[tuple[Any, str]]:
        name = operation_of(node)
        if name in _PRODUCTS:
            yield from self._products(node, weights)
        elif name == "convolution" and node.args[1] in weights:
            yield from self._product(node.args[1], 0 if node.args[6] else 1, False)
            yield from self._wholes([(node.args[2], "bias")], weights)
        elif "batch_norm" in name or name == "native_group_norm":
            yield from self._wholes(zip(node.args[1:5], _OF_NORMS, strict=False), weights)
        elif "embedding" in name:
            yield from self._wholes([(node.args[0], "out")], weights)
        elif name in _BESIDE:
            yield from self._beside(node, weights, _BESIDE[name])

    def _products(self, node: Node, weights: set[Node]) -> Iterator[tuple[Any, str]]:
        both = all(operand in weights for operand in node.args[:2])
        for k, operand in enumerate(node.args[:2]):
            second = self._reading.value_of(node.args[1 - k])
            is_read = both and node not in weights and k == 0  # as the rows of inputs are
            if operand in weights and not (second.is_zero or is_read):  # zero: states of loops
                is_second = k == 1 and node in weights
                ndim = len(self._reading.value_of(operand).shape)
                summed = max(ndim - 2, 0) if k else ndim - 1
                yield from self._product(operand, summed, is_second)

    def _wholes(
        self, operands: Iterable[tuple[Any, str]], weights: set[Node]
    ) -> Iterator[tuple[Any, str]]:
        for operand, role in operands:
            if isinstance(operand, Node) and operand in weights:
                yield from self._whole(operand, role)

    def _product(self, node: Any, summed: int, is_second: bool) -> Iterator[tuple[Any, str]]:
        """Yield the labels along the summed dimension as inputs, and the others as outputs."""
        value = self._reading.value_of(node)
        for factor in value.factors:
            reads = summed == max(factor.dims, default=-1)  # rows only count the blocks of columns
            yield factor.labels.numpy(), "in" if reads != is_second else "out"

    def _beside(self, node: Node, weights: set[Node], role: str) -> Iterator[tuple[Any, str]]:
        operands = [a for a in node.args[:2] if isinstance(a, Node)]
        if any(a not in weights for a in operands):
            for operand in operands:
                if operand in weights:
                    is_table = len(self._reading.value_of(operand).factors) > 1
                    yield from self._whole(operand, "raw" if is_table else role)

    def _whole(self, node: Any, role: str) -> Iterator[tuple[Any, str]]:
        value = self._reading.value_of(node)
        if isinstance(value, Value):
            for factor in value.factors:
                yield factor.labels.numpy(), role


def _weight_nodes(reading: Reading) -> set[Node]:
    """Return nodes that are computed from tensors of the network alone before a product.

    A layer that reads learned rows, such as queries, makes an activation of them.
    """
    nodes = [node for program in reading.programs for node in program.nodes]
    weights: set[Node] = set()
    for node in nodes:
        is_picked = operation_of(node) in ("index", "index_select") and node.args[0] in weights
        if node.name in reading.owners or is_picked or _is_made_of(node, weights):
            weights.add(node)
    multiplied: set[Node] = set()
    for node in reversed(nodes):
        others = (u for u in node.users if u not in weights and u.op == "call_function")
        if any(u in multiplied for u in node.users) or any(operation_of(u) in _USE for u in others):
            multiplied.add(node)
    layers = {n for n in weights if n.op == "call_function" and operation_of(n) in _PRODUCTS}
    return weights - descendants(layers - multiplied)


def _meetings(reading: Reading, weights: set[Node]) -> dict[Node, int]:
    """Map each weight node to the first operation that combines it with data, others to itself."""
    met: dict[Node, int] = {}
    for k, node in reversed(list(enumerate(reading.operations))):
        later = [met[user] for user in node.users if user in met]
        met[node] = min(later, default=k) if node in weights else k
    return met


def _is_made_of(node: Node, weights: set[Node]) -> bool:
    """Return whether a node is a tensor, or a tuple of tensors, computed from weights alone."""
    inputs = node.all_input_nodes
    is_tensor = any(isinstance(t, Tensor) for t in leaves_of(node.meta.get("val")))
    single = is_tensor or node.target is operator.getitem
    return node.op == "call_function" and bool(inputs) and single and set(inputs) <= weights
