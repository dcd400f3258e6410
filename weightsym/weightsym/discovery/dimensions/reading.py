"""From a graph to a system of constraints: each operation by a rule, a move or a measurement."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map

from weightsym.discovery.dimensions import layers
from weightsym.discovery.dimensions.arithmetic import gathered, multiply, sum_over, unify
from weightsym.discovery.dimensions.matrix_stacks import stack_codes
from weightsym.discovery.dimensions.moves import (
    MOVES,
    UNCHANGED,
    Unfollowed,
    expand,
    have_same_labels,
    join,
    move,
    reshaped,
    stacked,
    unsqueezed,
)
from weightsym.discovery.dimensions.nodes import (
    ancestors,
    is_random,
    is_symmetric,
    leaves_of,
    numbered,
    operation_of,
    second_halves,
)
from weightsym.discovery.dimensions.noise import LAWS, is_noise, is_pointwise, met, noise, of_noise
from weightsym.discovery.dimensions.probe import (
    Along,
    NotSeparable,
    Pointwise,
    probe_along,
    probe_pointwise,
)
from weightsym.discovery.dimensions.program import Program
from weightsym.discovery.dimensions.routing import is_routing, route
from weightsym.discovery.dimensions.system import System
from weightsym.discovery.dimensions.values import (
    ZERO,
    Factor,
    Ints,
    Value,
    distinct,
    label_rows,
    with_dims,
)

_FILLED = frozenset(
    "full_like zeros_like ones_like empty_like new_zeros new_ones full zeros ones empty arange "
    "scalar_tensor".split()
)
_ALIASES = {
    "_embedding_bag": "embedding_bag",
    "_embedding_bag_forward_only": "embedding_bag",
    "_native_batch_norm_legit_no_training": "native_batch_norm",
    "_native_batch_norm_legit": "legit_batch_norm",
    "_native_batch_norm_legit_functional": "legit_batch_norm",
}


class Parameter(NamedTuple):
    """A tensor of the network: its shape, its axes, and whether it is a buffer."""

    shape: tuple[int, ...]
    factors: tuple[Factor, ...]
    is_buffer: bool


class Touch(NamedTuple):
    """A use of labels by an operation: ``place`` is the operand, or -1 for the result."""

    operation: int
    place: int
    labels: Ints


class Reading:
    """The constraints of a network on its labels.

    Attributes:
        system: ties and equations.
        parameters: the tensors of the network by name.
        operations: the nodes that were called, in order; origins are their indices.
        touched: which labels pass which operation.
        stacks: nodes that put single rows one behind the other, with the labels of their places.
        unfollowed: by operation, why labels were held fixed.
    """

    def __init__(
        self, *programs: Program, is_fixed: bool = False, pointwise: Collection[str] = (),
        tables: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.programs, self.system = programs, System()
        self.owners = {placeholder: n for p in programs for placeholder, n in p.owners.items()}
        self._is_fixed, self._pointwise = is_fixed, pointwise
        self._changing = frozenset[str]().union(*(p.changing for p in programs))
        self.parameters: dict[str, Parameter] = {}
        self.operations: list[Node] = []
        self.touched: list[Touch] = []
        self.stacks: list[tuple[Tensor, Node]] = []
        self.unfollowed: dict[int, str] = {}
        self._values: dict[Node, Any] = {}
        self._measured: dict[object, Any] = {}
        self._distinct: dict[object, tuple[Tensor, Ints]] = {}
        self._codes = stack_codes(programs, tables)
        self._halves = {a: b for p in programs for a, b in second_halves(p.nodes).items()}
        self._numbers = {n: k for p in programs for n, k in numbered(p.nodes).items()}
        for program in programs:
            for node in program.nodes:
                self._read(program, node)
        self.system.origin = len(self.operations)
        for program in programs:
            self._finish(program)
        self._hold_what_is_unread()
        self.system.hold_unread()

    @classmethod
    def of(cls, *programs: Program, **options: Any) -> Reading:
        """Read programs, again if tables turn out to belong to stacks of matrices."""
        tables, reading = frozenset[str](), cls(*programs, **options)
        while reading._tables() - tables:
            tables |= reading._tables()
            reading = cls(*programs, **options, tables=tables)
        return reading

    def _tables(self) -> frozenset[str]:
        factors = self.system.tables
        labels = (
            set(torch.cat([x.labels.reshape(-1) for x in factors]).tolist()) if factors else set()
        )
        return frozenset(
            name
            for name, parameter in self.parameters.items()
            if any(int(x.labels.reshape(-1)[0]) in labels for x in parameter.factors)
        )

    @property
    def idle(self) -> list[str]:
        """The parameters that are only multiplied by zeros, as in the first step of a loop."""
        zeros = {n for n in self.operations if self._has_lost_its_weights(n)}
        if not zeros:
            return []
        ends = (n for p in self.programs for n in (*p.results, *(n for n, _ in p.written)))
        used = {self.owners.get(node.name) for node in ancestors(ends, zeros)}
        return [n for n, p in self.parameters.items() if not p.is_buffer and n not in used]

    def _has_lost_its_weights(self, node: Node) -> bool:
        result, operands = self._values[node], map(self._values.get, node.all_input_nodes)
        is_constant = isinstance(result, Value) and result.constant is not None
        moves = any(v.factors for v in leaves_of([*operands]) if isinstance(v, Value))
        return is_constant and moves and result.is_zero

    def value_of(self, node: Any) -> Value:
        """Return the value of a node's result."""
        return self._values[node]

    def is_parameter(self, node: Node) -> bool:
        """Return whether a node stands for a parameter."""
        name = self.owners.get(node.name, "") if node.op == "placeholder" else ""
        return name in self.parameters and not self.parameters[name].is_buffer

    def _read(self, program: Program, node: Node) -> None:
        if node.op == "placeholder":
            self._values[node] = self._placeholder(program, node)
        elif node.op == "get_attr":
            constant = program.constants[str(node.target)]
            self._values[node] = (
                Value.constant_of(constant) if isinstance(constant, Tensor) else constant
            )
        elif node.op == "call_function":
            self._call(node)

    def _finish(self, program: Program) -> None:
        """Fix the results, and tie written buffers to the values that later calls read."""
        for k, node in enumerate(program.results):
            value = self._values[node]
            if isinstance(value, Value):
                for factor in gathered(self.system, self.system.as_one_factor(value)).factors:
                    self.system.fix(factor, k + 1)
                self._fix_choice(value)
        for node, name in program.written:
            unify(self.system, [self._state(program, name, True), self._values[node]])

    def _hold_what_is_unread(self) -> None:
        """Fix entries, such as positions, that only a longer example would read.

        They stay in their places, and have the unit of those that are read.
        """
        system, named = self.system, self.system.named()
        for factor in (p for parameter in self.parameters.values() for p in parameter.factors):
            is_read = named[factor.labels]
            unread = replace(factor, labels=torch.where(is_read, ZERO, factor.labels))
            if not bool(is_read.all()):
                system.tell_apart(unread)
                system.mark("apart", unread)
                first = factor.labels[is_read][:1].reshape([-1] + [1] * (factor.labels.ndim - 1))
                others = [(replace(factor, labels=first), -1)] if len(first) else []
                system.balance([(unread, 1), *others])

    # -------------------------------------------------------------- sources
    def _placeholder(self, program: Program, node: Node) -> Any:
        size = node.meta.get("val")
        if program.is_parameter(node) or program.is_buffer(node):
            return self._state(program, program.owners[node.name], program.is_buffer(node))
        constant = program.constant_of(node)
        if constant is not None:
            return Value.constant_of(constant)
        return Value.of(size.shape) if isinstance(size, Tensor) else size

    def _state(self, program: Program, name: str, is_buffer: bool) -> Value:
        tensor = program.tensors[name]
        if is_buffer and name not in program.state:
            is_constant = name not in self._changing
            return Value.constant_of(tensor.detach()) if is_constant else Value.of(tensor.shape)
        if name not in self.parameters:
            factors = self._axes(name, tensor)
            self.parameters[name] = Parameter(tuple(tensor.shape), factors, is_buffer)
            is_lost = name in program.exported.graph_signature.non_persistent_buffers
            for factor in factors if is_buffer else ():
                if is_lost:  # nothing keeps it beside the weights, so that nothing can move it
                    self.system.fix(factor)
                elif name not in self._changing:
                    self.system.stop(factor, sign=False)
        parameter = self.parameters[name]
        return Value.of(parameter.shape, parameter.factors)

    def _axes(self, name: str, tensor: Tensor) -> tuple[Factor, ...]:
        """Return a factor for each dimension, or the factors of a stack of matrices."""
        if name in self._codes:
            factors = []
            for d, (codes, only_moves) in enumerate(self._codes[name]):
                distinct, index = torch.unique(codes, return_inverse=True)
                labels = self.system.new_axis(len(distinct))[index]
                if labels.ndim - labels.shape.count(1) > 1:
                    self.system.stacks.append(self.system.axes[-1])
                power = Fraction(0 if only_moves else 1)
                axis = None if only_moves else (name, d)
                factors.append(Factor(labels, power, int(not only_moves), axis))
            return tuple(factors)
        shape = tuple(tensor.shape)
        if not tensor.numel():
            return ()
        dims = [d for d, n in enumerate(shape) if n > 1] or ([0] if shape else [])
        if not dims:
            return (Factor(self.system.new(), axis=(name, 0)),)
        return tuple(
            Factor(
                self.system.new_axis(shape[d]).reshape(
                    [-1 if k == d else 1 for k in range(len(shape))]
                ),
                axis=(name, d),
            )
            for d in dims
        )

    # -------------------------------------------------------------- one operation
    def _call(self, node: Node) -> None:
        args, named = torch.fx.map_arg((node.args, node.kwargs), lambda n: self._values[n])
        values = [x for x in leaves_of((args, named)) if isinstance(x, Value)]
        index = self.system.origin = len(self.operations)
        has_several = sum(bool(v.factors) for v in values) > 1
        self.system.is_ordered = has_several and not self._is_square(node)
        self.operations.append(node)
        try:
            result = self._result(node, args, named, values)
        except Exception as error:
            is_ours = isinstance(error, Unfollowed | NotSeparable)
            self.unfollowed[index] = str(error) if is_ours else "it cannot be run by itself"
            for value in values:
                for factor in value.factors:
                    self.system.fix(factor)
                self._fix_choice(value)
            result = _without_labels(node.meta.get("val"))
        self._values[node] = result
        if node.target is operator.getitem:
            return
        outputs = result if isinstance(result, tuple | list) else [result]
        for position, value in [*enumerate(values), *((-1, v) for v in outputs)]:
            for factor in value.factors if isinstance(value, Value) else ():
                self.touched.append(Touch(index, position, self._distinct_labels(factor.labels)))

    def _is_square(self, node: Node) -> bool:
        """Return whether commuting operands are the same tensor up to data movement."""
        numbers = {self._numbers[_before_moves(operand)] for operand in node.all_input_nodes}
        return is_symmetric(node) and len(numbers) == 1

    def _distinct_labels(self, labels: Tensor) -> Ints:
        """Return the distinct labels of a factor, sorted once for all operations sharing them."""
        along = zip(labels.shape, labels.stride(), strict=True)
        key = labels.data_ptr(), *(pair for pair in along if pair[0] != 1)
        if key not in self._distinct:
            self._distinct[key] = labels, distinct(labels.numpy())
        return self._distinct[key][1]

    def _fix_choice(self, value: Value) -> None:
        """Fix the labels among which an index was chosen."""
        if value.choice is not None:
            self.system.fix(Factor(value.choice.among))

    def _result(self, node: Node, args: Any, named: Any, values: Sequence[Value]) -> Any:
        name, size = operation_of(node), node.meta.get("val")
        if node.target is operator.getitem:
            return args[0][args[1]]
        if is_random(node):
            return self._random(node, args, values)
        if is_noise(values) and is_pointwise(node):
            return of_noise(self.system, values, size)
        is_tensor = isinstance(size, Tensor)
        is_constant = all(v.constant is not None for v in values) and (values or is_tensor)
        if is_constant or (name in _FILLED and is_tensor):
            return _folded(node, args, named)
        if is_routing(node, args, values):
            return route(self.system, node, args, named, values)
        is_copy = name in ("expand", "cat") or (
            name in MOVES and is_tensor and _has_copies(values[:1])
        )
        if not any(v.factors for v in values) and not is_copy:
            if name in ("sum", "mean") and _has_copies(values):
                return self._sum(node, args, named)
            return _of_inputs(values, size) if is_pointwise(node) else _without_labels(size)
        rule = getattr(self, f"_{_ALIASES.get(name, name)}", None)
        return rule(node, args, named) if rule else self._by_nature(node, args, named, values)

    def _by_nature(self, node: Node, args: Any, named: Any, values: Sequence[Value]) -> Any:
        """Apply a move, a matrix product or an elementwise function, else measure the operation."""
        name = operation_of(node)
        if name in MOVES and _is_constant_index(name, args):
            if name in UNCHANGED and not node.meta["val"].is_floating_point():
                return self._measure(node, args, named, values)
            return move(self.system, node, args, named)
        if name in ("mm", "bmm", "mv", "dot", "matmul"):
            return layers.contract(self.system, *args)
        if is_pointwise(node) or name in self._pointwise:
            return self._measure(node, args, named, values)
        return self._measure_along(node, args, named, values)

    def _random(self, node: Node, args: Any, values: Sequence[Value]) -> Any:
        """Return noise, possibly scaled by constants or units, or mark the factors as noise."""
        name, size = operation_of(node), node.meta["val"]
        if isinstance(size, Tensor):
            drawn = noise(self.system, size.shape)
            laws = values if name in LAWS else values[1:]  # else the first only lends its size
            if not any(v.factors for v in laws):
                return of_noise(self.system, [drawn, *laws], size)
            if name in LAWS:
                return self._side_by_side(met([drawn, *laws]))
        if name not in ("native_dropout", "rrelu_with_noise_functional"):
            raise Unfollowed("random numbers whose distribution depends on weights")
        if name == "native_dropout" and args[2] is False:
            return args[0], Value.of(size[1].shape)
        mask = noise(self.system, args[0].shape)
        y = multiply(self.system, args[0], mask)
        for factor in args[0].factors if name != "native_dropout" else ():
            self.system.stop(factor, scale=False)
            self.system.mark("apart", factor)
        return replace(y, factors=self.system.absorb(y.factors)), mask

    # -------------------------------------------------------------- rules, by name of the operation
    def _add(self, node: Node, args: Any, named: Any) -> Value:
        if not all(isinstance(a, Value) for a in args[:2]):
            return self._measure(node, args, named, [a for a in args if isinstance(a, Value)])
        result = unify(self.system, args[:2])
        return self._turned(node, args[:2], result) if node in self._halves else result

    _sub = _add

    def _turned(self, node: Node, terms: Sequence[Value], result: Value) -> Value:
        """Return the second half of rotated planes, with the labels that the first half lacks."""
        first = self._values[self._halves[node]].factors
        moving = [sum(bool(self._values[f].factors) for f in t.all_input_nodes) for t in node.args]  # type: ignore[union-attr]
        one_each = {len(factors) for factors in (*(t.factors for t in terms), first)} == {1}
        if not one_each or set(moving) != {1}:
            return result
        x, y = (t.factors[0].labels for t in terms)
        rows = label_rows(x, y)
        if len(rows) * 2 == len(np.unique(rows)):  # each label of one in a plane with another's
            self.system.planes.append(np.sort(rows, 1))
            partner = y if torch.equal(result.factors[0].labels, first[0].labels) else x
            result = replace(result, factors=(replace(result.factors[0], labels=partner),))
        return result

    def _mul(self, node: Node, args: Any, named: Any) -> Value:
        if named.get("rounding_mode") or not all(isinstance(a, Value) for a in args[:2]):
            return self._measure(node, args, named, [a for a in args if isinstance(a, Value)])
        power = -1 if operation_of(node) == "div" else 1
        product = multiply(self.system, args[0], args[1], power)
        pairs = itertools.combinations(product.factors, 2) if self.system.is_ordered else ()
        if any(_look_alike(*pair) for pair in pairs):
            return self.system.as_one_factor(product, is_ordered=True)
        return product

    _div = _mul

    def _expand(self, node: Node, args: Any, named: Any) -> Value:
        return expand(args[0], node.meta["val"].shape)

    def _cat(self, node: Node, args: Any, named: Any) -> Value:
        shape = node.meta["val"].shape
        d = (args[1] if len(args) > 1 else 0) % len(shape)
        pieces = [v for v in args[0] if len(v.shape) == len(shape)]
        values = [v for v in pieces if all(p.labels.numel() for p in v.factors)] or pieces
        if not any(v.is_zero for v in values):
            before = self.system.count
            result = stacked(self.system, values, d, shape) or self._as_stack(node, values, d)
            if result is not None:
                places = torch.arange(before, before + len(values))
                self.stacks.append((places, node))
                return result
        return join(self.system, values, d, shape)

    def _as_stack(self, node: Node, values: Sequence[Value], d: int) -> Value | None:
        """Concatenate pieces that the next operation unflattens, each with labels of its own."""
        shape = list(node.meta["val"].shape)
        wide = [*shape[:d], len(values), shape[d] // len(values), *shape[d + 1 :]]
        is_stack = all(
            "view" in operation_of(n) and list(n.meta["val"].shape) == wide for n in node.users
        )
        if not is_stack or any(have_same_labels(values[0], v) for v in values[1:]):
            return None
        whole = stacked(self.system, [unsqueezed(v, d) for v in values], d, wide)
        return None if whole is None else reshaped(whole, *shape)

    def _copy(self, node: Node, args: Any, named: Any) -> Value:
        return expand(args[1], node.meta["val"].shape)

    def _complex(self, node: Node, args: Any, named: Any) -> Value:
        """Combine real and imaginary parts, which share one unit."""
        return unify(self.system, args)

    def _view_as_complex(self, node: Node, args: Any, named: Any) -> Value:
        value, last = args[0], len(args[0].shape) - 1
        for factor in value.factors:
            self.system.tell_apart(factor, dims=[last])
            if factor.dims == {last} and factor.is_free_beside(value.factors):
                self.system.stop(factor)
        pair = [value.moved(value.shape[:-1], *_picked(value, k)) for k in (0, 1)]
        return unify(self.system, pair)

    def _view_as_real(self, node: Node, args: Any, named: Any) -> Value:
        wide = unsqueezed(args[0], len(args[0].shape))
        shape = node.meta["val"].shape
        return Value(tuple(shape), wide.factors, None, (*wide.varies[:-1], True))

    def _sum(self, node: Node, args: Any, named: Any) -> Value:
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else None
        dims = [dims] if isinstance(dims, int) else dims
        return sum_over(self.system, args[0], dims, bool(args[2]) if len(args) > 2 else False)

    _mean = _sum

    def _var(self, node: Node, args: Any, named: Any) -> Any:
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else None
        name = operation_of(node)
        keepdim = bool(named.get("keepdim", args[3] if len(args) > 3 else False))
        total = layers.variance(self.system, args[0], dims, keepdim, name.startswith("std"))
        if name not in ("var_mean", "std_mean"):
            return total
        return total, sum_over(self.system, args[0], dims, keepdim)

    _std = _std_mean = _var_mean = _var

    def _amax(self, node: Node, args: Any, named: Any) -> Any:
        size = node.meta["val"]
        if not isinstance(size, Tensor) or (len(args) > 1 and isinstance(args[1], Value)):
            raise Unfollowed("the largest values with their indices")
        keepdim = bool(args[2]) if len(args) > 2 else False
        return layers.extreme(self.system, args[0], args[1] if len(args) > 1 else [], keepdim)

    _amin = _amax

    def _max_pool2d_with_indices(self, node: Node, args: Any, named: Any) -> Any:
        """Max pooling over adjacent channels that the windows tile."""
        value, kernel, defaults = args[0], args[1], [list[int](), [0, 0], [1, 1]]
        stride, padding, dilation = list(args[2:5]) + defaults[len(args[2:5]) :]
        *lead, rows, columns = value.shape
        is_tiled = stride in ([], kernel) and not any(padding) and set(dilation) == {1}
        is_tiled = is_tiled and not (rows % kernel[0] or columns % kernel[-1])
        has_labels = any(d >= len(lead) for p in value.factors for d in p.dims)
        if not (has_labels and is_tiled):
            return self._measure_along(node, args, named, [value])
        tiles = (rows // kernel[0], kernel[0], columns // kernel[-1], kernel[-1])
        wide, size = reshaped(value, *lead, *tiles), node.meta["val"]
        largest = layers.extreme(self.system, wide, [len(lead) + 1, len(lead) + 3], False)
        return largest, Value.of(size[1].shape)

    def _any(self, node: Node, args: Any, named: Any) -> Value:
        """Reduce a condition over rows: units stop, the rows still move."""
        value = self.system.as_one_factor(args[0])
        for factor in value.factors:
            self.system.stop(factor)
            self.system.mark("apart", factor)
        dims = args[1] if len(args) > 1 else None
        keepdim = bool(args[2]) if len(args) > 2 else False
        dims = [dims] if isinstance(dims, int) else dims
        return sum_over(self.system, layers.only_moving(value), dims, keepdim)

    _all = _prod = _any

    def _convolution(self, node: Node, args: Any, named: Any) -> Value:
        return layers.convolution(self.system, node.meta["val"], args)

    def _native_batch_norm(self, node: Node, args: Any, named: Any) -> Any:
        x, gain, bias, mean, var = args[:5]
        y = layers.batch_norm(self.system, x, gain, bias, mean, var, self._is_fixed)
        return y, Value.of((0,)), Value.of((0,))

    def _native_group_norm(self, node: Node, args: Any, named: Any) -> Any:
        y = layers.group_norm(self.system, args)
        return (y, *(Value.of(s.shape) for s in node.meta["val"][1:]))

    def _legit_batch_norm(self, node: Node, args: Any, named: Any) -> Any:
        x, gain, bias, mean, var = args[:5]
        of_batch = (Value.of(s.shape) for s in node.meta["val"][1:3])
        if not isinstance(mean, Value):
            return layers.norm_by_places(self.system, x, gain, bias), *of_batch
        if self._is_fixed:
            y = layers.batch_norm(self.system, x, gain, bias, mean, var, is_fixed=True)
            return y, *of_batch, mean, var
        y = layers.norm_by_places(self.system, x, gain, bias)
        new_mean, new_var = layers.statistics(self.system, x)
        statistics = unify(self.system, [mean, new_mean]), unify(self.system, [var, new_var])
        return y, *of_batch, *statistics

    def _embedding(self, node: Node, args: Any, named: Any) -> Value:
        return layers.embedding(self.system, args[0], args[1], node.meta["val"])

    def _embedding_bag(self, node: Node, args: Any, named: Any) -> Any:
        sizes = node.meta["val"]
        if any(isinstance(a, Value) and a.factors for a in args[1:]):
            raise Unfollowed("embedding bags of computed rows")
        rows = layers.embedding(self.system, args[0], Value.of(sizes[0].shape[:1]), sizes[0])
        if len(args) > 4 and args[4] == 2:  # the largest of each
            rows = layers.extreme(self.system, unsqueezed(rows, 0), 0, False)
        return (rows, *(Value.of(s.shape) for s in sizes[1:]))

    # -------------------------------------------------------------- measured
    def _measure(self, node: Node, args: Any, named: Any, values: Sequence[Value]) -> Value:
        size, values = node.meta["val"], met(values)
        moving = [k for k, v in enumerate(values) if v.factors]
        key = (node.target, tuple(moving), _literals(args, named, values))
        if key not in self._measured:
            self._measured[key] = probe_pointwise(node, args, named, values, moving)
        pointwise: Pointwise = self._measured[key]
        if pointwise.kind == "zero":
            return Value.constant_of(torch.zeros(()).expand(size.shape))
        if not pointwise.keeps_zero:
            values = [replace(v, factors=tuple(map(self.system.filled, v.factors))) for v in values]
        if pointwise.kind == "each":
            result = self._each(pointwise, values)
        else:
            values = [self.system.as_one_factor(v) for v in values]
            result = self._together(pointwise, values)
        return replace(result, constant=None, shape=tuple(size.shape))

    def _each(self, pointwise: Pointwise, values: Sequence[Value]) -> Value:
        """Apply a function with a power for each operand. Units stop at operands without one."""
        system = self.system
        is_square = len(values) == 1 and pointwise.powers[0] == (2, 0)
        result: Value | None = None
        if pointwise.has_one_unit:
            values = [system.as_one_factor(v) for v in values]
            (first,), *others = (v.factors for v in values)
            for (factor,) in others:
                system.balance([(first, 1), (factor, -1)], sign=False)
        for k, (power, parity) in zip(pointwise.operands, pointwise.powers, strict=True):
            passes = power is not None and parity is not None and len(values) == 1
            absorbed = replace(values[k], factors=system.absorb(values[k].factors))
            value = absorbed if passes else system.as_one_factor(values[k])
            self._stop_units(value, power, parity)
            if not (pointwise.is_linear or is_square):
                for factor in value.factors:
                    system.mark("apart", factor)
            powered = tuple(p.to_power(power or Fraction(0), parity or 0) for p in value.factors)
            value = Value(value.shape, powered, None, value.varies)
            result = value if result is None else multiply(system, result, value)
        assert result is not None
        for k, value in enumerate(values):
            if k not in pointwise.operands:
                result = _beside_numbers(system, result, value)
        return result

    def _stop_units(self, value: Value, power: Fraction | None, parity: int | None) -> None:
        """Stop scales where a function has no power, and signs where it has no parity."""
        for factor in value.factors:
            if parity is None:
                self.system.stop(factor, scale=False)
            if power is None:
                self.system.stop(factor, sign=False)

    def _together(self, pointwise: Pointwise, values: Sequence[Value]) -> Value:
        """Apply a function to operands with one common unit, of which a power passes."""
        system = self.system
        power, parity = pointwise.powers[0] if pointwise.powers else (None, None)
        if power is None:
            for factor in (p for v in values for p in v.factors):
                system.stop(factor, sign=parity is None)
                system.mark("apart", factor)
            values = [
                replace(
                    v,
                    factors=tuple(
                        p.to_power(Fraction(0), int(parity is not None)) for p in v.factors
                    ),
                )  # noqa: E501
                for v in values
            ]
        inside = [v for k, v in enumerate(values) if k in pointwise.operands]
        if not inside:
            return self._side_by_side(values)
        result = unify(system, inside, pointwise.is_linear)
        if parity is None:
            for factor in result.factors:
                system.stop(factor, scale=False)
        exponent = Fraction(1) if power is None else power
        factors = tuple(p.to_power(exponent, parity or 0) for p in result.factors)
        result = replace(result, factors=factors)
        for value in (v for k, v in enumerate(values) if k not in pointwise.operands):
            result = self._beside(result, value)
        return result

    def _beside(self, result: Value, value: Value) -> Value:
        """Apply a condition whose labels or constants distinguish entries."""
        if value.factors:
            for factor in value.factors:
                self.system.stop(factor)
            result = multiply(self.system, result, layers.only_moving(value))
            return replace(result, factors=self.system.absorb(result.factors))
        for factor in result.factors:
            self.system.stand_beside(factor, with_dims(value, len(result.shape)))
        return result

    def _side_by_side(self, values: Sequence[Value]) -> Value:
        """Apply an elementwise function of which nothing else is known."""
        result: Value | None = None
        for value in values:
            for factor in value.factors:
                self.system.stop(factor)
                self.system.mark("apart", factor)
            constant = None if value.is_zero else value.constant
            moving = replace(value, constant=constant, factors=layers.only_moving(value).factors)
            result = moving if result is None else multiply(self.system, result, moving)
        assert result is not None
        factors = self.system.absorb(result.factors)
        result = replace(result, constant=None, factors=factors)
        return layers.only_moving(self.system.as_one_factor(result, self.system.is_ordered))

    def _measure_along(self, node: Node, args: Any, named: Any, values: Sequence[Value]) -> Any:
        """Measure an operation without a rule along the labelled dimensions."""
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unfollowed("no rule for operations that take functions")
        moving = [k for k, v in enumerate(values) if v.factors]
        operands = [values[k] for k in moving]
        value = operands[0] if len(operands) == 1 else self._side_by_side_along(operands)
        shapes = tuple(values[k].shape for k in moving)
        along: Along | None = None
        while along is None:
            dims = sorted(frozenset[int]().union(*(p.dims for p in value.factors)))
            key = (node.target, shapes, tuple(dims), repr(node.args[1:]), repr(node.kwargs))
            try:
                if key not in self._measured:
                    self._measured[key] = probe_along(node, args, named, values, moving, dims)
                along = self._measured[key]
            except NotSeparable as error:
                value = self._held_along(value, error)
        if not along.is_linear:
            value = self.system.settled(value)
        numbers = [v for v in values if not v.factors and v.constant is None]
        for factor in value.factors:
            self._pass_along(
                factor, along, [n for n in numbers if len(n.shape) == len(value.shape)]
            )
        size = node.meta["val"]
        sizes = size if isinstance(size, tuple | list) else [size]
        results = tuple(
            layers.moved_along(value, along.dims, s, along.has_scales, along.has_signs)
            for s in sizes
        )
        return results if isinstance(size, tuple | list) else results[0]

    def _held_along(self, value: Value, mixed: NotSeparable) -> Value:
        """Hold what lies along one dimension. What lies along others passes as through a sum."""
        d = mixed.dim
        passing = tuple(f for f in value.factors if f.dims - {d})
        if not passing:
            raise mixed
        self.unfollowed[self.system.origin] = str(mixed)
        for factor in value.factors:
            self.system.tell_apart(factor, dims=[d])
            if factor not in passing:
                self.system.fix(factor)
        total = sum_over(self.system, replace(value, factors=passing), [d], keepdim=True)
        return replace(total, shape=value.shape, varies=value.varies)

    def _pass_along(self, factor: Factor, along: Along, beside: Sequence[Value]) -> None:
        for neighbour in beside:
            self.system.stand_beside(factor, neighbour)
        if not along.has_scales:
            self.system.stop(factor, sign=False)
        if not along.has_signs:
            self.system.stop(factor, scale=False)
        if not along.is_linear:
            self.system.mark("apart", factor)

    def _side_by_side_along(self, values: Sequence[Value]) -> Value:
        """Combine operands of an unknown operation, with one unit per index for all of them."""
        settled = [self.system.settled(v) for v in values]
        dims = frozenset[int]().union(*(p.dims for v in settled for p in v.factors))
        sizes = {tuple(v.shape[d] for d in sorted(dims) if d < len(v.shape)) for v in settled}
        if len({len(v.shape) for v in settled}) > 1 or len(sizes) > 1:
            raise Unfollowed("operands of different sizes that depend on weights")
        narrow = [
            replace(v, shape=tuple(n if d in dims else 1 for d, n in enumerate(v.shape)))
            for v in settled
        ]
        return replace(unify(self.system, narrow), shape=settled[0].shape)


def _look_alike(x: Factor, y: Factor) -> bool:
    """Return whether two factors over different dimensions label the same channels."""
    if not x.dims or not y.dims or x.dims & y.dims:
        return False
    in_both = torch.isin(x.labels, y.labels)
    return (x.power, x.parity) == (y.power, y.parity) and bool((in_both & (x.labels > 0)).any())


def _before_moves(node: Node) -> Node:
    while operation_of(node) in MOVES | {"expand"} and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _beside_numbers(system: System, result: Value, value: Value) -> Value:
    """Combine a result with constants, which may distinguish its entries."""
    ndim = max(len(result.shape), len(value.shape))
    result, value = with_dims(result, ndim), with_dims(value, ndim)
    for factor in result.factors:
        system.stand_beside(factor, value, "numbers")
    varies = tuple(p or q for p, q in zip(result.varies, value.varies, strict=True))
    return replace(result, varies=varies)


def _picked(value: Value, k: int) -> tuple[Callable[[Tensor], Tensor], tuple[bool, ...]]:
    """Return the arguments of `Value.moved` that select one index of the last dimension."""
    return lambda labels: labels.select(-1, min(k, labels.shape[-1] - 1)), value.varies[:-1]


def _folded(node: Node, args: Any, named: Any) -> Any:
    numbers, keywords = tree_map(
        lambda x: _numbers_of(x) if isinstance(x, Value) else x,
        (args, named), is_leaf=lambda x: isinstance(x, Value),
    )  # fmt: skip
    result = node.target(*numbers, **keywords)  # type: ignore[operator]
    return tree_map(lambda t: Value.constant_of(t) if isinstance(t, Tensor) else t, result)


def _numbers_of(value: Value) -> Tensor:
    return value.constant if value.constant is not None else torch.zeros(value.shape)


def _without_labels(size: Any) -> Any:
    return tree_map(lambda t: Value.of(t.shape) if isinstance(t, Tensor) else t, size)


def _of_inputs(values: Sequence[Value], size: Any) -> Any:
    """Return an unlabelled value, constant along the dimensions that all operands broadcast."""
    if not isinstance(size, Tensor):
        return _without_labels(size)
    wide = [with_dims(v, size.ndim).varies for v in values]
    return Value.of(size.shape, varies=[any(along) for along in zip(*wide, strict=True)])


def _has_copies(values: Sequence[Value]) -> bool:
    """Return whether a value is broadcast along any dimension."""
    return any(
        n > 1 and not varied for v in values for n, varied in zip(v.shape, v.varies, strict=True)
    )


def _is_constant_index(name: str, args: Sequence[Any]) -> bool:
    indices = {"index": args[1:2], "index_select": [args[2:]]}.get(name, [[]])[0]
    return all(i is None or i.constant is not None for i in indices)


def _literals(args: Any, named: Any, values: Sequence[Value]) -> tuple[object, ...]:
    """Return the key of a measurement besides the operation itself."""
    plain = tree_map(
        lambda x: None if isinstance(x, Value) else x,
        (args, named), is_leaf=lambda x: isinstance(x, Value),
    )  # fmt: skip
    numbers = tuple(
        float(v.constant.reshape(-1)[0])
        if v.constant is not None and v.constant.numel() and not any(v.varies)
        else None
        for v in values
    )
    even = tuple(not any(p.parity for p in v.factors) for v in values)
    return repr(plain), numbers, even
