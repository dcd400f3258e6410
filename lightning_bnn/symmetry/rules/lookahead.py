"""What becomes of a tensor further down a graph: a sum, a division by it, a summand of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map

from lightning_bnn.symmetry.rules.labels import compress, moving_dims, operation_name, shape_of
from lightning_bnn.symmetry.rules.softmaxes import is_forgotten_by_softmax

__all__ = [
    "divides",
    "is_added_to_scores",
    "is_square",
    "is_summed",
    "meets_stack",
    "sums_next",
]

_LINEAR = frozenset("mul add sub div dropout to _to_copy neg contiguous clone alias".split())
_SHAPES = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze permute transpose t movedim expand".split()
)
_COPIES = frozenset("to _to_copy type_as contiguous clone alias".split())
_SUMS = frozenset(["sum", "mean"])
_QUOTIENTS = frozenset("div divide true_divide".split())


def divides(node: Any) -> bool:
    """Whether something is divided by a tensor, or by a rearrangement of it."""
    if not isinstance(node, Node):
        return False
    for user in node.users:
        name = operation_name(user).removesuffix("_")
        if name == "reciprocal" or (name in _QUOTIENTS and user.args[1] is node):
            return True
        if name in _SHAPES and divides(user):
            return True
    return False


def is_added_to_scores(node: Node) -> bool:
    """Whether all that becomes of a tensor is a summand of the scores of an attention."""
    for user in node.users:
        name = operation_name(user).removesuffix("_")
        if name == "scaled_dot_product_attention":
            mask = user.args[3] if len(user.args) > 3 else user.kwargs.get("attn_mask")
            if mask is not node:
                return False
        elif name == "add":
            if not is_forgotten_by_softmax(user):
                return False
        elif not (name in _SHAPES or name in _COPIES) or not is_added_to_scores(user):
            return False
    return bool(node.users)


def meets_stack(node: Node) -> bool:
    """Whether what is computed element by element from a node is multiplied by indexed matrices."""
    pending, seen = list(node.users), {node}
    while pending:
        user = pending.pop()
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        name = operation_name(user)
        if "grouped_mm" in name:
            return True
        if name in _PRODUCTS:
            others = [n for n in user.all_input_nodes if n not in seen]
            if any(_is_indexed(n) for n in others):
                return True
        elif name not in _ENDS:
            pending += user.users
    return False


_PRODUCTS = frozenset("matmul mm bmm einsum baddbmm linear addmm".split())
_ENDS = frozenset("sum mean index index_select gather scatter index_add cat stack".split())


def _is_indexed(node: Node) -> bool:
    """Whether a tensor is what an index has picked, or a rearrangement of it."""
    while node.op == "call_function" and operation_name(node) not in ("index", "index_select"):
        if operation_name(node) not in (*_SHAPES, *_COPIES, "mT", "swapaxes", "getitem", "chunk"):
            return False
        source = node.args[0]
        if not isinstance(source, Node):
            return False
        node = source
    return node.op == "call_function"


def is_square(node: Any) -> bool:
    """Whether a node computes the squares of a tensor."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    name, args = operation_name(node).removesuffix("_"), node.args
    same = name in ("mul", "multiply") and args[0] is args[1]
    return same or name == "square" or (name == "pow" and args[1:] == (2,))


def is_summed(node: Node, dim: int) -> bool:
    """Whether sums over a dimension of what a node computes come before anything not linear."""
    shape = shape_of(node)
    marker = torch.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return _ends_in_sum(node, marker.expand(shape))


def sums_next(node: Node) -> list[int]:
    """The dimensions over which all that reads a node sums at once."""
    ndim = len(shape_of(node))
    if not node.users or any(operation_name(user) not in _SUMS for user in node.users):
        return []
    found = set(range(ndim))
    for user in node.users:
        of = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
        of = _listed(of) if of is not None and of != [] else range(ndim)
        found &= {d % ndim for d in of}
    return sorted(found)


def _ends_in_sum(node: Node, marker: Tensor) -> bool:
    users = list(node.users)
    return bool(users) and all(_summed_by(user, node, marker) for user in users)


def _summed_by(user: Node, node: Node, marker: Tensor) -> bool:
    name, dims = operation_name(user).removesuffix("_"), moving_dims(marker)
    if name in _SUMS:
        of = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
        return not of or {d % marker.ndim for d in _listed(of)} >= set(dims)
    if name in ("einsum", "matmul", "bmm", "mm"):
        return _contracted_by(user, node, dims, marker.ndim)
    if name in _LINEAR:
        shape = shape_of(user)
        return len(marker.shape) <= len(shape) and _ends_in_sum(user, _broadcast(marker, shape))
    if name in _SHAPES:
        return _ends_in_sum(user, compress(_moved(user, node, marker)))
    return False


def _listed(dims: Any) -> Sequence[int]:
    return [dims] if isinstance(dims, int) else dims


def _broadcast(marker: Tensor, shape: torch.Size) -> Tensor:
    try:
        return marker.expand(shape)
    except RuntimeError:
        return marker


def _moved(user: Node, node: Node, marker: Tensor) -> Tensor:
    args, kwargs = tree_map(lambda a: marker if a is node else a, (user.args, user.kwargs))
    target: Any = user.target
    if operation_name(user) == "view":
        target, args = torch.ops.aten.reshape.default, args[:2]
    result: Tensor = target(*args, **kwargs)
    return result


def _contracted_by(user: Node, node: Node, dims: Sequence[int], ndim: int) -> bool:
    """Whether a product without weights sums over the dimensions."""
    operands: Any = user.args[1] if operation_name(user) == "einsum" else user.args[:2]
    if any(x is not node and x.op == "placeholder" for x in operands):
        return False
    at = list(operands).index(node)
    if operation_name(user) != "einsum":
        return list(dims) == [ndim - 1 if at == 0 else ndim - 2]
    terms, _, result = str(user.args[0]).replace(" ", "").partition("->")
    term = terms.split(",")[at]
    return "." not in term and all(term[d] not in result for d in dims)
