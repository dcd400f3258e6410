"""Run an exported graph on weights that are made when read and freed after use.

In float64 no more than a weight or two and a few activations are held at once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from weightsym.discovery.dimensions.nodes import ancestors, is_random
from weightsym.discovery.draws import Pick, evened
from weightsym.discovery.graph import Graph
from weightsym.discovery.products import Matrix, Weights, products
from weightsym.networks.forward import Inputs, as_real, in_precision, same_noise

Cast = Callable[[Any], Any]
Call = Callable[[Node, Any, Any, Cast], Any]


class NotRunnable(RuntimeError):
    """Raised where the inputs of a graph do not correspond to those of the forward."""


def streamed_outputs(
    graph: Graph,
    inputs: Inputs,
    weights: Weights,
    precision: torch.dtype | None,
    call: Call | None = None,
) -> list[Tensor]:
    """Return the output tensors of a graph as real numbers. Every call draws the same noise.

    Args:
        graph: what `torch.export` has traced.
        inputs: what it was traced with.
        weights: gives parameters and persistent buffers, in memory that the forward may write to.
        precision: in which the graph runs; as it was traced where None is given.
        call: calls an operation; as it stands where None is given.
    """
    return outputs_side_by_side(graph, inputs, [weights], precision, call)[0]


def outputs_side_by_side(
    graph: Graph,
    inputs: Inputs,
    weights: Sequence[Weights],
    precision: torch.dtype | None,
    call: Call | None = None,
) -> list[list[Tensor]]:
    """Run a graph at several weights, operation by operation. At most one run may be random.

    Args:
        graph: what `torch.export` has traced.
        inputs: what it was traced with.
        weights: of every run; large matrices have the same rows in all, and may move differently.
        precision: in which the graph runs; as it was traced where None is given.
        call: calls an operation; as it stands where None is given.
    """
    sources = _given(graph, inputs)
    cast = _casting(graph, precision)

    def source(weights: Weights, node: Node) -> Any:
        source = graph.sources[node]
        if source.kind == "parameter" or (source.kind == "buffer" and source.persistent):
            weight = weights(source.name)
            if isinstance(weight, Matrix):
                return weight.to(precision)
            return in_precision(weight, precision)
        value = sources[node] if source.kind == "input" else source.tensor
        return in_precision(value.clone(), precision) if isinstance(value, Tensor) else value

    with same_noise(s.tensor for s in graph.sources.values()):
        runs = [partial(source, w) for w in weights]
        values = _run(graph.module, runs, graph.outputs, cast, call or called)
    return [[as_real(t) for t in results] for results in values]


def _given(graph: Graph, inputs: Inputs) -> Mapping[Node, Any]:
    """Map placeholders to inputs."""
    nodes = [n for n, s in graph.sources.items() if s.kind == "input"]
    named = {name: inputs.named[name] for name in graph.names_of_inputs if name in inputs.named}
    leaves = tree_leaves((inputs.args, named))
    if len(nodes) != len(leaves):
        raise NotRunnable(f"the graph has {len(nodes)} inputs, the forward {len(leaves)}")
    return dict(zip(nodes, leaves, strict=True))


# ------------------------------------------------------------ one node after the other
def _run(
    module: GraphModule,
    sources: Sequence[Callable[[Node], Any]],
    results: Iterable[Node],
    cast: Cast,
    call: Call,
) -> list[list[Any]]:
    results = list(results)
    draws = (n for n in module.graph.nodes if n.op == "call_function" and is_random(n))
    live = ancestors([*results, *draws])  # draws that nobody reads move those that follow, too
    done_after = _last_readers(module, live)
    runs: list[dict[Node, Any]] = [{} for _ in sources]

    def value_of(k: int, node: Node) -> Any:
        values = runs[k]
        if node not in values:
            is_source = node.op == "placeholder"
            values[node] = sources[k](node) if is_source else _attribute(module, node, cast)
        return values[node]

    for node in module.graph.nodes:
        if node.op != "call_function" or node not in live:
            continue
        operands = [
            torch.fx.map_arg((node.args, node.kwargs), partial(value_of, k))
            for k in range(len(runs))
        ]
        returned = products(node, operands) or _one_by_one(call, node, operands, cast)
        del operands
        for values, result in zip(runs, returned, strict=True):
            values[node] = result
            for operand in done_after[node] - set(results):
                values.pop(operand, None)
        del returned, result
    return [[_whole(value_of(k, node)) for node in results] for k in range(len(runs))]


def _one_by_one(
    call: Call, node: Node, operands: Sequence[tuple[Any, Any]], cast: Cast
) -> Iterator[Any]:
    """Yield the results of an operation that needs whole matrices."""
    has_weights = any(n.op == "placeholder" for n in node.all_input_nodes)
    for args, kwargs in map_aggregate(operands, _whole) if has_weights else operands:
        yield call(node, args, kwargs, cast)


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, Matrix) else x


def _last_readers(module: GraphModule, live: set[Node]) -> Mapping[Node, set[Node]]:
    """Map each node to the values that are last read there."""
    done: dict[Node, set[Node]] = defaultdict(set)
    visited: set[Node] = set()
    for node in reversed(module.graph.nodes):
        if node in live and node.op == "call_function":
            done[node] = {*node.all_input_nodes, node} - visited
            visited |= done[node]
    return done


def _attribute(module: GraphModule, node: Node, cast: Cast) -> Any:
    value = operator.attrgetter(str(node.target))(module)
    return cast(value.detach().clone()) if isinstance(value, Tensor) else value


def called(node: Node, args: Any, kwargs: Any, cast: Cast) -> Any:
    """Return the result of an operation, in the precision of the run."""
    assert callable(node.target)
    if node.target is not torch.ops.aten.view.dtype:  # which reads the bits as they are
        args, kwargs = map_aggregate(
            (args, kwargs), lambda x: cast(x) if isinstance(x, torch.dtype) else x
        )
    return map_aggregate(node.target(*args, **kwargs), cast)


def evened_by(pick: Pick) -> Call:
    """Return a call that replaces all draws of an operation by one value."""

    def call(node: Node, args: Any, kwargs: Any, cast: Cast) -> Any:
        result = called(node, args, kwargs, cast)
        return map_aggregate(evened(node, args, kwargs, result, pick), cast)

    return call


# ------------------------------------------------------------ precision
def _casting(graph: Graph, precision: torch.dtype | None) -> Cast:
    """Return a conversion of tensors and dtypes of the network to another precision."""
    if precision is None:
        return lambda x: x
    floats = {s.tensor.dtype for s in graph.sources.values() if s.kind == "parameter"}
    table: dict[Any, torch.dtype] = {
        dtype: precision for dtype in (floats | {torch.float32}) if dtype.is_floating_point
    }
    if precision is torch.float64:
        table[torch.complex64] = torch.complex128

    def cast(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(table[x.dtype]) if x.dtype in table else x
        return table.get(x, x) if isinstance(x, torch.dtype) else x

    return cast
