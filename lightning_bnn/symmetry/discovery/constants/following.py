"""Follow constants through a graph: what may be added to biases, and where it ends up."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.discovery.constants.operands import (
    Added,
    Followed,
    Operand,
    Unbiased,
)
from lightning_bnn.symmetry.discovery.constants.sums import layer_without_bias
from lightning_bnn.symmetry.discovery.constants.table import RULES
from lightning_bnn.symmetry.discovery.graph import Graph, ancestors
from lightning_bnn.symmetry.rules.labels import Weight, operation_name
from lightning_bnn.symmetry.rules.table import ALLOCATIONS, UNIFORM

__all__ = ["follow_constants"]

_ADD_BIASES = frozenset("add sub subtract".split())


def follow_constants(
    followed: Followed, graph: Graph, owners: Mapping[str, str], held: Set[str]
) -> None:
    """State what one graph says; what it returns or keeps must stay as it is.

    Args:
        followed: what other graphs have said.
        graph: of a network.
        owners: the first name of every tensor.
        held: names of tensors to which nothing may be added.
    """
    ends = [*graph.results, *(node for _, node in graph.written)]
    live = ancestors(ends)
    values: dict[Node, Any] = {}
    for node, source in graph.sources.items():
        name = owners.get(source.name, source.name)
        if node in live and source.kind == "parameter" and name not in held:
            values[node] = Weight.whole(name, node.meta["val"].shape, is_buffer=False)
    _run(followed, graph.module, values, live)
    for node in ends:
        for operand in _operands(values.get(node)):
            followed.see(operand)


def _run(followed: Followed, module: GraphModule, values: dict[Node, Any], live: Set[Node]) -> None:
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(module, str(node.target), None)
        elif node.op == "call_function" and node in live:
            values[node] = _call(followed, node, values)


def _call(followed: Followed, node: Node, values: dict[Node, Any]) -> Any:
    """What stands for the result of an operation."""
    name = operation_name(node).removesuffix("_")
    biases = name in _ADD_BIASES

    def value_of(source: Node) -> Any:
        value = values.get(source)
        if isinstance(value, Unbiased) and not biases:
            value = values[source] = layer_without_bias(followed, source, value)
        gains = not isinstance(value, Added) or followed.system.live(value.numbers) is not None
        return value if gains else None

    arguments: Any = (node.args, node.kwargs)
    args, kwargs = torch.fx.map_arg(arguments, value_of)
    if node.target is operator.getitem:
        return args[0][args[1]] if isinstance(args[0], tuple | list) else None
    operands = _operands((args, kwargs))
    if not operands or name in UNIFORM or name in ALLOCATIONS:
        return None
    try:
        return RULES[name](followed, node, *args, **kwargs)
    except Exception:  # no rule, or a use that nobody foresaw: it sees what is added
        for operand in operands:
            followed.see(operand)
        return None


def _operands(values: Any) -> list[Any]:
    leaves = tree_leaves(values, is_leaf=lambda x: isinstance(x, Operand))
    return [x for x in leaves if isinstance(x, Operand)]
