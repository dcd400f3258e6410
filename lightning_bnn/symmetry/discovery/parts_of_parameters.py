"""Parameters that are read part by part: each part is followed as a tensor of its own.

Stacks of tensors, of which each branch reads one (``for e in range(n): y = y + f(x @ w[e])``), and
vectors of all weights (``p[:20].view(5, 4)``). `put_back` says where the parts are afterwards.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.fx import Node

from lightning_bnn.symmetry.discovery.graph import Graph, ancestors
from lightning_bnn.symmetry.discovery.twins import find_twins
from lightning_bnn.symmetry.rules.labels import operation_name

__all__ = ["Part", "parts_to_follow", "taken_apart"]


class Part(NamedTuple):
    """Rows of a parameter from one to another, in a shape of their own.

    A single row of a stack has the shape of a row; rows of a vector may have any.
    """

    whole: str
    start: int
    stop: int
    shape: torch.Size
    of_vector: bool = False

    @property
    def name(self) -> str:
        """The name under which it is followed."""
        rows = f"{self.start}:{self.stop}" if self.of_vector else str(self.start)
        return f"{self.whole}[{rows}]"


def parts_to_follow(
    graphs: Sequence[Graph], sole: Collection[str], changing: Collection[str]
) -> dict[str, Part]:
    """The parts, by name, that are followed as tensors in all graphs.

    Args:
        graphs: what the network computes, in evaluation and in training.
        sole: the tensors that have one name only, and share their memory with no other.
        changing: the buffers that a forward changes.
    """
    found: dict[str, Part] | None = None
    for graph in graphs:
        vectors = {p.name: p for p in _parts(graph, sole, of_vectors=True).values()}
        stacks = {p.name: p for p in _parts(graph, sole, of_vectors=False).values()}
        kept = vectors | (_in_branches(graph, stacks, sole, changing) if stacks else {})
        found = kept if found is None else {n: p for n, p in kept.items() if found.get(n) == p}
    return found or {}


def _in_branches(
    graph: Graph, parts: Mapping[str, Part], sole: Collection[str], changing: Collection[str]
) -> dict[str, Part]:
    """The parts of stacks by which branches pair up, each with another part of the same stack."""
    twins = find_twins(taken_apart(graph, parts), {*sole, *parts}, changing)
    rows = [row for t in twins for row in zip(*t.tensors, strict=True)]
    stacks = [{parts[n].whole if n in parts else "" for n in row} for row in rows]
    used = {stack for of in stacks for stack in of}
    mixed = {stack for of in stacks for stack in of if len(of) > 1}
    return {n: p for n, p in parts.items() if p.whole in used - mixed}


def taken_apart(graph: Graph, parts: Mapping[str, Part]) -> Graph:
    """A graph in which these parts are tensors of their own."""
    if not parts:
        return graph
    tensors = {source.name: source for source in graph.sources.values()}
    result = copy.copy(graph)
    result.sources = dict(graph.sources)
    wholes = {part.whole for part in parts.values()}
    for of_vectors in (True, False):
        for node, part in _parts(graph, wholes, of_vectors).items():
            if parts.get(part.name) == part:
                whole = tensors[part.whole]
                rows = whole.tensor[part.start : part.stop].reshape(part.shape)
                result.sources[node] = whole._replace(name=part.name, tensor=rows)
    return result


# ------------------------------------------------------------ what reads a parameter
def _parts(graph: Graph, sole: Collection[str], of_vectors: bool) -> dict[Node, Part]:
    """The nodes that are parts of parameters of which nothing but such parts is read."""
    ends = {*graph.results, *(node for _, node in graph.written)}
    live = ancestors(ends)
    found: dict[Node, Part] = {}
    for placeholder, source in graph.sources.items():
        ndim = source.tensor.ndim if source.kind == "parameter" else 0
        if source.name not in sole or not ndim or (ndim == 1) != of_vectors:
            continue
        rows = list(_rows(placeholder, live, len(source.tensor)))
        if rows and None not in rows and not ends & {r[0] for r in rows if r}:
            known = [r for r in rows if r]
            parts = _of_vector if of_vectors else _of_stack
            found |= parts(source.name, known, source.tensor.shape, live)
    return found


Rows = tuple[Node, int, int]
"""A node, and which rows it takes: the first, and the one after the last."""


def _of_stack(
    name: str, rows: Sequence[Rows], shape: torch.Size, live: Collection[Node]
) -> dict[Node, Part]:
    if shape[0] < 2 or any(node.meta["val"].shape != shape[1:] for node, *_ in rows):
        return {}
    return {node: Part(name, start, stop, shape[1:]) for node, start, stop in rows}


def _of_vector(
    name: str, rows: Sequence[Rows], shape: torch.Size, live: Collection[Node]
) -> dict[Node, Part]:
    """Parts that do not overlap, and of which one at least is more than a vector."""
    ranges = sorted({(start, stop) for _, start, stop in rows})
    if any(first[1] > second[0] for first, second in zip(ranges, ranges[1:], strict=False)):
        return {}
    nodes: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for node, start, stop in rows:
        nodes[start, stop].append(node)
    found: dict[Node, Part] = {}
    for (start, stop), same in nodes.items():
        views = [user for node in same for user in node.users if user in live]
        shapes = {v.meta["val"].shape for v in views if _is_view(v)}
        if len(shapes) == 1 and all(map(_is_view, views)):
            part = Part(name, start, stop, shapes.pop(), of_vector=True)
            found |= dict.fromkeys(views, part)
        else:
            part = Part(name, start, stop, torch.Size([stop - start]), of_vector=True)
            found |= dict.fromkeys(same, part)
    return found if any(len(part.shape) > 1 for part in found.values()) else {}


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and operation_name(node) in (
        *("view", "reshape", "_unsafe_view", "unflatten"),
    )


def _rows(node: Node, live: Collection[Node], count: int) -> Iterator[Rows | None]:
    """Nodes that take rows of a tensor, and which; None for any other use."""
    for user in node.users:
        if user not in live:
            continue
        name = operation_name(user) if user.op == "call_function" else ""
        args = [*user.args[1:], *user.kwargs.values()]
        if name == "select" and args[0] == 0 and isinstance(args[1], int):
            yield user, args[1] % count, args[1] % count + 1
        elif name == "slice" and args[0] == 0 and all(isinstance(a, int | None) for a in args):
            start, stop, step = slice(*(args[1:] + [None] * 3)[:3]).indices(count)
            yield (user, start, stop) if step == 1 else None
        elif name in ("unbind", "split", "split_with_sizes", "chunk"):
            yield from _pieces(user, live) if _along_rows(name, user) else [None]
        else:
            yield None


def _along_rows(name: str, node: Node) -> bool:
    at = 1 if name == "unbind" else 2
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    return isinstance(dim, int) and dim == 0


def _pieces(node: Node, live: Collection[Node]) -> Iterator[Rows | None]:
    """The parts of what is split along its first dimension."""
    by_one = operation_name(node) == "unbind"
    sizes = [1 if by_one else len(piece) for piece in node.meta["val"]]
    stops = list(accumulate(sizes))
    for piece in node.users:
        if piece in live:
            k = int(str(piece.args[1]))
            yield piece, stops[k] - sizes[k], stops[k]
