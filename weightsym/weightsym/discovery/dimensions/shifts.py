"""Constants that may be added to biases because later biases absorb or softmaxes ignore them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map

from weightsym.discovery.dimensions.moves import MOVES, RESHAPES, UNCHANGED
from weightsym.discovery.dimensions.nodes import leaves_of, operation_of
from weightsym.discovery.dimensions.program import Program
from weightsym.discovery.dimensions.shift_expressions import Expressions
from weightsym.discovery.dimensions.shift_grouping import Uses, groups_of_shifts
from weightsym.discovery.dimensions.values import compress
from weightsym.groups.symmetries import Axis, ShiftGroup


def shifts_of(
    programs: Sequence[Program], axes: Sequence[Axis], fixed: Collection[str] = ()
) -> tuple[tuple[Axis, ...], tuple[ShiftGroup, ...], str]:
    """Find the constants that may be added to the tensors of a network.

    Numbers are added to all entries of biases and of tables. They are followed through the
    operations of the network to the layers that read them, whose biases take them up, to softmaxes,
    which do not see what all that they compare gains, and to everything else, which must not see
    them. Then vectors are added to all rows of weights, such as those of routers.

    Args:
        programs: what the network computes, in each of its modes.
        axes: of the groups that are known.
        fixed: names of tensors to which nothing may be added.

    Returns:
        All axes, with those that only shifts have, the groups of shifts, and why some may be
        missing, or nothing.
    """
    every, groups, reason = list(axes), list[ShiftGroup](), ""
    for to_rows in (False, True):
        reading = _Reading(fixed, to_rows)
        for program in programs:
            reading.follow(program)
        shifted = {every[p.axis].tensor for group in groups for p in group.placements}
        groups += [g for g in groups_of_shifts(reading.uses, every) if g.name not in shifted]
        if reading.system.is_full:
            reason = "the constants added to biases form too many sums to follow"
    return tuple(every), tuple(groups), reason


@dataclass(frozen=True, eq=False)
class _Gain:
    """Constants added to a tensor, with size 1 along dimensions where they are equal.

    ``is_bias`` says that they are those of entries of parameters, to which nothing has happened.
    """

    numbers: Tensor
    is_bias: bool = False


@dataclass(frozen=True, eq=False)
class _View:
    """Entries of a parameter: an index for each of its dimensions, in the shape of the view."""

    name: str
    coords: tuple[Tensor, ...]


class _Seen(Exception):
    """Raised where an operation depends on the constants that are added to its operands."""


_Operand: TypeAlias = _Gain | _View
_ZERO = torch.zeros(1, dtype=torch.long)


class _Reading:
    """A traversal of a network with shifts of biases, or of all rows of weights."""

    def __init__(self, fixed: Collection[str], to_rows: bool) -> None:
        self.system, self._held, self._to_rows = Expressions(), fixed, to_rows
        self.uses = Uses(self.system)
        self._values: dict[Node, Any] = {}

    def follow(self, program: Program) -> None:
        """Follow constants through all operations. Results and buffers must not depend on them."""
        for node in program.nodes:
            if node.op == "placeholder" and program.is_parameter(node):
                name, shape = program.owners[node.name], _size(node)
                self.uses.shapes[name] = shape
                coords = [_along(torch.arange(n), d, len(shape)) for d, n in enumerate(shape)]
                is_real = node.meta["val"].is_floating_point()
                if is_real and shape.numel() and name not in self._held:
                    self._values[node] = _View(name, tuple(coords))
            elif node.op == "call_function":
                self._values[node] = self._call(node)
        for node in (*program.results, *(node for node, _ in program.written)):
            self._see(self._values.get(node))

    # -------------------------------------------------------------- operands and results
    def _call(self, node: Node) -> Any:
        arguments: Any = (node.args, node.kwargs)
        args, named = torch.fx.map_arg(arguments, self._operand)
        if node.target is operator.getitem:
            return args[0][args[1]] if isinstance(args[0], tuple) else None
        operands = _operands((args, named))
        if not operands:
            return None
        try:
            result = _rule(node)(self, node, *args, **named)
        except Exception:  # no rule, or a use that nobody foresaw
            self._see(operands)
            return None
        sizes = node.meta["val"]
        if isinstance(sizes, Tensor):
            return self._gain(result, sizes.ndim)
        results = result if isinstance(result, tuple) else (result,)
        results += (None,) * (len(sizes) - len(results))
        return tuple(self._gain(x, v.ndim) for x, v in zip(results, sizes, strict=True))

    def _operand(self, node: Node) -> Any:
        value = self._values.get(node)
        if isinstance(value, _Gain) and not value.is_bias:
            return self._gain(value.numbers, value.numbers.ndim)
        return value

    def _gain(self, value: Any, ndim: int) -> Any:
        """Return the constants in a result. Other values than tensors are unchanged."""
        numbers = self.system.live(value) if isinstance(value, Tensor) else None
        if numbers is None:
            return None if isinstance(value, Tensor) else value
        return _Gain(numbers.reshape([1] * (ndim - numbers.ndim) + list(numbers.shape)))

    def _see(self, value: Any) -> None:
        """Require that nothing is added to an operand, because the operation depends on it."""
        for x in _operands(value):
            if isinstance(x, _View):
                self.uses.note(x.name, "seen")
            else:
                self._numbers(x)
                self.system.stop(x.numbers)

    def _numbers(self, value: Any) -> Tensor | None:
        """Return the constants in an operand that absorbs no shifts."""
        numbers = self._bias(value)
        if numbers is not None:
            self.uses.take_up(numbers, _ZERO)
            return self.system.live(numbers)
        return value.numbers if isinstance(value, _Gain) else None

    def _bias(self, value: Any) -> Tensor | None:
        """Return the unknowns of parameter entries, which may absorb shifts."""
        if isinstance(value, _View) and self._to_rows:
            self._see(value)
            return None
        if isinstance(value, _View):
            return self.uses.entries(value.name, value.coords)
        return value.numbers if isinstance(value, _Gain) and value.is_bias else None

    def _equal(self, numbers: Tensor, size: Sequence[int], dims: Any = None) -> Tensor:
        """Require equal constants along some dimensions, and reduce them to size 1.

        Along a dimension of which the example has one, what is made of constants may differ.
        """
        named = _dims(dims, len(size))
        if any(size[d] == 1 for d in named):
            self._refuse_made(numbers)
        return self.system.equate(numbers, named)

    def _refuse_made(self, numbers: Tensor) -> None:
        if bool(self.system.is_made(numbers).any()):
            raise _Seen

    # -------------------------------------------------------------- moves
    def _moved(self, node: Node, value: Any, *args: Any, **named: Any) -> Any:
        """Apply a data movement to constants, or to the indices of a parameter."""
        target: Any = node.target
        if any(_is_emptied(size) for size in leaves_of(node.meta["val"])):
            raise _Seen

        def move(numbers: Tensor) -> Any:
            numbers = numbers.expand(_size(node.args[0]))
            if operation_of(node) in RESHAPES:
                return compress(numbers.reshape(_size(node)))
            numbers = numbers.contiguous() if operation_of(node) == "as_strided" else numbers
            return tree_map(compress, target(numbers, *args, **named))

        if isinstance(value, _Gain):
            moved = tree_map(lambda t: _Gain(t, value.is_bias), move(value.numbers))
        else:
            coords = [move(c) for c in value.coords]
            whole = isinstance(coords[0], Tensor)
            views = [coords] if whole else zip(*coords, strict=True)
            moved = [_View(value.name, tuple(c)) for c in views]
            moved = moved[0] if whole else moved
        return tuple(moved) if isinstance(moved, list) else moved

    def _copied(self, node: Node, value: Any, *args: Any, **named: Any) -> Any:
        if not node.meta["val"].is_floating_point():
            raise _Seen
        return value

    def _joined(self, node: Node, *args: Any, **named: Any) -> _Gain:
        """Concatenate tensors, or write one into another."""
        target: Any = node.target
        is_bias = all(isinstance(x, _View) or x.is_bias for x in _operands(args))

        def whole(source: Any, value: Any) -> Any:
            if isinstance(source, list | tuple):
                pieces = [whole(*pair) for pair in zip(source, value, strict=True)]
                return [p for p in pieces if not isinstance(p, Tensor) or p.shape != (0,)]
            if not isinstance(source, Node):
                return source
            if _is_emptied(source.meta["val"]):
                raise _Seen
            numbers = self._bias(value) if is_bias else self._numbers(value)
            return (_ZERO if numbers is None else numbers).expand(_size(source))

        joined = target(*(whole(*pair) for pair in zip(node.args, args, strict=True)), **named)
        return _Gain(compress(joined), is_bias)

    def _padded(self, node: Node, x: Any, widths: Any, *args: Any) -> Tensor | None:
        """Pad a tensor with constants that are not shifted."""
        numbers = self._numbers(x)
        if numbers is None:
            return None
        return compress(torch.nn.functional.pad(numbers.expand(_size(node.args[0])), widths))

    def _picked(self, node: Node, x: Any, which: Any, *args: Any) -> Tensor:
        """Select rows of a table, or of a tensor whose rows share their constants."""
        dims = [which] if isinstance(which, int) else [d for d, i in enumerate(node.args[1]) if i]  # type: ignore[arg-type]
        size, shape = _size(node.args[0]), _size(node)
        if len(dims) != 1 or (isinstance(x, _View) and self._to_rows):
            raise _Seen
        dim = dims[0] % len(size)
        if isinstance(x, _View) and len(size) == 2:
            columns = self.uses.columns(x.name, x.coords, 1 - dim)
            return _along(columns, 0 if dim else len(shape) - 1, len(shape))
        numbers = self._numbers(x)
        if numbers is None or numbers.shape[dim] > 1:
            raise _Seen
        new = [1] * (len(shape) - len(size) + 1)
        return numbers.reshape([*numbers.shape[:dim], *new, *numbers.shape[dim + 1 :]])

    def _looked_up(self, node: Node, table: Any, *args: Any) -> Tensor:
        return self._picked(node, table, 0)

    # -------------------------------------------------------------- sums and products
    def _sum(self, node: Node, x: Any, y: Any, alpha: Any = 1) -> Tensor:
        sign = -1 if operation_of(node) in ("sub", "neg") else 1
        for operand, bias in ((x, y), (y, x)) if sign == alpha == 1 else ():
            numbers = self._bias(bias)
            if numbers is not None and self._bias(operand) is None:
                return self._taken_up(self._numbers(operand), numbers)
        a, b = (_ZERO if n is None else n for n in (self._numbers(x), self._numbers(y)))
        return self.system.combine(a, b if alpha == 1 else self.system.multiple(b), sign)

    def _negated(self, node: Node, x: Any) -> Tensor:
        return self._sum(node, None, x)

    def _taken_up(self, numbers: Tensor | None, bias: Tensor) -> Tensor:
        """Let a bias absorb layer outputs. Further constants may be added to both."""
        numbers = _ZERO if numbers is None else numbers
        is_read = self.system.is_read(numbers)
        self.uses.take_up(bias, numbers.masked_fill(~is_read, 0))
        return self.system.combine(numbers.masked_fill(is_read, 0), bias)

    def _product(self, node: Node, x: Any, y: Any, **named: Any) -> Tensor:
        """Multiply constants by an unknown factor."""
        if operation_of(node) == "div" and (named or _operands(y)):
            raise _Seen
        total = _ZERO
        for value, factor in ((x, node.args[1]), (y, node.args[0])):
            if isinstance(value, _View):
                self._see(value)
            elif (numbers := self._numbers(value)) is not None:
                total = self.system.combine(total, self._times(numbers, factor, _size(node)))
        return total

    def _times(self, numbers: Tensor, factor: Any, size: Sequence[int]) -> Tensor:
        """Scale constants by a factor, unless all entries then differ and none can be ignored."""
        if not isinstance(factor, Node) or not _size(factor):
            return self.system.multiple(numbers)
        shape = torch.broadcast_shapes(numbers.shape, _size(factor))
        if shape == size:
            raise _Seen
        numbers = numbers.expand(shape)
        result = self.system.fresh(*shape)
        self.system.depend(result, numbers)
        return result.masked_fill(numbers == 0, 0)

    def _chosen(self, node: Node, condition: Any, x: Any, y: Any) -> Tensor | None:
        """Select between operands with equal constants, or ignore one that is minus infinity."""
        if condition is not None:
            raise _Seen
        sides = zip((x, y), node.args[1:], strict=True)
        both = [self._numbers(value) for value, source in sides if not _is_lowest(source)]
        first, *others = (_ZERO if n is None else n for n in both)
        for operand in others:
            self.system.stop(self.system.combine(first, operand, -1))
        return first

    # -------------------------------------------------------------- rows, pools and norms
    def _largest(self, node: Node, x: Any, *args: Any, **named: Any) -> Tensor | None:
        """The maximum, minimum or sorted values of entries with equal constants."""
        name, numbers = operation_of(node), self._numbers(x)
        position, default = _DIMENSION.get(name, (0, None))
        dims = named.get("dim", args[position] if len(args) > position else default)
        if numbers is None:
            return None
        numbers = self._equal(numbers, _size(node.args[0]), dims)
        return None if name in ("argmax", "argmin") else _squeezed(numbers, node, dims)

    def _mean(self, node: Node, x: Any, dims: Any = None, *args: Any, **named: Any) -> Any:
        """The mean of entries with equal constants, or their variance, which ignores them."""
        numbers, name = self._numbers(x), operation_of(node)
        if numbers is None:
            return None
        over = _dims(dims, numbers.ndim)
        if any(numbers.shape[d] > 1 for d in over):
            raise _Seen
        self._refuse_made(numbers)
        if name in ("var", "std"):
            return None
        numbers = _squeezed(numbers, node, dims)
        return numbers if name == "mean" else (None, numbers)

    def _pooled(self, node: Node, x: Any, *args: Any, **named: Any) -> Tensor:
        """Pool or interpolate over positions with equal constants."""
        numbers = self._numbers(x)
        padding = named.get("padding", args[2] if len(args) > 2 else 0)
        divisor = named.get("divisor_override", args[5] if len(args) > 5 else None)
        is_average = operation_of(node).startswith("avg_pool")
        with_zeros = is_average and (bool(np.any(padding)) or divisor is not None)
        if numbers is None or with_zeros or numbers.shape[2:].numel() > 1:
            raise _Seen
        self._refuse_made(numbers)
        return numbers

    def _normalised(self, node: Node, x: Any, weight: Any, bias: Any, *args: Any) -> Tensor | None:
        """Normalise: constants are ignored only by statistics of the tensor itself."""
        numbers = self._numbers(x)
        is_own = node.target is torch.ops.aten._native_batch_norm_legit.no_stats
        by_channel = numbers is not None and numbers.numel() == numbers.shape[1]
        if numbers is not None and by_channel and operation_of(node) == "native_group_norm":
            self.system.equate(numbers.flatten().expand(args[1]).reshape(args[3], -1), [1])
        elif numbers is not None and not (is_own and by_channel):
            self._see(x)
        self._see(weight)
        shift = self._bias(bias)
        ndim = node.meta["val"][0].ndim
        return None if shift is None else _along(self._taken_up(None, shift), 1, ndim)

    # -------------------------------------------------------------- layers
    def _convolved(
        self, node: Node, x: Any, weight: Any, bias: Any, stride: Any, padding: Any,
        dilation: Any, transposed: bool, output_padding: Any, groups: int,
    ) -> Tensor | None:  # fmt: skip
        """Convolve constants that are equal at all positions, without zero padding."""
        numbers, result = self._numbers(x), None
        if any(padding) or transposed or self._to_rows or not isinstance(weight, _View):
            self._see([x, weight])
        elif numbers is not None:
            result = self._read(numbers.movedim(1, -1), _size(node.args[0])[1], weight, 0, groups)
        else:
            self.uses.note(weight.name, "weight")
        shift = self._bias(bias)
        result = result if shift is None else self._taken_up(result, shift)
        return None if result is None else _along(result, 1, len(_size(node)))

    def _multiplied(self, node: Node, x: Any, y: Any) -> Tensor | None:
        """Multiply two matrices, following the constants of either."""
        is_vector = [len(_size(n)) == 1 for n in node.args]
        both = [self._factor(value, 1 - side) for side, value in enumerate((x, y))]
        if both[0] is not None and both[1] is not None:
            self._see(x)
        side = int(both[1] is not None)
        numbers = both[side]
        if numbers is None:
            return None
        numbers = numbers[None] if is_vector[side] else numbers.mT if side else numbers
        result = self._through(numbers, node, side, (y, x)[side])
        result = result.mT if side else result
        for dim, is_squeezed in zip((-1, -2), is_vector[::-1], strict=True):
            result = result.squeeze(dim) if is_squeezed else result
        return result

    def _factor(self, value: Any, dim: int) -> Tensor | None:
        """Return the constants in a factor, for a weight equal along all but one dimension."""
        if not isinstance(value, _View):
            return self._numbers(value)
        if self._to_rows:
            return self.uses.columns(value.name, value.coords, dim)
        self.uses.note(value.name, "weight")
        return None

    def _through(self, numbers: Tensor, node: Node, side: int, value: Any) -> Tensor:
        """Multiply rows of constants by a matrix that is unknown or averages them."""
        size_here, size_there = (_size(node.args[k]) for k in (side, 1 - side))
        rows, size = (
            (1, size_here[0]) if len(size_here) == 1 else size_here[-2:][:: -1 if side else 1]
        )
        if _sums_to_one(
            node.args[1 - side], len(size_there) - (1 if side or len(size_there) == 1 else 2)
        ):
            return self._equal(numbers, (*numbers.shape[:-1], size), -1)
        if isinstance(value, _View) and len(size_there) == 2 and not self._to_rows:
            result = self._read(numbers, size, value, 1 - side)
            return result.reshape([1] * (numbers.ndim - 1) + [-1])
        if rows == 1:
            raise _Seen
        numbers = self.system.equate(numbers, [numbers.ndim - 2])
        lead = torch.broadcast_shapes(numbers.shape[:-2], size_there[:-2])
        width = 1 if len(size_there) == 1 else size_there[-2 if side else -1]
        return self.system.made_of(numbers, *lead, 1, width)

    def _read(self, numbers: Tensor, size: int, weight: _View, out: int, groups: int = 1) -> Tensor:
        """Apply a weight to the channels of the last dimension."""
        self.uses.note(weight.name, "weight")
        tensor = self.uses.place(weight.name, weight.coords, out, groups)
        row = self.system.equate(numbers, range(numbers.ndim - 1)).reshape(-1)
        return self.system.read(tensor._replace(incoming=row.expand(size).contiguous().numpy()))


# ------------------------------------------------------------ rules
def _rule(node: Node) -> Callable[..., Any]:
    """Return the rule of an operation, or one that lets nothing be added to its operands."""
    name = operation_of(node)
    if "pool" in name or "upsample" in name:
        return _Reading._pooled
    return _RULES[name]


_ROWS: tuple[tuple[Collection[str], Callable[..., Any]], ...] = (
    ((*MOVES, "expand"), _Reading._moved),
    (UNCHANGED, _Reading._copied),
    (("cat", "stack", "slice_scatter"), _Reading._joined),
    (("constant_pad_nd",), _Reading._padded),
    (("index", "index_select"), _Reading._picked),
    (("embedding",), _Reading._looked_up),
    (("add", "sub"), _Reading._sum),
    (("neg",), _Reading._negated),
    (("mul", "div"), _Reading._product),
    (("where",), _Reading._chosen),
    (
        "amax amin max min sort topk kthvalue median nanmedian mode argmax argmin cummax cummin "
        "logcumsumexp quantile nanquantile".split(),
        _Reading._largest,
    ),
    ("mean var std var_mean std_mean".split(), _Reading._mean),
    (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "_native_batch_norm_legit_functional native_group_norm".split(),
        _Reading._normalised,
    ),
    (("convolution",), _Reading._convolved),
    ("mm bmm mv dot matmul".split(), _Reading._multiplied),
)
_DIMENSION = {
    **dict.fromkeys(("topk", "kthvalue"), (1, -1)),
    **dict.fromkeys(("quantile", "nanquantile"), (1, None)),
    **dict.fromkeys(("sort", "mode"), (0, -1)),
}
"""At which place behind the operand an operation has its dimension, and the one by default."""
_RULES = {name: rule for names, rule in _ROWS for name in names}


# ------------------------------------------------------------ sizes, masks and averages
def _operands(values: Any) -> list[_Operand]:
    return [x for x in leaves_of(values) if isinstance(x, _Operand)]


def _is_emptied(value: Any) -> bool:
    """Return whether a tensor is empty, but perhaps not for another example, as ``x[:, 1:]``."""
    return isinstance(value, Tensor) and value.ndim > 1 and not value.numel()


def _size(node: Any) -> torch.Size:
    size: torch.Size = node.meta["val"].shape
    return size


def _dims(dims: Any, ndim: int) -> list[int]:
    """Return the dimensions that an operation names, or all."""
    named = [dims] if isinstance(dims, int) else dims or range(ndim)
    return [d % ndim for d in named]


def _squeezed(numbers: Tensor, node: Node, dims: Any) -> Tensor:
    """Drop the dimensions that an operation has removed."""
    value = node.meta["val"]
    ndim = (value if isinstance(value, Tensor) else value[0]).ndim
    return numbers if ndim == numbers.ndim else numbers.squeeze(_dims(dims, numbers.ndim))


def _along(numbers: Tensor, dim: int, ndim: int) -> Tensor:
    """Reshape values to lie along one dimension of several."""
    return numbers.reshape([-1 if d == dim else 1 for d in range(ndim)])


def _is_lowest(node: Any) -> bool:
    """Return whether a tensor is minus infinity everywhere, or the least value of its dtype."""
    while isinstance(node, Node) and operation_of(node) in UNCHANGED | RESHAPES | {"expand"}:
        node = node.args[0]
    name = operation_of(node) if isinstance(node, Node) else ""
    if name not in ("full", "scalar_tensor", "full_like"):
        return False
    number, dtype = node.args[0 if name == "scalar_tensor" else 1], node.meta["val"].dtype
    return bool(dtype.is_floating_point and number <= torch.finfo(dtype).min)


def _sums_to_one(node: Any, dim: int) -> bool:
    """Return whether values were divided by their sum along a dimension."""
    while isinstance(node, Node) and node.op == "call_function" and dim >= 0:
        name, size, source = operation_of(node), _size(node), node.args[0]
        if name == "div":
            return _is_sum(node.args[1], source, dim)
        if name not in UNCHANGED | RESHAPES | {"unsqueeze", "squeeze", "permute", "expand"}:
            return False
        dim = _place_before(node, dim, _size(source), size)
        node = source
    return False


def _place_before(node: Node, dim: int, before: torch.Size, size: torch.Size) -> int:
    """Return the index of a dimension before a move, negative if it did not exist."""
    name = operation_of(node)
    if name == "permute":
        return int(node.args[1][dim]) % len(size)  # type: ignore[index, arg-type]
    if name == "expand":
        position = dim - len(size) + len(before)
        return position if before[position] == size[dim] else -1
    end = size[dim], size[dim + 1 :].numel()
    fit = [d for d in range(len(before)) if (before[d], before[d + 1 :].numel()) == end]
    return fit[0] if len(fit) == 1 else -1


def _is_sum(node: Any, value: Any, dim: int) -> bool:
    """Return whether a tensor is the sum of another along a dimension that is kept."""
    if not isinstance(node, Node) or operation_of(node) != "sum" or node.args[0] is not value:
        return False
    dims, keepdim = (*node.args[1:], None, None)[:2]
    return bool(keepdim) and _dims(dims, len(_size(value))) == [dim]
