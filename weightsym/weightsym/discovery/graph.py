"""A traced forward: the sources of its inputs, its outputs, and the buffers that it writes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from weightsym.discovery.dimensions.nodes import ancestors, first_written, operation_of, writes

_NO_DROPOUT = re.compile(r"dropout\.default\((\w+), 0(?:\.0)?, (?:True|False)\)")

ATTENTION = "scaled_dot_product_attention"


class Source(NamedTuple):
    """The source of a placeholder: its type and, for tensors of the network, name and values."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str = ""
    tensor: Any = None
    persistent: bool = True


class RandomRun(NamedTuple):
    """The outputs of a network at random weights.

    Attributes:
        random: the names of all that was random.
        outputs: what it returned.
    """

    random: frozenset[str]
    outputs: list[Tensor]


class Graph:
    """The operations of a network, in one mode.

    Attributes:
        module: the operations.
        program: what `torch.export` has returned.
        sources: what every placeholder stands for.
        results: the nodes that the network returns, each once, without the buffers it updates.
        outputs: the same in the order of the network, as often as it returns them.
        names_of_inputs: the inputs that are passed by name, in the order of the placeholders.
        written: the buffers that it changes, and what it writes into them.
        measured: what the network returned when it was called before it was traced.
    """

    def __init__(self, program: ExportedProgram, measured: RandomRun | None = None) -> None:
        self.measured = measured
        self.module, self.program = program.graph_module, program
        signature, nodes = program.graph_signature, list(program.graph.nodes)
        sources = _sources(program)
        self.sources = {n: sources(n) for n in nodes if n.op == "placeholder"}
        order = signature.user_outputs
        names = set(order)
        output = next(n for n in nodes if n.op == "output")
        returned = dict.fromkeys(n for n in tree_leaves(output.args) if isinstance(n, Node))
        self.results = [n for n in returned if n.name in names]
        by_name = {n.name: n for n in self.results}
        self.outputs = [by_name[name] for name in order if name in by_name]
        _, named = _children(program.call_spec.in_spec)
        self.names_of_inputs: list[str] = list(named.context)
        buffers, mutated = signature.inputs_to_buffers, signature.buffers_to_mutate
        self.written = []
        for node in nodes:
            name = mutated.get(node.name)
            name = buffers.get(first_written(node).name, name) if writes(node) else name
            self.written += [(name, node)] if name is not None else []

    def buffers_behind(self, nodes: Iterable[Node]) -> set[str]:
        """Return the names of the buffers that some nodes depend on."""
        sources = (self.sources[n] for n in ancestors(nodes) if n in self.sources)
        return {source.name for source in sources if source.kind == "buffer"}

    def says_the_same(self, other: Graph) -> bool:
        """Return whether two graphs have the same operations and literals."""
        if other is self:
            return True
        ours, theirs = self.program.constants, other.program.constants
        if self._code() != other._code() or ours.keys() != theirs.keys():
            return False
        return all(_equal(x, theirs[name]) for name, x in ours.items())

    def with_dropouts(self, dropouts: Sequence[tuple[float, bool]]) -> Graph | None:
        """Return the graph with other probabilities and modes of dropouts, if it has as many.

        Args:
            dropouts: all of them, in the order of their calls.
        """
        if _settings(self.module.graph) == [*dropouts]:
            return self
        graph, program = copy.deepcopy(self.module.graph), copy.copy(self.program)
        nodes = _dropouts(graph)
        if len(nodes) != len(dropouts):
            return None
        for node, settings in zip(nodes, dropouts, strict=True):
            if dropout_of(node) != settings:
                _set(node, settings)
        program._graph_module = GraphModule(self.module, graph)
        return Graph(program)

    def only_drops(self, other: Graph) -> bool:
        """Return whether the graph has the operations of another one, and drops as much or more."""
        settings = _settings(other.module.graph)
        same = self.with_dropouts(settings)
        pairs = zip(_settings(self.module.graph), settings, strict=False)
        fewer = any(theirs and not ours for (_, ours), (_, theirs) in pairs)
        return same is not None and not fewer and same.says_the_same(other)

    def _code(self) -> str:
        """Return the code of the graph, in which a dropout of probability 0 has no mode."""
        return _NO_DROPOUT.sub(r"dropout.default(\1)", self.module.code)


def _dropouts(graph: torch.fx.Graph) -> list[Node]:
    nodes = (node for node in graph.nodes if node.op == "call_function")
    return [node for node in nodes if operation_of(node) in ("dropout", ATTENTION)]


def _settings(graph: torch.fx.Graph) -> list[tuple[Any, Any]]:
    """Return the probabilities of all dropouts, and whether they drop."""
    return [dropout_of(node) for node in _dropouts(graph)]


def dropout_of(node: Node) -> tuple[Any, Any]:
    """Return the probability of a dropout, alone or inside of attention, and whether it drops."""
    if "dropout" in operation_of(node):
        return node.args[1], node.args[2]
    p: Any = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return p, p > 0


def _set(node: Node, setting: tuple[float, bool]) -> None:
    if operation_of(node) == "dropout":
        node.args = (node.args[0], *setting)
    elif "attn_mask" not in node.kwargs:
        operands = [*node.args, *[None] * 4]
        args = [*operands[:4], setting[0], *node.args[5:]]
        while args[-1] in (None, 0.0):
            args.pop()
        node.args = tuple(args)


def _sources(program: ExportedProgram) -> Callable[[Node], Source]:
    """Return a function from placeholders to their sources."""
    signature = program.graph_signature
    parameters, buffers = signature.inputs_to_parameters, signature.inputs_to_buffers
    lost, lifted = signature.non_persistent_buffers, signature.inputs_to_lifted_tensor_constants
    state, constants = program.state_dict, program.constants

    def source_of(node: Node) -> Source:
        if node.name in parameters:
            name = parameters[node.name]
            return Source("parameter", name, state[name])
        if node.name in buffers:
            name = buffers[node.name]
            persistent = name not in lost
            return Source("buffer", name, (state if persistent else constants)[name], persistent)
        name = lifted.get(node.name, "")
        return Source("constant", name, constants[name]) if name else Source("input")

    return source_of


def _equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y


def _children(spec: Any) -> list[Any]:
    """Return the children of a pytree spec, whose name differs between versions of torch."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)
