"""Run an exported graph on labels instead of numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.discovery.export import (
    ancestors,
    operation_name,
    results_of,
    written_buffers,
)
from lightning_bnn.symmetry.discovery.logits import find_shift
from lightning_bnn.symmetry.discovery.solve import solve
from lightning_bnn.symmetry.discovery.values import (
    drawn,
    fold,
    full_size,
    has_channels,
    is_random,
    is_uniform,
    unknown,
)
from lightning_bnn.symmetry.groups import Frozen, SoftmaxShift, Symmetries
from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.labels import (
    Constant,
    Noise,
    Unsupported,
    Value,
    Weight,
    core,
    is_operand,
    noise_of,
)
from lightning_bnn.symmetry.shared_tensors import named_tensors, overlapping, owners

__all__ = ["Tracer"]

_FOR_THEIR_SHAPE = frozenset("empty new_empty empty_like rand_like randn_like randint_like".split())
_KEEP_NOISE = frozenset(
    "add sub rsub mul div neg lt le gt ge eq ne clamp clamp_min clamp_max floor logical_not "
    "bitwise_not to _to_copy type_as exp log sqrt pow abs sign".split()
)
_NO_VALUE = frozenset(
    ["_assert_tensor_metadata", "_assert_scalar", "sym_size", "sym_constrain_range_for_size"]
)
_MEET_NOISE = frozenset("add sub subtract rsub mul multiply where masked_fill".split())
_UNIFORM = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full zero".split())
_BROADCASTING = frozenset(
    "add sub mul div maximum minimum where masked_fill gt lt ge le eq ne clamp_min clamp_max clamp "
    "relu sigmoid tanh exp sqrt rsqrt reciprocal neg pow".split()
)


@dataclass
class Tracer:
    """Runs graphs on labels instead of numbers.

    ``mutable`` names the buffers that the forward itself changes in training: they are state, as
    weights are. Other buffers of more than one dimension are constants, and are kept as such.
    ``read_buffers`` are those that results depend on, so that what is written there matters.
    """

    model: nn.Module
    rules: Mapping[str, Rule]
    mutable: frozenset[str] = frozenset()
    read_buffers: frozenset[str] = frozenset()
    system: Constraints = field(default_factory=Constraints)
    frozen: list[Frozen] = field(default_factory=list)
    shift: SoftmaxShift | None = None
    read_names: set[str] = field(default_factory=set)
    operations: set[str] = field(default_factory=set)
    constants: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Map every name of a shared tensor to its first one."""
        self.alias = owners(self.model)
        self.mutable = frozenset(self.alias.get(n, n) for n in self.mutable)
        for name, other in overlapping(named_tensors(self.model)).items():
            reason = f"shares its memory with {other!r} in another layout: held fixed"
            self.system.conflicts[self.alias[name]] = reason

    def unread_parameters(self) -> list[str]:
        """Parameters that no graph has used so far."""
        return [name for name, _ in self.model.named_parameters() if name not in self.read_names]

    def read(self, program: ExportedProgram) -> None:
        """Follow the channels through one graph."""
        results = results_of(program)
        written = [w for w in written_buffers(program) if w[0] in self.read_buffers]
        seen = [*results, *(node for _, node in written)]
        placeholders = [n for n in ancestors(seen) if n.op == "placeholder"]
        inputs = {n: self._input(program, n) for n in placeholders}
        values = self._follow(program.graph_module, inputs, seen)
        for name, node in written:
            self._write(program, name, node, values[node])
        for node in results:
            for leaf in tree_leaves(values[node], is_leaf=is_operand):
                self._hold(leaf)
        tied = {first for name, first in self.alias.items() if name != first}
        shift = find_shift(results, values)
        if shift is not None and not tied & {shift.weight, shift.bias}:
            self.shift = self.shift or shift

    def _write(self, program: ExportedProgram, name: str, node: Node, value: Any) -> None:
        """What a forward leaves in a buffer must move as the buffer does."""
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and "batch_norm" in operation_name(source):
            return  # its rule ties the statistics
        old = next(n for n, b in program.graph_signature.inputs_to_buffers.items() if b == name)
        place = next(n for n in program.graph.nodes if n.name == old)
        held = self._input(program, place)
        try:
            unify(self.system, [self.system.labels(x) for x in (held, value)])
        except (Unsupported, RuntimeError):
            self._hold(held)
            self._hold(value)

    def _follow(
        self, module: torch.fx.GraphModule, values: dict[Node, Any], results: list[Node]
    ) -> dict[Node, Any]:
        """Values of all nodes that the results depend on."""
        live = ancestors(results)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target), None)
            elif node.op == "call_function" and node in live:
                values[node] = self._call(node, values)
        return values

    def _inline(self, args: tuple[Any, ...]) -> Any:
        """A part of the forward under `autocast` or `enable_grad`, which changes no channel."""
        at = next(k for k, a in enumerate(args) if isinstance(a, torch.fx.GraphModule))
        module = args[at]
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        output = next(n for n in module.graph.nodes if n.op == "output").args[0]
        results = [n for n in tree_leaves(output) if isinstance(n, Node)]
        values = dict(zip(inputs, args[at + 1 :], strict=True))
        values = self._follow(module, values, results)
        return torch.fx.map_arg(output, values.__getitem__)

    def _input(self, program: ExportedProgram, node: Node) -> Any:
        signature = program.graph_signature
        value: Any = node.meta.get("val")
        name = signature.inputs_to_parameters.get(node.name)
        if name is not None:
            name = self.alias.get(name, name)
            self.read_names.add(name)
            return Weight.whole(name, value.shape, is_buffer=False)
        name = signature.inputs_to_buffers.get(node.name)
        if name is not None:
            return self._buffer(program, self.alias.get(name, name), name, value)
        constant = signature.inputs_to_lifted_tensor_constants.get(node.name)
        return Constant(program.constants[constant]) if constant is not None else unknown(value)

    def _buffer(self, program: ExportedProgram, owner: str, name: str, value: Tensor) -> Any:
        """State that moves with its channels, a constant, or what no action could reach."""
        persistent = name not in program.graph_signature.non_persistent_buffers
        tensor = program.state_dict[name] if persistent else program.constants[name]
        changes = owner in self.mutable
        if persistent and tensor.is_floating_point() and (changes or tensor.ndim == 1):
            return Weight.whole(owner, value.shape, is_buffer=True)
        if changes:
            return unknown(value)
        if persistent:
            self.constants[owner] = tensor.detach().clone()
        return Constant(tensor)

    def _call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        name = operation_name(node).removesuffix("_")
        self.operations.add(name)
        arguments = values.__getitem__ if name in _BROADCASTING else full_size(values)
        given: Any = (node.args, node.kwargs)
        args, kwargs = torch.fx.map_arg(given, arguments)
        operands = [x for x in tree_leaves((args, kwargs), is_leaf=is_operand) if is_operand(x)]
        try:
            return self._value(name, node, args, kwargs, operands)
        except Unsupported as error:
            return self._opaque(node, operands, str(error))
        except Exception as error:  # an operation used in a way nobody foresaw is held fixed too
            reason = f"its rule does not cover this use ({type(error).__name__}: {error})"
            return self._opaque(node, operands, reason)

    def _value(self, name: str, node: Node, args: Any, kwargs: Any, operands: list[Any]) -> Any:
        if node.target is operator.getitem:
            return args[0][args[1]]
        if name.startswith("wrap_with_"):
            return self._inline(args)
        if name in _NO_VALUE:
            return unknown(node.meta.get("val"))
        if name in _FOR_THEIR_SHAPE:  # what is in an empty tensor is written over
            return drawn(node, ())
        if is_random(node) and not any(map(has_channels, operands)):
            return drawn(node, operands)
        if all(isinstance(x, Constant) for x in operands):
            return fold(node, args, kwargs)
        return self._apply_rule(name, node, args, kwargs, operands)

    def _apply_rule(
        self, name: str, node: Node, args: Any, kwargs: Any, operands: list[Any]
    ) -> Any:
        if name not in _UNIFORM and not any(map(has_channels, operands)):
            return self._of_noise(name, node, operands)
        self._see(operands)
        if name not in _MEET_NOISE:
            self._look_at(operands)
        if name not in self.rules:
            raise Unsupported("this operation has no rule")
        return self.rules[name](self.system, node, *args, **kwargs)

    def _of_noise(self, name: str, node: Node, operands: list[Any]) -> Any:
        """What is computed from noise and from nothing that has channels."""
        draws = [x for x in operands if isinstance(x, Noise)]
        alike = all(isinstance(x, Noise) or is_uniform(x) for x in operands)
        if len(draws) == 1 and alike and name in _KEEP_NOISE:
            return noise_of(node, draws[0].source)
        self._look_at(draws)
        return unknown(node.meta["val"])

    def _look_at(self, operands: Iterable[Any]) -> None:
        """Draws that are used by themselves, too, have a place."""
        self.system.seen_noise.update(x.source for x in operands if isinstance(x, Noise))

    def _see(self, operands: list[Any]) -> None:
        """Channels that meet different operations are not exchangeable."""
        found = [np.unique(core(x.labels).numpy()) for x in operands if isinstance(x, Value)]
        self.system.seen.append(
            np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
        )

    def _hold(self, operand: Any) -> None:
        if isinstance(operand, Value):
            self._look_at([operand])
            self.system.freeze(operand.labels)
        elif isinstance(operand, Weight):
            self.system.conflicts.setdefault(
                operand.name, "used by an operation that is not understood"
            )

    def _opaque(self, node: Node, operands: list[Any], reason: str) -> Any:
        for operand in operands:
            self._hold(operand)
        self.frozen.append(_report(node, reason))
        return unknown(node.meta["val"])

    def result(self) -> Symmetries:
        """Solve the system."""
        for source in self.system.seen_noise & self.system.noise.keys():
            self.system.freeze(self.system.noise[source])
        for name, reason in self.system.conflicts.items():
            for entry in self.system.entries.values():
                if entry.name == name:
                    self.system.freeze(entry.labels)
            if not any(name in f.module or "operation" in reason for f in self.frozen):
                self.frozen.append(Frozen("parameter", name, "", reason))
        state = self.model.state_dict()
        shapes = {self.alias.get(k, k): t.shape for k, t in state.items() if isinstance(t, Tensor)}
        symmetries = solve(self.system, shapes)
        weights = self._weights(symmetries, shapes)
        unique = tuple(dict.fromkeys(self.frozen))
        return replace(
            symmetries,
            frozen=unique,
            softmax_shift=self.shift,
            weights=weights,
            shapes=shapes,
            aliases={n: first for n, first in self.alias.items() if n != first},
            constants={n: t for n, t in self.constants.items() if n in shapes},
        )

    def _weights(self, symmetries: Symmetries, shapes: Mapping[str, torch.Size]) -> tuple[str, ...]:
        """Parameters that count for the mass: all but biases, read or not."""
        biases = {e.name for e in self.system.entries.values() if e.role == "bias"}
        biases.update(_added_vectors(symmetries, shapes))
        biases.update(n for n in self.unread_parameters() if n.endswith("bias"))
        named = self.model.named_parameters()
        return tuple(
            n for n, p in named if p.is_floating_point() and self.alias[n] == n and n not in biases
        )


def _added_vectors(symmetries: Symmetries, shapes: Mapping[str, torch.Size]) -> list[str]:
    """Raw parameters with one dimension are biases: they were added to an output."""
    return [
        a.tensor
        for a in symmetries.axes
        if a.role == "raw" and a.size == shapes[a.tensor].numel() and a.dim is not None
    ]


def _report(node: Node, reason: str) -> Frozen:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = re.sub(r"@\d+$", "", stack[-1][0]) if stack else ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [x for x in lines if "/torch/" not in x[0]] or lines
    line = f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
    return Frozen(operation_name(node), module, line, reason)
