"""Run a graph on labels instead of numbers: every operation is asked what it does to channels."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.discovery.draws import is_random
from lightning_bnn.symmetry.discovery.graph import ancestors, descendants, repeated
from lightning_bnn.symmetry.discovery.marking import hold_complex, mark_mixing
from lightning_bnn.symmetry.discovery.reports import check_sizes, reason_of, report
from lightning_bnn.symmetry.discovery.twin_channels import Made
from lightning_bnn.symmetry.discovery.values import (
    draw,
    fold,
    full_size,
    has_channels,
    is_applied,
    one_law,
    unknown,
    with_copies,
)
from lightning_bnn.symmetry.groups import Frozen
from lightning_bnn.symmetry.rules import weight_products
from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.factored import as_parts, as_values
from lightning_bnn.symmetry.rules.gathered import as_chosen
from lightning_bnn.symmetry.rules.labels import (
    Chosen,
    Constant,
    Factored,
    Gathered,
    Index,
    Noise,
    Unsupported,
    Value,
    Weight,
    core,
    is_operand,
    is_zero,
    noise_of,
    operation_name,
)
from lightning_bnn.symmetry.rules.table import (
    ACCEPT_NOISE,
    ALLOCATIONS,
    BROADCASTING,
    EXPANDING,
    INDEX_SHAPES,
    JOINS,
    KEEP_NOISE,
    OF_ROWS,
    OF_WEIGHTS,
    RESHAPING,
    TAKE_INDICES,
    TAKE_WEIGHTS,
    UNIFORM,
    WITHOUT_VALUE,
)

__all__ = ["Interpreter"]


_IN_COMMON = "what an index picks from a stack has, in this use, rows and columns in common"


class Interpreter:
    """Walks through graphs, one operation after the other.

    Attributes:
        system: what the rules of the operations have stated.
        frozen: the operations that were not understood.
        limits: those beyond which matrices are not followed, as the system has them.
        operations: the names of all operations.
        made: how many channels there were before and after every operation.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self.system = Constraints()
        self.frozen: list[Frozen] = []
        self.operations: set[str] = set()
        self.limits: list[Frozen] = []
        self.active: set[Node] = set()
        self.made: dict[Node, tuple[Made, Made]] = {}

    def run(
        self, module: GraphModule, inputs: Mapping[Node, Any], results: Iterable[Node]
    ) -> dict[Node, Any]:
        """Values of all nodes that the results depend on, from those of the placeholders."""
        values, live = dict(inputs), ancestors(results)
        same = repeated(module)
        self.active |= descendants(n for n, x in inputs.items() if isinstance(x, Value))
        for node in module.graph.nodes:
            if node in inputs:
                continue
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target), None)
            elif same.get(node) in values:
                values[node] = values[same[node]]
            elif node.op == "call_function" and node in live:
                before = Made.so_far(self.system)
                values[node] = self._call(node, values)
                self.limits += [
                    report(node, limit.reason) for limit in self.system.limits[len(self.limits) :]
                ]
                self.made[node] = before, Made.so_far(self.system)
        return values

    def freeze(self, operand: Any) -> None:
        """Freeze whatever an operand stands for."""
        if isinstance(operand, Value):
            self._see_draws([operand])
            self.system.freeze(operand.labels)
            if isinstance(operand, Chosen):
                self.system.freeze(operand.channels)
        elif isinstance(operand, Factored):
            for part in operand.parts:
                self.system.freeze(part)
        elif isinstance(operand, Gathered):
            self.freeze(as_chosen(self.system, operand))
        elif isinstance(operand, Weight):
            self.system.conflicts.setdefault(
                operand.name, "used by an operation that is not understood"
            )

    def _call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        name = operation_name(node).removesuffix("_")
        self.operations.add(name)
        value_of = values.__getitem__ if name in BROADCASTING else full_size(values)
        if name in RESHAPING:
            value_of = with_copies(self.system, values)
        arguments: Any = (node.args, node.kwargs)
        args, kwargs = torch.fx.map_arg(arguments, value_of)
        operands = [x for x in tree_leaves((args, kwargs), is_leaf=is_operand) if is_operand(x)]
        try:
            return self._value(name, node, args, kwargs, operands)
        except Unsupported as error:
            reason = str(error)
        except Exception as error:  # an operation used in a way nobody foresaw is held fixed too
            reason = reason_of(error, node)
        for operand in operands:
            self.freeze(operand)
        self.frozen.append(report(node, reason))
        check_sizes(node)
        return unknown(node.meta["val"])

    def _value(self, name: str, node: Node, args: Any, kwargs: Any, operands: list[Any]) -> Any:
        if node.target is operator.getitem:
            return args[0][args[1]]
        if name.startswith("wrap_with_"):
            return self._run_inside(args)
        if name in WITHOUT_VALUE:
            return unknown(node.meta.get("val"))
        if name in ALLOCATIONS:
            return draw(node, ())
        if is_random(node) and not any(map(has_channels, operands)):
            return draw(node, operands)
        if all(isinstance(x, Constant) for x in operands):
            return fold(node, args, kwargs)
        needed = name in UNIFORM or (name in EXPANDING and type(args[0]) is Value)
        needed |= name in JOINS and any(map(is_zero, operands))
        if not needed and not any(map(has_channels, operands)):
            return self._of_noise(name, node, operands)
        return self._apply_rule(name, node, args, kwargs, operands)

    def _run_inside(self, args: tuple[Any, ...]) -> Any:
        """A part of the forward under `autocast` or `enable_grad`, which changes no channel."""
        at = next(k for k, a in enumerate(args) if isinstance(a, GraphModule))
        module = args[at]
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        output = next(n for n in module.graph.nodes if n.op == "output").args[0]
        results = [n for n in tree_leaves(output) if isinstance(n, Node)]
        values = self.run(module, dict(zip(inputs, args[at + 1 :], strict=True)), results)
        return torch.fx.map_arg(output, values.__getitem__)

    def _of_noise(self, name: str, node: Node, operands: list[Any]) -> Any:
        """What is computed from noise and from nothing that has channels."""
        draws = [x for x in operands if isinstance(x, Noise)]
        if len(draws) == 1 and one_law(operands) and name in KEEP_NOISE:
            return noise_of(node, draws[0].source)
        self._see_draws(draws)
        return unknown(node.meta["val"])

    def _apply_rule(
        self, name: str, node: Node, args: Any, kwargs: Any, operands: list[Any]
    ) -> Any:
        if any(isinstance(x, Gathered) for x in operands):
            return self._of_rows(name, node, args, kwargs, operands)
        if name in INDEX_SHAPES and isinstance(args[0], Index):
            return _moved_index(self.rules[name](self.system, node, *args, **kwargs), args[0])
        if name not in TAKE_INDICES and any(isinstance(x, Chosen) for x in operands):
            raise Unsupported("an index among channels")
        if name in OF_WEIGHTS and self._computes_weight(node, operands):
            try:
                return self._ask_by_parts(name, node, args, kwargs, operands)
            except Unsupported:  # of activations the products of parts are channels, too
                if not any(x.active for x in operands if isinstance(x, Factored)):
                    raise
            args, kwargs = as_values(self.system, args, kwargs)
        elif name not in TAKE_WEIGHTS:
            args, kwargs = as_values(self.system, args, kwargs)
        return self._ask(name, self.rules, node, args, kwargs, operands)

    def _of_rows(self, name: str, node: Node, args: Any, kwargs: Any, operands: list[Any]) -> Any:
        """Of rows that an index picks: for all rows, or of what was chosen by itself."""
        others = Factored if name in TAKE_INDICES else Factored | Chosen
        if name in OF_ROWS and not any(isinstance(x, others) for x in operands):
            try:
                return self._ask(name, OF_ROWS, node, args, kwargs, operands)
            except Unsupported:
                pass

        def chosen(x: Any) -> Any:
            return as_chosen(self.system, x)

        stacks = [x for x in operands if isinstance(x, Gathered) and isinstance(x.what, Weight)]
        if any(len(x.what.shape) > 2 for x in stacks):
            self.frozen.append(report(node, _IN_COMMON))
        args, kwargs = tree_map(chosen, (args, kwargs), is_leaf=is_operand)
        operands = [x for x in tree_leaves((args, kwargs), is_leaf=is_operand) if is_operand(x)]
        return self._apply_rule(name, node, args, kwargs, operands)

    def _ask_by_parts(
        self, name: str, node: Node, args: Any, kwargs: Any, operands: list[Any]
    ) -> Any:
        if name not in TAKE_WEIGHTS:
            args, kwargs = as_parts(self.system, args, kwargs)
        return self._ask(name, OF_WEIGHTS, node, args, kwargs, operands)

    def _ask(
        self,
        name: str,
        rules: Mapping[str, Rule],
        node: Node,
        args: Any,
        kwargs: Any,
        operands: list[Any],
    ) -> Any:
        """What the rule of an operation returns, and what else it says about its operands."""
        leaves = tree_leaves((args, kwargs), is_leaf=is_operand)
        self._see_channels([x for x in leaves if is_operand(x)], together=name in JOINS)
        if name not in ACCEPT_NOISE:
            self._see_draws(operands)
        if name not in rules:
            raise Unsupported("this operation has no rule")
        self.system.operation = name
        result = rules[name](self.system, node, *args, **kwargs)
        mark_mixing(self.system, name, operands, result, rules)
        hold_complex(self.system, name, node, operands)
        return result

    def _computes_weight(self, node: Node, operands: list[Any]) -> bool:
        """Whether weights alone are combined into one that a layer will apply."""
        computed = [x for x in operands if isinstance(x, Factored)]
        if any(x.active for x in computed):
            return True
        if computed or any(isinstance(x, Value) for x in operands):
            return bool(computed) and not any(isinstance(x, Value) for x in operands)
        combined = OF_WEIGHTS[operation_name(node).removesuffix("_")] is not weight_products.reshape
        return combined and is_applied(node, self.active)

    def _see_channels(self, operands: list[Any], together: bool) -> None:
        """Channels that different operations are applied to are not exchangeable.

        Nor are those that one operation takes in different places, unless it puts these together.
        """
        parts = [p for x in operands if isinstance(x, Factored) for p in x.parts]
        parts += [x.labels for x in operands if isinstance(x, Value)]
        rows = [x.what for x in operands if isinstance(x, Gathered)]
        parts += [x for x in rows if isinstance(x, torch.Tensor)]
        labels = [np.unique(core(p).numpy()) for p in parts]
        if together:
            labels = [np.unique(np.concatenate([np.zeros(0, np.int64), *labels]))]
        self.system.seen += labels

    def _see_draws(self, operands: Iterable[Any]) -> None:
        """Draws that are used by themselves, too, have a place."""
        self.system.seen_noise.update(x.source for x in operands if isinstance(x, Noise))


def _moved_index(result: Any, index: Index) -> Any:
    """A rearrangement of an index among channels is one."""
    if isinstance(result, Value):
        return Index(result.labels, index.channels)
    return tuple(Index(part.labels, index.channels) for part in result)
