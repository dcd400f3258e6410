"""Operations that are short for others: the graph has these instead, before any rule is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from string import ascii_letters
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from lightning_bnn.symmetry.discovery.graph import Graph
from lightning_bnn.symmetry.rules.labels import operation_name, shape_of

__all__ = ["write_out"]

aten = torch.ops.aten


def write_out(graphs: Iterable[Graph | None], kept: Collection[str]) -> None:
    """Replace the operations of this file in graphs.

    Args:
        graphs: of a network in its modes, if they could be traced.
        kept: names of operations that stay, since they have a rule of the user's.
    """
    for graph in dict.fromkeys(graphs):
        if graph is not None:
            _write_out(graph, kept)


def _write_out(graph: Graph, kept: Collection[str]) -> None:
    replaced: dict[Node, Node] = {}
    for node in list(graph.module.graph.nodes):
        name = operation_name(node) if node.op == "call_function" else ""
        if name not in _IN_OTHERS or name in kept:
            continue
        with graph.module.graph.inserting_before(node):
            new = _IN_OTHERS[name](_Writer(node), *node.args, **node.kwargs)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.module.graph.erase_node(node)
            replaced[node] = new
    if replaced:
        graph.module.recompile()
        graph.results = [replaced.get(n, n) for n in graph.results]
        graph.outputs = [replaced.get(n, n) for n in graph.outputs]
        graph.written = [(name, replaced.get(n, n)) for name, n in graph.written]


class _Writer:
    """Writes operations in front of a node, which stand where this does in the network."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def __call__(self, operation: Any, *args: Any) -> Node:
        new: Node = self.node.graph.call_function(operation, args)
        values = tree_map(lambda x: x.meta["val"] if isinstance(x, Node) else x, args)
        new.meta = {**self.node.meta, "val": operation(*values)}
        return new

    def einsum(self, terms: Sequence[str], result: str, *operands: Node) -> Node:
        """A sum of products over named dimensions."""
        return self(aten.einsum.default, ",".join(terms) + "->" + result, list(operands))


# ------------------------------------------------------------ products
def _bilinear(write: _Writer, x: Node, y: Node, weight: Node, bias: Node | None = None) -> Node:
    product = write.einsum(["...i", "oij", "...j"], "...o", x, weight, y)
    return product if bias is None else write(aten.add.Tensor, product, bias)


def _tensordot(write: _Writer, x: Node, y: Node, of_x: Sequence[int], of_y: Sequence[int]) -> Node:
    first = list(ascii_letters[: _ndim(x)])
    second = list(ascii_letters[_ndim(x) : _ndim(x) + _ndim(y)])
    for d, other in zip(of_x, of_y, strict=True):
        second[other] = first[d]
    result = [c for c in first + second if (c in first) != (c in second)]
    return write.einsum(["".join(first), "".join(second)], "".join(result), x, y)


def _inner(write: _Writer, x: Node, y: Node) -> Node | None:
    if not _ndim(x) or not _ndim(y):
        return write(aten.mul.Tensor, x, y)
    return _tensordot(write, x, y, [-1], [-1]) if max(_ndim(x), _ndim(y)) > 1 else None


def _vecdot(write: _Writer, x: Node, y: Node, dim: int = -1) -> Node | None:
    if x.meta["val"].is_complex():
        return None
    return write(aten.sum.dim_IntList, write(aten.mul.Tensor, x, y), [dim])


def _multi_dot(write: _Writer, matrices: Sequence[Node]) -> Node:
    return reduce(lambda x, y: write(aten.matmul.default, x, y), matrices)


def _addbmm(
    write: _Writer, bias: Node, x: Node, y: Node, beta: int | float = 1, alpha: int | float = 1
) -> Node:
    product = _scaled(write, write.einsum(["abc", "acd"], "bd", x, y), alpha)
    return product if beta == 0 else write(aten.add.Tensor, _scaled(write, bias, beta), product)


