"""Random draws in a graph, and their replacement by a single value for each operation.

Channels that change places meet other draws, so that a permutation keeps the law of what a network
returns, and not what it returns once. Where every channel meets the same number, it keeps both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weightsym.discovery.dimensions.nodes import ancestors, is_random, operation_of
from weightsym.discovery.graph import ATTENTION, Graph, dropout_of

Pick = Callable[[Tensor], Tensor]
ONE_OF_ALL: tuple[Pick, ...] = (torch.mean, torch.amin, torch.amax)
"""What stands for all draws: one of them is on that side of a threshold that lets units pass."""

_AT_TRAINING = {
    "rrelu": 3,
    "rrelu_with_noise": 4,
    "lstm": 6,
    "gru": 6,
    "rnn_tanh": 6,
    "rnn_relu": 6,
}
"""Where these operations say whether they draw."""


_LAWS = frozenset(
    "rand rand_like randn randn_like normal normal_functional uniform exponential".split()
)


def draws_numbers(graph: Graph) -> bool:
    """Return whether the outputs of a network depend on random numbers."""
    live = ancestors(graph.outputs)
    return any(node in live and _draws(node) for node in graph.module.graph.nodes)


def _draws(node: Node) -> bool:
    name = operation_of(node).removesuffix("_") if node.op == "call_function" else ""
    if not name or not is_random(node):
        return False
    if "dropout" in name or name == ATTENTION:
        return all(dropout_of(node))
    position = _AT_TRAINING.get(name)
    return position is None or bool(node.args[position : position + 1] == (True,))


def evened(node: Node, args: Any, kwargs: Any, result: Any, pick: Pick) -> Any:
    """Replace the draws of an operation by a single value, and make dropouts drop nothing."""
    name = operation_of(node).removesuffix("_")
    if not _draws(node):
        return result
    if "dropout" in name:
        first = args[0]
        return first if isinstance(result, Tensor) else (first, torch.ones_like(result[1]))
    if name == ATTENTION:
        assert callable(node.target)
        return node.target(*args[:4], **{**kwargs, "dropout_p": 0.0})
    if name == "bernoulli":
        probability = args[1] if len(args) > 1 else args[0]
        return torch.zeros_like(result) + probability
    tensors = [a for a in args[:2] if isinstance(a, Tensor)]
    if name == "normal" and tensors:
        return tensors[0].expand_as(result).clone()
    if name in _LAWS and result.is_floating_point():
        return torch.full_like(result, float(pick(result)))
    return result
