"""Run an exported graph on labels instead of numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.constraints import Constraints, Rule
from lightning_bnn.symmetry.export import operation_name
from lightning_bnn.symmetry.groups import Frozen, SoftmaxShift, Symmetries
from lightning_bnn.symmetry.labels import Constant, Unsupported, Value, Weight, core, is_operand
from lightning_bnn.symmetry.solve import solve

__all__ = ["Tracer"]


_RANDOM = frozenset(
    (
        "rand randn rand_like randn_like bernoulli randint empty new_empty randperm "
        "multinomial normal"
    ).split()
)
_SHIFT_KEEPS = frozenset(
    ("view reshape flatten squeeze dropout softmax log_softmax contiguous clone alias").split()
)
_NO_VALUE = frozenset(
    ["_assert_tensor_metadata", "_assert_scalar", "sym_size", "sym_constrain_range_for_size"]
)


@dataclass
class Tracer:
    """Runs a graph on labels instead of numbers."""

    model: nn.Module
    rules: Mapping[str, Rule]
    system: Constraints = field(default_factory=Constraints)
    frozen: list[Frozen] = field(default_factory=list)
    shift: SoftmaxShift | None = None
    read_names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Map every name of a shared tensor to its first one."""
        owner: dict[int, str] = {}
        self.alias: dict[str, str] = {}
        tensors = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            self.alias[name] = owner.setdefault(id(tensor), name)

    def unread_parameters(self) -> list[str]:
        """Parameters that no graph has used so far."""
        return [name for name, _ in self.model.named_parameters() if name not in self.read_names]

    def read(self, program: ExportedProgram) -> None:
        """Follow the channels through one graph."""
        values: dict[Node, Any] = {}
        results = _results(program)
        live = _ancestors(results)
        for node in program.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._input(program, node)
            elif node.op == "call_function" and node in live:
                values[node] = self._call(node, values)
        for node in results:
            for leaf in tree_leaves(values[node], is_leaf=is_operand):
                self._hold(leaf)
        self.shift = self.shift or _find_shift(results, values)

    def _input(self, program: ExportedProgram, node: Node) -> Any:
        signature, value = program.graph_signature, node.meta.get("val")
        name = signature.inputs_to_parameters.get(node.name)
        if name is not None:
            name = self.alias.get(name, name)
            if node.users:
                self.read_names.add(name)
            return Weight.whole(name, value.shape, is_buffer=False)
        name = signature.inputs_to_buffers.get(node.name)
        constant = signature.inputs_to_lifted_tensor_constants.get(node.name)
        if name is not None and name not in signature.non_persistent_buffers:
            tensor = program.state_dict[name]
            if tensor.is_floating_point():
                return Weight.whole(self.alias.get(name, name), value.shape, is_buffer=True)
            return Constant(tensor)
        if name is not None or constant is not None:
            return Constant(program.constants[name or constant])
        return _unknown(value)

    def _call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        name = operation_name(node).removesuffix("_")
        operands = [x for x in tree_leaves((args, kwargs), is_leaf=is_operand) if is_operand(x)]
        if name in _RANDOM or name in _NO_VALUE:
            return _unknown(node.meta.get("val"))
        if all(isinstance(x, Constant) for x in operands):
            return _fold(node, args, kwargs)
        if not any(isinstance(x, Weight) for x in operands) and not any(
            _has_channels(x) for x in operands
        ):
            return _unknown(node.meta["val"])
        self._see(operands)
        try:
            if name not in self.rules:
                raise Unsupported("this operation has no rule")
            return self.rules[name](self.system, node, *args, **kwargs)
        except Unsupported as error:
            return self._opaque(node, operands, str(error))
        except (RuntimeError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            return self._opaque(
                node,
                operands,
                f"its rule does not cover this use ({type(error).__name__}: {error})",
            )

    def _see(self, operands: list[Any]) -> None:
        """Channels that meet different operations are not exchangeable."""
        found = [np.unique(core(x.labels).numpy()) for x in operands if isinstance(x, Value)]
        self.system.seen.append(
            np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
        )

    def _hold(self, operand: Any) -> None:
        if isinstance(operand, Value):
            self.system.freeze(operand.labels)
        elif isinstance(operand, Weight):
            self.system.conflicts.setdefault(
                operand.name, "used by an operation that is not understood"
            )

    def _opaque(self, node: Node, operands: list[Any], reason: str) -> Any:
        for operand in operands:
            self._hold(operand)
        self.frozen.append(_report(node, reason))
        return _unknown(node.meta["val"])

    def result(self) -> Symmetries:
        """Solve the system."""
        for name, reason in self.system.conflicts.items():
            for entry in self.system.entries.values():
                if entry.name == name:
                    self.system.freeze(entry.labels)
            if not any(name in f.module or "operation" in reason for f in self.frozen):
                self.frozen.append(Frozen("parameter", name, "", reason))
        shapes = {self.alias.get(k, k): v.shape for k, v in self.model.state_dict().items()}
        symmetries = solve(self.system, shapes)
        biases = {e.name for e in self.system.entries.values() if e.role == "bias"} | set(
            _added_vectors(symmetries, shapes)
        )
        parameters = [name for name, p in self.model.named_parameters() if p.is_floating_point()]
        weights = tuple(
            n
            for n in parameters
            if n not in biases and not (n not in self.read_names and n.endswith("bias"))
        )
        unique = tuple(dict.fromkeys(self.frozen))
        return replace(
            symmetries, frozen=unique, softmax_shift=self.shift, weights=weights, shapes=shapes
        )


def _added_vectors(symmetries: Symmetries, shapes: Mapping[str, torch.Size]) -> list[str]:
    """Raw parameters with one dimension are biases: they were added to an output."""
    return [
        a.tensor
        for a in symmetries.axes
        if a.role == "raw" and a.size == shapes[a.tensor].numel() and a.dim is not None
    ]


def _results(program: ExportedProgram) -> list[Node]:
    """The nodes that the network returns, without the buffers it updates."""
    names = set(program.graph_signature.user_outputs)
    output = next(n for n in program.graph.nodes if n.op == "output")
    return [
        n
        for n in dict.fromkeys(tree_leaves(output.args))
        if isinstance(n, Node) and n.name in names
    ]


def _ancestors(nodes: list[Node]) -> set[Node]:
    """Everything the results depend on: dead code must not constrain a channel."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _has_channels(x: Any) -> bool:
    return isinstance(x, Value) and bool((core(x.labels) != 0).any())


def _unknown(value: Any) -> Any:
    """Something that depends on the input alone: fixed under every symmetry."""

    def fixed(v: Any) -> Any:
        return (
            Value(torch.zeros((1,) * v.ndim, dtype=torch.long).expand(v.shape))
            if isinstance(v, Tensor)
            else v
        )

    return tree_map(fixed, value)


def _fold(node: Node, args: Any, kwargs: Any) -> Any:
    """Compute what depends on constants only."""
    args, kwargs = tree_map(
        lambda x: x.tensor if isinstance(x, Constant) else x, (args, kwargs), is_leaf=is_operand
    )
    with torch.no_grad():
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    return tree_map(lambda v: Constant(v) if isinstance(v, Tensor) else v, result)


def _report(node: Node, reason: str) -> Frozen:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = re.sub(r"@\d+$", "", stack[-1][0]) if stack else ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [x for x in lines if "/torch/" not in x[0]] or lines
    line = f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
    return Frozen(operation_name(node), module, line, reason)


def _find_shift(results: list[Node], values: Mapping[Node, Any]) -> SoftmaxShift | None:
    """The layer that writes the logits, if only shape operations and softmax follow it."""
    node: Any = results[0] if len(results) == 1 else None
    while node is not None and node.op == "call_function" and operation_name(node) in _SHIFT_KEEPS:
        node = node.args[0] if isinstance(node.args[0], Node) else None
    if (
        node is None
        or node.op != "call_function"
        or operation_name(node) not in ("linear", "conv2d")
    ):
        return None
    weight = values[node.args[1]]
    bias = values[node.args[2]] if len(node.args) > 2 and node.args[2] is not None else None
    if not isinstance(weight, Weight) or weight.shape != weight.full_shape:
        return None
    linear = operation_name(node) == "linear"
    return SoftmaxShift(weight.name, bias.name if bias else None, -1 if linear else 1)