def _addmv(
    write: _Writer, bias: Node, x: Node, y: Node, beta: int | float = 1, alpha: int | float = 1
) -> Node:
    product = _scaled(write, write(aten.mv.default, x, y), alpha)
    return product if beta == 0 else write(aten.add.Tensor, _scaled(write, bias, beta), product)


def _scaled(write: _Writer, x: Node, factor: int | float) -> Node:
    return x if factor == 1 else write(aten.mul.Scalar, x, factor)


def _einsum(write: _Writer, equation: str, operands: Sequence[Node], **kwargs: Any) -> Node | None:
    """Of four and more operands: two by two, first those that share a letter with no other."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    pending = list(zip(terms.split(","), operands, strict=True))
    if len(pending) < 4 or not arrow or "." in equation:
        return None
    if any(len(set(t)) < len(t) for t, _ in pending):
        return None
    while len(pending) > 1:
        k, j = max(
            ((k, j) for j in range(len(pending)) for k in range(j)),
            key=lambda pair: _summed_by(pair, [t for t, _ in pending], result),
        )
        (first, x), (second, y) = pending[k], pending[j]
        pending = [p for i, p in enumerate(pending) if i not in (k, j)]
        needed = {*result, *(c for t, _ in pending for c in t)}
        kept = result if not pending else "".join(sorted({*first, *second} & needed))
        pending.append((kept, write.einsum([first, second], kept, x, y)))
    return pending[0][1]


def _summed_by(pair: tuple[int, int], terms: Sequence[str], result: str) -> tuple[int, int, int]:
    """How many letters a product of two sums up, and how few it keeps; the first such pair."""
    others = {*result, *(c for i, t in enumerate(terms) if i not in pair for c in t)}
    of_both = {*terms[pair[0]], *terms[pair[1]]}
    return len(of_both - others), -len(of_both & others), -sum(pair)


# ------------------------------------------------------------ distances and angles
def _cosine(write: _Writer, x: Node, y: Node, dim: int = 1, eps: int | float = 1e-8) -> Node | None:
    if _ndim(x) != _ndim(y):
        return None

    def unit(z: Node) -> Node:
        size = write(aten.linalg_vector_norm.default, z, 2, [dim], True)
        size = write(aten.clamp_min.default, size, eps)
        return write(aten.div.Tensor, z, write(aten.expand_as.default, size, z))

    return write(aten.sum.dim_IntList, write(aten.mul.Tensor, unit(x), unit(y)), [dim])


def _cdist(write: _Writer, x: Node, y: Node, p: int | float = 2, mode: int | None = None) -> Node:
    rows = write(aten.unsqueeze.default, x, -2), write(aten.unsqueeze.default, y, -3)
    return write(aten.linalg_vector_norm.default, write(aten.sub.Tensor, *rows), p, [-1])


def _distance(
    write: _Writer,
    x: Node,
    y: Node,
    p: int | float = 2,
    eps: int | float = 1e-6,
    keepdim: bool = False,
) -> Node:
    apart = write(aten.add.Scalar, write(aten.sub.Tensor, x, y), eps)
    return write(aten.linalg_vector_norm.default, apart, p, [-1], keepdim)


def _complex(write: _Writer, real: Node, imaginary: Node) -> Node | None:
    if shape_of(real) != shape_of(imaginary):
        return None
    return write(aten.view_as_complex.default, write(aten.stack.default, [real, imaginary], -1))


def _imaginary(write: _Writer, x: Node) -> Node:
    return write(aten.select.int, write(aten.view_as_real.default, x), -1, 1)


def _ndim(node: Node) -> int:
    return len(shape_of(node))


_IN_OTHERS: dict[str, Callable[..., Node | None]] = {
    "bilinear": _bilinear,
    "tensordot": _tensordot,
    "inner": _inner,
    "linalg_vecdot": _vecdot,
    "linalg_multi_dot": _multi_dot,
    "chain_matmul": _multi_dot,
    "addbmm": _addbmm,
    "addmv": _addmv,
    "einsum": _einsum,
    "cosine_similarity": _cosine,
    "cdist": _cdist,
    "pairwise_distance": _distance,
    "complex": _complex,
    "imag": _imaginary,
}
