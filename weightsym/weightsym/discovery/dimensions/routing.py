"""Routing: an index that a network computes is a choice among labels, such as experts.

All choices are alike, so one is followed: as many tokens as there are labels choose one of them
each, and all others choose none. What is picked by it is picked on labels, and carries `NONE` at
all other tokens: the dimensions along which that changes are those of the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from weightsym.discovery.dimensions.layers import contract
from weightsym.discovery.dimensions.moves import (
    MOVES,
    UNCHANGED,
    Unfollowed,
    squeezed,
    unsqueezed,
)
from weightsym.discovery.dimensions.nodes import operation_of
from weightsym.discovery.dimensions.system import System
from weightsym.discovery.dimensions.values import NONE, Choice, Factor, Value, chosen, compress

_CHOOSE = frozenset("topk max min argmax argmin sort".split())
_PICK = frozenset("index index_select gather embedding".split())
_COUNT = frozenset(
    "sort argsort histc bincount cumsum div floor_divide remainder index_put sub add".split()
)
_ZERO = Fraction(0)
_NUMBER = "an index among channels is used as a number"


def is_routing(node: Node, args: Sequence[Any], values: Sequence[Value]) -> bool:
    """Return whether an operation makes or takes a choice among labels."""
    name = operation_of(node)
    if any(v.choice is not None for v in values):
        return True
    if name in _CHOOSE:
        return any(_dimension(node, args) in p.dims for p in args[0].factors)
    if name == "gather" and not any(_dimension(node, args) in p.dims for p in args[0].factors):
        return False
    index = {"index": 1, "index_select": 2, "gather": 2}.get(name)
    if name == "embedding":
        return bool(args[1].factors)
    return index is not None and any(i.constant is None for i in _listed(args[index]))


def route(
    system: System, node: Node, args: Sequence[Any], named: dict[str, Any], values: Sequence[Value]
) -> Any:
    """Make a choice, or apply an operation that selects, compares or counts by one."""
    name = operation_of(node)
    if all(v.choice is None for v in values):
        return (
            _choose(system, node, args) if name in _CHOOSE else _picked_by_data(system, node, args)
        )
    if "grouped_mm" in str(node.target):
        return _by_groups(system, *args[:3])
    if name in _PICK and not _choice_of(args[0]):
        return _pick(system, node, args)
    if name in ("eq", "ne"):
        return _compared(node, args)
    if name == "scatter":
        return _scattered(system, node, args)
    is_known = all(v.constant is not None or v.choice is not None for v in values)
    if is_known and name in MOVES | _PICK | _COUNT | {"expand"}:
        return _counted(node, args, named, values)
    raise Unfollowed(_NUMBER)


def _choice_of(value: Any) -> Choice | None:
    return value.choice if isinstance(value, Value) else None


def _listed(index: Any) -> list[Value]:
    return [i for i in (index if isinstance(index, list | tuple) else [index]) if i is not None]


# ------------------------------------------------------------ to choose
def _dimension(node: Node, args: Sequence[Any]) -> int:
    position = 2 if operation_of(node) == "topk" else 1
    d = args[position] if len(args) > position else -1
    return d % len(args[0].shape) if isinstance(d, int) else -1


def _choose(system: System, node: Node, args: Sequence[Any]) -> Any:
    """Return the top values without labels, and the choice of their indices."""
    value, d, size = system.as_one_factor(args[0]), _dimension(node, args), node.meta["val"]
    (factor,) = value.factors
    among = factor.labels.reshape(-1)
    if factor.dims != {d} or len(among.unique()) < len(among) or bool((among <= 0).any()):
        raise Unfollowed("a choice among the channels of several rows")
    system.stop(factor)
    system.mark("apart", factor)
    places = size if isinstance(size, Tensor) else size[1]
    keeps = places.ndim == len(value.shape)
    numbers = _numbers(places.shape, d if keeps else None, len(among), system.choices)
    index = Value.of(places.shape, choice=Choice(numbers, among))
    return index if isinstance(size, Tensor) else (Value.of(size[0].shape), index)


def _numbers(shape: Sequence[int], d: int | None, count: int, masks: list[list[bool]]) -> Tensor:
    """Place every index at one token of its own, and ``count`` everywhere else.

    The tokens are others than those of the choices that were made.
    """
    lead = [1 if k == d else n for k, n in enumerate(shape)]
    tokens = torch.Size(lead).numel()
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000 if tokens > count else 0):
        numbers = torch.full((tokens,), count)
        numbers[torch.randperm(tokens, generator=generator)[:count]] = torch.arange(count)
        none = numbers.reshape(lead) == count
        counts = none.reshape(-1).tolist()
        if counts not in masks and all(n == 1 or _varies(none, k) for k, n in enumerate(lead)):
            masks.append(counts)
            if d is None or shape[d] == 1:
                return numbers.reshape(tuple(shape))
            size = list(shape)
            size[d] -= 1
            return torch.cat([numbers.reshape(lead), torch.full(size, count)], d)
    raise Unfollowed(f"a choice among {count} channels by {tokens} tokens: pass a longer example")


def _varies(mask: Tensor, d: int) -> bool:
    return not bool((mask == mask.narrow(d, 0, 1)).all())


# ------------------------------------------------------------ to pick
def _pick(system: System, node: Node, args: Sequence[Any]) -> Value:
    """Index a tensor by a choice, with which the selected labels move."""
    name, value, size = operation_of(node), args[0], node.meta["val"]
    if name == "index":
        indices = list(args[1])
    else:
        dim, index = (0, args[1]) if name == "embedding" else (args[1] % len(value.shape), args[2])
        indices = [None] * dim + [index]
    by_choice = [d for d, i in enumerate(indices) if i is not None and i.choice is not None]
    if len(by_choice) != 1 or any(i.constant is None for i in _listed(indices) if not i.choice):
        raise Unfollowed("indexing by several computed indices")
    if name == "gather":
        d = by_choice[0]
        numbers = compress(indices[d].choice.numbers)
        return _placed(system, value, d, indices[d].choice, size.shape,
                       lambda t, n: torch.take_along_dim(t, n, d), numbers)  # fmt: skip
    d = by_choice[0]

    def function(labels: Tensor, numbers: Tensor) -> Tensor:
        constants = [
            numbers if k == d else i if i is None else i.constant for k, i in enumerate(indices)
        ]
        wide = [value.shape[k] if i is not None and k != d else -1 for k, i in enumerate(indices)]
        labels = labels.expand(*wide, *labels.shape[len(wide) :])
        return torch.ops.aten.index.Tensor(labels, constants)

    return _placed(system, value, d, indices[d].choice, size.shape, function,
                   indices[d].choice.numbers)  # fmt: skip


def _placed(
    system: System, value: Value, d: int, choice: Choice, shape: Sequence[int], function: Any,
    numbers: Tensor,
) -> Value:  # fmt: skip
    along = [p for p in value.factors if d in p.dims]
    if choice.is_index:
        if value.shape[d] != len(choice.among) or (value.varies[d] and not along):
            raise Unfollowed("values are selected by an index among channels")
        rows = choice.among.reshape([-1 if k == d else 1 for k in range(len(value.shape))])
        for factor in along:
            system.tie(factor.labels, rows, "tie" if factor.dims == {d} else "picked")
    elif any(d not in chosen(p.labels) for p in along):
        raise Unfollowed("channels are selected by token positions")
    factors = []
    for factor in value.factors:
        labels = factor.labels
        if d in factor.dims:
            none = torch.full_like(labels.narrow(d, 0, 1), NONE)
            labels = function(torch.cat([labels, none], d), numbers.clamp(max=labels.shape[d]))
        else:
            labels = function(labels, torch.zeros_like(numbers))
        factors.append(factor.with_labels(compress(labels)))
    return Value.of(shape, factors)


def _picked_by_data(system: System, node: Node, args: Sequence[Any]) -> Value:
    """Look up rows of a parameter by input indices: rows are fixed, columns are passed on."""
    name, value = operation_of(node), args[0]
    indices = (
        list(args[1])
        if name == "index"
        else [*[None] * (args[1] if name != "embedding" else 0), args[-1]]
    )
    over = {d for d, i in enumerate(indices) if i is not None}
    along = [p for p in value.factors if p.dims & over]
    if any(i.factors for i in _listed(indices)):
        raise Unfollowed("indexing by computed indices")
    is_table = all(p.is_free and p.dims <= over for p in along) and name != "gather"
    if not is_table or node.meta["val"].is_floating_point() is False:
        raise Unfollowed("channels are selected by an index")
    for factor in along:
        system.fix(factor)
    zeros = [i if i is None else torch.zeros(i.shape, dtype=torch.long) for i in indices]
    factors = [
        p.on(lambda t: compress(torch.ops.aten.index.Tensor(t, zeros)))
        for p in value.factors
        if p not in along
    ]
    return Value.of(node.meta["val"].shape, factors)


def _by_groups(system: System, x: Value, weight: Value, ends: Value) -> Value:
    """Multiply each run of sorted tokens by the matrix of its expert."""
    choice, count = ends.choice, len(x.shape) and x.shape[0]
    if choice is None or len(weight.shape) != 3 or len(x.shape) != 2:
        raise Unfollowed("grouped products of tokens without a choice")
    numbers = torch.searchsorted(choice.numbers.to(torch.float64), torch.arange(count).double(),
                                 right=True)  # fmt: skip
    index = Choice(numbers, choice.among)
    picked = _placed(system, weight, 0, index, (count, *weight.shape[1:]),
                     lambda t, n: t[n], numbers)  # fmt: skip
    return squeezed(contract(system, unsqueezed(x, 1), picked), 1)


# ------------------------------------------------------------ to compare and to count
def _compared(node: Node, args: Sequence[Any]) -> Value:
    """Compare a choice with one index, or with each of several along a dimension of their own."""
    choice, operand = _choice_of(args[0]), args[1]
    numbers = operand.constant if isinstance(operand, Value) else torch.tensor(operand)
    size = node.meta["val"]
    if choice is None or not choice.is_index or numbers is None:
        raise Unfollowed(_NUMBER)
    numbers = compress(numbers.to(torch.long))
    count = len(choice.among)
    if numbers.numel() not in (1, *numbers.shape) or not bool(
        ((numbers >= 0) & (numbers < count)).all()
    ):
        raise Unfollowed(_NUMBER)
    labels = choice.among[numbers]
    labels = labels.reshape((1,) * (size.ndim - labels.ndim) + tuple(labels.shape))
    return Value.of(size.shape, [Factor(labels, _ZERO, 0)])


def _scattered(system: System, node: Node, args: Sequence[Any]) -> Value:
    """Scatter values at a choice's indices into a constant tensor."""
    whole, d, index = args[0], args[1] % len(args[0].shape), args[2]
    choice, source = _choice_of(index), args[3]
    if choice is None or not choice.is_index or whole.factors or any(whole.varies):
        raise Unfollowed(_NUMBER)
    if whole.shape[d] != len(choice.among):
        raise Unfollowed(_NUMBER)
    labels = choice.among.reshape([-1 if k == d else 1 for k in range(len(whole.shape))])
    picked = torch.cat([choice.among, torch.tensor([NONE])])[choice.numbers]
    factors = [Factor(labels, _ZERO, 0)]
    for factor in source.factors if isinstance(source, Value) else ():
        system.stop(factor)
        if chosen(factor.labels):
            system.tie(factor.labels, picked, "picked")
        elif d in factor.dims:
            raise Unfollowed("channels are scattered to the indices of a choice")
        else:
            factors.append(factor.without_units())
    return Value.of(node.meta["val"].shape, factors)


def _counted(node: Node, args: Any, named: Any, values: Sequence[Value]) -> Any:
    """Compute with the values of a choice, which remain an index while they are only moved."""
    (first, *_) = (v.choice for v in values if v.choice is not None)
    name, target = operation_of(node), node.target

    def plain(x: Any) -> Any:
        if not isinstance(x, Value):
            return x
        return x.constant if x.choice is None else x.choice.numbers

    numbers, keywords = tree_map(plain, (args, named), is_leaf=lambda x: isinstance(x, Value))
    result = target(*numbers, **keywords)  # type: ignore[operator]
    choice = _choice_of(args[0])
    moves = (
        choice is not None and choice.is_index and name in MOVES | _PICK | UNCHANGED | {"expand"}
    )
    sizes = [
        (moves or (choice is not None and choice.is_index and name == "sort" and k == 0))
        and not t.is_floating_point()
        for k, t in enumerate(tree_leaves(result))
    ]
    wrapped = [
        Value.of(t.shape, choice=Choice(t, first.among, is_index))
        for t, is_index in zip(tree_leaves(result), sizes, strict=True)
    ]
    return tuple(wrapped) if isinstance(result, tuple | list) else wrapped[0]
