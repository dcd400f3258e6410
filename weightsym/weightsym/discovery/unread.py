"""Parameter entries that are not read at an example, such as table rows for longer inputs.

Labels take the place of parameters in all that moves numbers, and in functions of single ones of
weights alone. Any other operation reads what it gets.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weightsym.discovery.dimensions.nodes import descendants, operation_of, writes
from weightsym.discovery.graph import Graph
from weightsym.discovery.streaming import Cast, called, streamed_outputs
from weightsym.groups.element import Read
from weightsym.networks.forward import Inputs

MOVES = frozenset(
    "view reshape flatten unflatten permute transpose t numpy_T mT slice select narrow unsqueeze "
    "squeeze expand chunk split split_with_sizes unbind cat stack getitem to _to_copy alias "
    "contiguous clone detach repeat".split()
)
"""Operations that move numbers, and do nothing else."""
_CHOICES = frozenset(
    "index embedding gather index_select take roll flip constant_pad_nd as_strided diagonal "
    "unfold tril triu expand_as view_as movedim swapaxes".split()
)
_COPIES = frozenset("to _to_copy alias contiguous clone detach".split())


def unread_numbers(
    graph: Graph, inputs: Inputs, weights: Read, names: Collection[str]
) -> dict[str, Tensor]:
    """Return masks of parameter entries that no operation reads."""
    following = _Following(graph, names)
    streamed_outputs(graph, inputs, weights, None, following.call)
    for node in graph.outputs:
        following.read(node)
    return {
        source.name: ~following.is_read[first : first + source.tensor.numel()].view_as(
            source.tensor
        )
        for source, first in following.firsts
    }


class _Following:
    """A sequence of operation calls that also moves the labels of some parameters."""

    def __init__(self, graph: Graph, names: Collection[str]) -> None:
        self.firsts, self._labels, first = [], dict[Node, list[Any]](), 1
        for node, source in graph.sources.items():
            if source.name in names and source.kind == "parameter":
                count, shape = source.tensor.numel(), source.tensor.shape
                self.firsts.append((source, first))
                self._labels[node] = [torch.arange(first, first + count).view(shape)]
                first += count
        self.is_read = torch.zeros(first, dtype=torch.bool)
        inputs = [node for node, source in graph.sources.items() if source.kind == "input"]
        self._depends = descendants(inputs)

    def read(self, node: Node) -> None:
        """Mark all entries of a node as read."""
        for labels in tree_leaves(self._labels.get(node, [])):
            self.is_read[labels.flatten()] = True

    def call(self, node: Node, args: Any, kwargs: Any, cast: Cast) -> Any:
        """Call an operation, and move labels along with the values."""
        result = called(node, args, kwargs, cast)
        parts = [n for n in node.all_input_nodes if n in self._labels]
        if not parts:
            return result
        moved = None if writes(node) else self._moved(node, args, kwargs, result)
        if moved is None:
            for operand in parts:
                self.read(operand)
        else:
            self._labels[node] = moved
        return result

    def _moved(self, node: Node, args: Any, kwargs: Any, result: Any) -> list[Any] | None:
        """Return the labels of a result, or None for an operation that reads them."""
        name = operation_of(node)
        leaves, spec = tree_flatten((args, kwargs))
        moved_labels = [
            self._labels.get(n, []) if isinstance(n, Node) else [] for n in _leaves(node)
        ]
        if name in MOVES | _CHOICES and any(moved_labels):
            moved_labels = (
                moved_labels if name in ("cat", "stack", "getitem") else [moved_labels[0]]
            )
            return self._through(node, leaves, spec, moved_labels, name)
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if not is_pointwise or node in self._depends or not isinstance(result, Tensor):
            return None
        return [labels.expand(result.shape) for some in moved_labels for labels in some]

    def _through(
        self, node: Node, leaves: list[Any], spec: Any, operands: list[list[Any]], name: str
    ) -> list[Any]:
        if name in _COPIES:
            return operands[0]
        moved = []
        for k, labels in (
            (k, labels_of_one) for k, some in enumerate(operands) for labels_of_one in some
        ):
            if node.target is operator.getitem:
                moved.append(labels[node.args[1]])
                continue
            others = [_nothing(x) if name in ("cat", "stack") else x for x in leaves]
            others[k] = labels
            args, kwargs = tree_unflatten(others, spec)
            assert callable(node.target)
            moved.append(node.target(*args, **kwargs))
        return moved


def _leaves(node: Node) -> list[Any]:
    return tree_leaves((node.args, node.kwargs))


def _nothing(x: Any) -> Any:
    return torch.zeros_like(x, dtype=torch.long) if isinstance(x, Tensor) else x
