"""Keep results of `discover` by the graphs that they follow from, so that nothing is solved twice.

A module cannot tell whether it computes what it computed before: its forward is code. So a network
is traced anew every time, and the key holds everything that a result is made from: operations,
shapes, memory that is shared, and the values of constants. Weights are not part of it.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from weightsym.discovery.export import Graphs
from weightsym.discovery.graph import Graph, Source
from weightsym.groups.symmetries import Symmetries
from weightsym.networks.shared_tensors import named_tensors, overlapping, owners

_LIMIT = 16
_results: OrderedDict[str, Symmetries] = OrderedDict()


def recall(key: str) -> Symmetries | None:
    """The result for a key, if there is one."""
    if key in _results:
        _results.move_to_end(key)
    return _results.get(key)


def remember(key: str, symmetries: Symmetries) -> None:
    """Keep a result that was checked. Those that were not depend on the example."""
    if key and not symmetries.unchecked:
        _results[key] = symmetries
        while len(_results) > _LIMIT:
            _results.popitem(last=False)


def forget() -> None:
    """Forget all results, so that every network is solved anew."""
    _results.clear()


def key_of(model: nn.Module, graphs: Graphs, batch_norm: str) -> str:
    """A hash of what determines a result. Empty where that cannot be told."""
    training = graphs.training
    settings = batch_norm, sorted(graphs.mutable), sorted(graphs.read), graphs.evaluation_only
    try:
        parts = [*map(str, settings), *_described_tensors(model), *_described(graphs.evaluation)]
        if training is not graphs.evaluation:
            parts += ["training", *(_described(training) if training is not None else ())]
    except _Unknown:
        return ""
    digest = hashlib.sha256()
    for item in parts:
        digest.update(item.encode())
        digest.update(b"\0")
    return digest.hexdigest()


class _Unknown(Exception):
    """Something whose meaning is not in the graph."""


def _described_tensors(model: nn.Module) -> Iterator[str]:
    tensors = named_tensors(model)
    for name, t in tensors:
        yield f"{name} {type(t).__name__} {_shape(t)} {t.requires_grad}"
    yield str(owners(model))
    yield str(overlapping(tensors))
    yield str(list(model.state_dict()))


def _described(graph: Graph) -> Iterator[str]:
    """The operations, where they stand in the user's code, and the values of constants."""
    for name, module in graph.module.named_modules():
        if isinstance(module, GraphModule):
            yield f"{name}: {module.code}"
            for node in module.graph.nodes:
                yield _described_node(node, module)
    for node, source in graph.sources.items():
        yield f"{node.name} {source.kind} {source.name} {source.persistent} {_value(source)}"
    yield str([(n.name, name) for name, n in graph.written])
    yield str([[n.name for n in nodes] for nodes in (graph.results, graph.outputs)])
    yield str(graph.names_of_inputs)


def _described_node(node: Node, module: GraphModule) -> str:
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    shapes = [_shape(x) for x in tree_leaves(node.meta.get("val"))]
    value = ""
    if node.op == "get_attr":
        attribute = operator.attrgetter(str(node.target))(module)
        value = "" if isinstance(attribute, GraphModule) else _numbers(attribute)
    elif node.op == "call_function" and not _is_known(node.target):
        raise _Unknown
    return f"{node} {node.target} {shapes} {stack} {node.meta.get('stack_trace')} {value}"


def _is_known(target: Any) -> bool:
    """Operations of torch and Python keep their meaning. Those of others may be defined anew."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    return getattr(target, "__module__", "") in ("_operator", "math", "torch", "builtins") or (
        isinstance(target, torch._ops.HigherOrderOperator)
    )


def _value(source: Source) -> str:
    """Shape of what moves. Numbers, too, of what may be read as a constant."""
    if source.kind == "input":
        return ""
    if source.kind == "constant":
        return _numbers(source.tensor)
    t = source.tensor
    is_weight = source.kind == "parameter" or (
        source.persistent and t.is_floating_point() and t.ndim == 1
    )
    return _shape(t) if is_weight else _numbers(t)


def _shape(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    strides = x.stride() if x.layout is torch.strided else x.layout
    return f"{tuple(x.shape)} {strides} {x.dtype} {x.device}"


def _numbers(x: Any) -> str:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_quantized:
        raise _Unknown
    numbers = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{_shape(x)} {hashlib.sha256(numbers.tobytes()).hexdigest()}"
