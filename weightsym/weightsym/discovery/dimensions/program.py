"""A network as a graph of about fifty kinds of operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from weightsym.discovery.dimensions.decomposition import written_out
from weightsym.discovery.dimensions.nodes import ancestors, operation_of
from weightsym.networks.shared_tensors import named_tensors, owners

Rule: TypeAlias = Callable[..., Any] | Literal["pointwise"]
"""What an operation of others does: a function of torch that computes the same, which is read in
its place, or ``"pointwise"`` for a function of single numbers, which is measured on some."""


class Program(NamedTuple):
    """The operations on which the results of a network depend, in order.

    Attributes:
        exported: the program of `torch.export`.
        graph: its operations, written out.
        nodes: the live nodes.
        results: the nodes that the network returns.
        tensors: parameters and buffers by the first of their names.
        owners: that name by the name of a placeholder.
        parameters: the names of placeholders that stand for parameters.
        state: float buffers of one dimension, or that a forward writes; others are constants.
        changing: buffers that a forward writes.
        written: the nodes whose numbers replace those of a buffer, and its name.
        constants: the constants of the code by the target of a node that reads them.
    """

    exported: ExportedProgram
    graph: Graph
    nodes: list[Node]
    results: list[Node]
    tensors: Mapping[str, Tensor]
    owners: Mapping[str, str]
    parameters: frozenset[str]
    state: frozenset[str]
    changing: frozenset[str]
    written: tuple[tuple[Node, str], ...]
    constants: Mapping[str, Any]

    def is_parameter(self, node: Node) -> bool:
        """Return whether a placeholder stands for a parameter."""
        return node.name in self.parameters

    def is_buffer(self, node: Node) -> bool:
        """Return whether a placeholder stands for a buffer."""
        return node.name in self.owners and not self.is_parameter(node)

    def constant_of(self, node: Node) -> Tensor | None:
        """Return the value of a placeholder that stands for a constant of the code."""
        numbers = self.constants.get(node.name)
        return numbers if isinstance(numbers, Tensor) else None


def decompose(
    model: nn.Module, exported: ExportedProgram, changing: Collection[str] = (),
    preserved: Collection[str] = (), rules: Mapping[str, Rule] | None = None,
) -> Program:  # fmt: skip
    """Decompose the operations of an exported module into sums, products and functions.

    Args:
        model: the module.
        exported: what `torch.export` says of it.
        changing: further buffers that a forward writes, in another mode.
        preserved: the buffers for which it matters what is written into them.
        rules: for operations, by name, the functions that compute the same.
    """
    functions = {
        node.target: rule
        for node in exported.graph.nodes
        for rule in [(rules or {}).get(operation_of(node)) if node.op == "call_function" else None]
        if callable(rule)
    }
    decomposed = written_out(exported, functions)
    output = next(n for n in exported.graph.nodes if n.op == "output")
    returned = [n for n in tree_leaves(output.args) if isinstance(n, Node)]
    signature = exported.graph_signature
    buffers, mutated = signature.inputs_to_buffers, signature.buffers_to_mutate
    outputs = set(signature.user_outputs)
    results = [decomposed.results[n] for n in returned if n.name in outputs]
    tensors, first_names = _tensors(model, exported)
    first = {name: first_names[p] for p, name in buffers.items()}
    at_the_end = {
        **{mutated.get(n.name): decomposed.results[n] for n in returned},
        **{buffers.get(p.name): n for p, n in decomposed.written.items()},
    }
    written = tuple(
        (n, first[name])
        for name, n in at_the_end.items()
        if name in preserved and tensors[first[name]].is_floating_point()
    )
    live = ancestors([*results, *(n for n, _ in written)])
    nodes = [n for n in decomposed.graph.nodes if n in live]
    mutable = {*at_the_end, *changing}
    changes = frozenset(names for name, names in first.items() if name in mutable)
    lost = set(signature.non_persistent_buffers)
    state = {
        name
        for name in map(first_names.__getitem__, buffers)
        if tensors[name].is_floating_point()
        and (name in changes or (tensors[name].ndim == 1 and name not in lost))
    }
    lifted = signature.inputs_to_lifted_tensor_constants
    constants = {node: exported.constants[name] for node, name in lifted.items()}
    parameters = frozenset(
        node for node in signature.inputs_to_parameters
        if tensors[first_names[node]].is_floating_point() or tensors[first_names[node]].is_complex()
    )  # fmt: skip
    return Program(
        exported, decomposed.graph, nodes, results, tensors, first_names,
        parameters, frozenset(state), changes, written,
        {**decomposed.constants, **constants},
    )  # fmt: skip


def _tensors(
    model: nn.Module, exported: ExportedProgram
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by their first name, and that name by placeholder."""
    first, every = owners(model), dict(named_tensors(model))
    signature = exported.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {node: first.get(name, name) for node, name in states.items()}
    tensors = {name: every[name] for name in first.values()}
    for name in names.values():
        if name not in tensors:
            tensors[name] = exported.state_dict.get(name, exported.constants.get(name))
    return tensors, names
