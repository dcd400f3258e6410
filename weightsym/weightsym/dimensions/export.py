"""A network as a graph of about fifty kinds of operations."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.export import ExportedProgram, default_decompositions, export, exported_program
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from weightsym.dimensions.compound import IN_OTHERS
from weightsym.shared_tensors import named_tensors, owners

__all__ = ["Program", "Rule", "decompose", "operation_of", "trace"]

aten: Any = torch.ops.aten
Rule: TypeAlias = Callable[..., Any] | Literal["pointwise"]
"""What an operation of others does: a function of torch that computes the same, which is read in
its place, or ``"pointwise"`` for a function of single numbers, which is measured on some."""
_WRITTEN_OUT = [
    *(aten.native_layer_norm, aten._softmax, aten._log_softmax, aten.addmm, aten.lstm, aten.gru),
    *(aten.softplus, aten.glu, aten._weight_norm_interface, aten.baddbmm, aten.addcmul),
    *(aten.linalg_vector_norm, aten.lerp, aten.rsub, aten.silu_, aten.repeat),
]
_AS_THEY_ARE = [
    *(aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default),
    *(aten.hardsigmoid.default, aten.elu.default, aten.leaky_relu.default, aten.cumsum.default),
    *(aten.upsample_bilinear2d.vec, aten.upsample_nearest2d.vec),
    aten.matmul.default,
    *(aten.std_mean.correction, aten.std_mean.dim, aten.std_mean.default),
]


class Program(NamedTuple):
    """The operations of a network that its results depend on, in order.

    Attributes:
        exported: the program of `torch.export`, decomposed.
        nodes: the live nodes.
        results: the nodes that the network returns.
        tensors: parameters and buffers by the first of their names.
        owners: that name by the name of a placeholder.
        state: float buffers of one dimension, or that a forward writes; others are constants.
        changing: buffers that a forward writes.
        written: the nodes whose numbers replace those of a buffer, and its name.
    """

    exported: ExportedProgram
    nodes: list[Node]
    results: list[Node]
    tensors: Mapping[str, Tensor]
    owners: Mapping[str, str]
    state: frozenset[str]
    changing: frozenset[str]
    written: tuple[tuple[Node, str], ...]

    def is_parameter(self, node: Node) -> bool:
        """Whether a placeholder stands for a parameter."""
        return node.name in self.exported.graph_signature.inputs_to_parameters

    def is_buffer(self, node: Node) -> bool:
        """Whether a placeholder stands for a buffer."""
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
    own = {}
    for node in exported.graph.nodes:
        rule = (rules or {}).get(operation_of(node)) if node.op == "call_function" else None
        if callable(rule):
            own[node.target] = rule
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = _written_out(exported, own)
    output = next(n for n in exported.graph.nodes if n.op == "output")
    returned = [n for n in tree_leaves(output.args) if isinstance(n, Node)]
    signature = exported.graph_signature
    results = [n for n in returned if n.name in signature.user_outputs]
    tensors, first_names = _tensors(model, exported)
    first = {name: first_names[p] for p, name in signature.inputs_to_buffers.items()}
    written = tuple(
        (n, first[name])
        for n in returned
        for name in [signature.buffers_to_mutate.get(n.name)]
        if name in kept and tensors[first[name]].is_floating_point()
    )
    live = {*results, *(n for n, _ in written)}
    for node in reversed(exported.graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    nodes = [n for n in exported.graph.nodes if n in live]
    mutable = {*signature.buffers_to_mutate.values(), *changing}
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
        exported, nodes, results, tensors, first_names, frozenset(state), changes, written
    )


def _written_out(exported: ExportedProgram, own: Mapping[Any, Callable[..., Any]]) -> Any:
    """Decompose a program as `run_decompositions` does, with ten composite operations.

    Torch prepares each of its 500 composite operations anew for every program, which takes longer
    than all the rest of a small network. Those of others, and own ones, need that.
    """
    targets = [
        node.target
        for module in exported.graph_module.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
    ]
    operations = [t for t in targets if isinstance(t, torch._ops.OpOverload)]
    parts = _parts_of_table()
    if own or parts is None or any(t.namespace != "aten" for t in operations):
        return exported.run_decompositions({**_table(), **own})
    decompose, *tables = parts
    composite, others = map(dict, tables)
    return decompose(exported, cia_to_decomp=composite, python_decomp_table=others)


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    """How operations are written out."""
    table = dict(default_decompositions())
    table.update(get_decompositions(_WRITTEN_OUT))
    table.update(IN_OTHERS)
    for operation in _AS_THEY_ARE:
        table.pop(operation, None)
    return table


@functools.cache
def _parts_of_table() -> tuple[Any, dict[Any, Any], dict[Any, Any]] | None:
    """A private function of torch, our composite operations, and all that are not composite."""
    split = getattr(exported_program, "_split_decomp_table_to_cia_and_python_decomp", None)
    function = getattr(exported_program, "_decompose_exported_program", None)
    if split is None or function is None:
        return None
    known = {"joint_loss_index": None, "decompose_custom_triton_ops": False}
    names = inspect.signature(function).parameters.keys() - {"cia_to_decomp", "python_decomp_table"}
    if not names - {"ep"} <= known.keys():
        return None
    decompose = functools.partial(function, **{n: known[n] for n in known.keys() & names})
    composite, others = split(dict(_table()))
    ours = {*_AS_THEY_ARE, *IN_OTHERS, *get_decompositions(_WRITTEN_OUT)}
    return decompose, {op: f for op, f in composite.items() if op in ours}, others


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


def operation_of(node: Node) -> str:
    """The bare name of an operation, such as ``add``, or ``mylib.add`` of others."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).replace("::", ".").removeprefix("aten.")
    return str(getattr(node.target, "__name__", node.target))
