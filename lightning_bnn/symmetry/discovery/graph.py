"""A traced forward: what stands behind its inputs, what it returns and what it writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.dimensions.export import operation_of

__all__ = ["Graph", "Source", "ancestors", "descendants", "repeated", "writes"]


_NO_DROPOUT = re.compile(r"dropout\.default\((\w+), 0(?:\.0)?, (?:True|False)\)")


class Source(NamedTuple):
    """What a placeholder stands for: its name and numbers, where it is a part of the network."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str = ""
    tensor: Any = None
    persistent: bool = True


class Graph:
    """What a network computes, in one mode.

    Attributes:
        module: the operations.
        program: what `torch.export` has returned.
        sources: what every placeholder stands for.
        results: the nodes that the network returns, each once, without the buffers it updates.
        outputs: the same in the order of the network, as often as it returns them.
        names_of_inputs: the inputs that are passed by name, in the order of the placeholders.
        written: the buffers that it changes, and what it writes into them.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.module, self.program = program.graph_module, program
        nodes = list(program.graph.nodes)
        self.sources = {n: self._source(n) for n in nodes if n.op == "placeholder"}
        names = set(program.graph_signature.user_outputs)
        output = next(n for n in nodes if n.op == "output")
        returned = dict.fromkeys(n for n in tree_leaves(output.args) if isinstance(n, Node))
        self.results = [n for n in returned if n.name in names]
        by_name = {n.name: n for n in self.results}
        order = program.graph_signature.user_outputs
        self.outputs = [by_name[name] for name in order if name in by_name]
        _, named = _children(program.call_spec.in_spec)
        self.names_of_inputs: list[str] = list(named.context)
        self.written = [(name, node) for node in nodes for name in self._buffers_written_by(node)]

    def _source(self, node: Node) -> Source:
        program, signature = self.program, self.program.graph_signature
        name = signature.inputs_to_parameters.get(node.name)
        if name is not None:
            return Source("parameter", name, program.state_dict[name])
        name = signature.inputs_to_buffers.get(node.name)
        if name is not None:
            persistent = name not in signature.non_persistent_buffers
            tensors = program.state_dict if persistent else program.constants
            return Source("buffer", name, tensors[name], persistent)
        name = signature.inputs_to_lifted_tensor_constants.get(node.name)
        return Source("constant", name, program.constants[name]) if name else Source("input")

    def _buffers_written_by(self, node: Node) -> list[str]:
        signature = self.program.graph_signature
        name = signature.buffers_to_mutate.get(node.name)
        if writes(node):
            name = signature.inputs_to_buffers.get(_written_tensor(node).name, name)
        return [name] if name is not None else []

    def placeholder_of(self, buffer: str) -> Node:
        """The placeholder that stands for a buffer."""
        return next(n for n, s in self.sources.items() if s[:2] == ("buffer", buffer))

    def buffers_behind(self, nodes: Iterable[Node]) -> set[str]:
        """Names of the buffers that some nodes depend on."""
        sources = (self.sources[n] for n in ancestors(nodes) if n in self.sources)
        return {source.name for source in sources if source.kind == "buffer"}

    def says_the_same(self, other: Graph) -> bool:
        """Whether two graphs have the same operations, with the same literals."""
        if other is self:
            return True
        ours, theirs = self.program.constants, other.program.constants
        if self._code() != other._code() or ours.keys() != theirs.keys():
            return False
        return all(_equal(x, theirs[name]) for name, x in ours.items())

    def _code(self) -> str:
        """The operations in words; a dropout of nothing does nothing in both modes."""
        return _NO_DROPOUT.sub(r"dropout.default(\1)", self.module.code)


def _equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y


def writes(node: Node) -> bool:
    """Whether a node writes into its first argument."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _written_tensor(node: Node) -> Node:
    """The tensor that a chain of in-place operations writes."""
    while writes(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Everything that nodes depend on: dead code must not constrain a channel."""
    return _reached(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """Everything that depends on nodes."""
    return _reached(nodes, lambda node: node.users)


def _reached(nodes: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes themselves and whatever a walk along neighbours meets."""
    reached: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += neighbours(node)
    return reached


def repeated(module: GraphModule) -> dict[Node, Node]:
    """By node, the first that computes the same from the same, nothing of it random or written."""
    changed = {n.args[0] for n in module.graph.nodes if writes(n)}
    first: dict[Any, Node] = {}
    same: dict[Node, Node] = {}
    for node in module.graph.nodes:
        idle = _does_nothing(node)
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        plain = node.op == "call_function" and (idle or not (writes(node) or random))
        if plain and not changed & {node, *node.all_input_nodes}:
            arguments = torch.fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
            known = arguments[0][0] if idle else node
            same[node] = first.setdefault((node.target, str(arguments)), known)
    return same


_NOTHING_NEW = frozenset("flatten view _unsafe_view reshape contiguous to type_as detach".split())


def _does_nothing(node: Node) -> bool:
    """Whether a node returns what it is given; tracers put one such node behind the other."""
    name = operation_of(node)
    if name == "dropout":
        return bool(node.args[1:2] == (0,) or node.args[2:3] == (False,))
    pair = [n.meta.get("val") if isinstance(n, Node) else None for n in (*node.args[:1], node)]
    kinds = {f"{t.shape} {t.dtype}" if isinstance(t, Tensor) else None for t in pair}
    return name in _NOTHING_NEW and len(pair) == 2 and len(kinds) == 1 and None not in kinds


def _children(spec: Any) -> list[Any]:
    """The parts of a structure; torch has called them in two ways."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)
