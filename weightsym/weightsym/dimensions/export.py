"""A network as a graph of about fifty kinds of operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from weightsym.dimensions.decomposition import written_out
from weightsym.dimensions.nodes import ancestors, operation_of
from weightsym.shared_tensors import named_tensors, owners

__all__ = ["Program", "Rule", "decompose", "trace"]

Rule: TypeAlias = Callable[..., Any] | Literal["pointwise"]
"""What an operation of others does: a function of torch that computes the same, which is read in
its place, or ``"pointwise"`` for a function of single numbers, which is measured on some."""


class Program(NamedTuple):
    """The operations of a network that its results depend on, in order.

    Attributes:
        exported: the program of `torch.export`.
        graph: its operations, written out.
        nodes: the live nodes.
        results: the nodes that the network returns.
        tensors: parameters and buffers by the first of their names.
        owners: that name by the name of a placeholder.
        state: float buffers of one dimension, or that a forward writes; others are constants.
        changing: buffers that a forward writes.
        written: the nodes whose numbers replace those of a buffer, and its name.
        constants: the tensors that the graph reads by the target of a node.
    """

    exported: ExportedProgram
    graph: Graph
    nodes: list[Node]
    results: list[Node]
    tensors: Mapping[str, Tensor]
    owners: Mapping[str, str]
    state: frozenset[str]
    changing: frozenset[str]
    written: tuple[tuple[Node, str], ...]
    constants: Mapping[str, Any]

    def is_parameter(self, node: Node) -> bool:
        """Tell whether a placeholder stands for a parameter."""
        return node.name in self.exported.graph_signature.inputs_to_parameters

    def is_buffer(self, node: Node) -> bool:
        """Tell whether a placeholder stands for a buffer."""
        return node.name in self.exported.graph_signature.inputs_to_buffers

    def constant_of(self, node: Node) -> Tensor | None:
        """The numbers of a placeholder that stands for a constant of the code."""
        name = self.exported.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
        numbers = self.exported.constants[name] if name is not None else None
        return numbers if isinstance(numbers, Tensor) else None


def trace(model: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Program:
    """Export a module, and decompose its program."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = export(model, args, dict(named), strict=False)
    return decompose(model, exported)


def decompose(
    model: nn.Module, exported: ExportedProgram, changing: Collection[str] = (),
    kept: Collection[str] = (), rules: Mapping[str, Rule] | None = None,
) -> Program:  # fmt: skip
    """Write the compound operations of an exported module out as sums, products and functions.

    Args:
        model: the module.
        exported: what `torch.export` says of it.
        changing: further buffers that a forward writes, in another mode.
        kept: the buffers for which it matters what is written into them.
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
    results = [decomposed.results[n] for n in returned if n.name in signature.user_outputs]
    tensors, first_names = _tensors(model, exported)
    first = {name: first_names[p] for p, name in signature.inputs_to_buffers.items()}
    at_the_end = {
        **{signature.buffers_to_mutate.get(n.name): decomposed.results[n] for n in returned},
        **{signature.inputs_to_buffers.get(p.name): n for p, n in decomposed.written.items()},
    }
    written = tuple(
        (n, first[name])
        for name, n in at_the_end.items()
        if name in kept and tensors[first[name]].is_floating_point()
    )
    live = ancestors([*results, *(n for n, _ in written)])
    nodes = [n for n in decomposed.graph.nodes if n in live]
    mutable = {*at_the_end, *changing}
    changes = frozenset(own for name, own in first.items() if name in mutable)
    state = {
        name
        for name in map(first_names.__getitem__, signature.inputs_to_buffers)
        if tensors[name].is_floating_point()
        and (
            name in changes
            or (tensors[name].ndim == 1 and name not in signature.non_persistent_buffers)
        )
    }
    return Program(
        exported, decomposed.graph, nodes, results, tensors, first_names, frozenset(state), changes,
        written, decomposed.constants,
    )  # fmt: skip


def _tensors(
    model: nn.Module, exported: ExportedProgram
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by the first of their names, and that name by the name of a placeholder."""
    first, every = owners(model), dict(named_tensors(model))
    signature = exported.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {node: first.get(name, name) for node, name in states.items()}
    tensors = {name: every[name] for name in first.values()}
    for name in names.values():
        if name not in tensors:
            tensors[name] = exported.state_dict.get(name, exported.constants.get(name))
    return tensors, names
