"""Find branches of a graph that compute the same with tensors of their own.

Experts that are summed, or the heads of an ensemble: their results are added up, or put side by
side, and their nodes pair up one by one. Where branches take different parts of one tensor, such as
their gates, only the channels can tell whether these may be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.discovery.graph import (
    Graph,
    Source,
    ancestors,
    descendants,
    repeated,
    writes,
)
from lightning_bnn.symmetry.rules.labels import operation_name

__all__ = ["Twins", "find_twins"]


@dataclass(frozen=True, eq=False)
class Twins:
    """Branches that may be exchanged if what enters and leaves them may.

    Attributes:
        nodes: the operations of every branch, in corresponding order.
        tensors: the tensors of every branch, likewise, by their first names.
        ports: nodes of every branch whose channels are not those of the other branches: parts of
            one tensor, and results that stand side by side.
    """

    nodes: tuple[tuple[Node, ...], ...]
    tensors: tuple[tuple[str, ...], ...]
    ports: tuple[tuple[Node, ...], ...]


def find_twins(graph: Graph, sole: Collection[str], changing: Collection[str]) -> list[Twins]:
    """All branches of a graph that pair up, those inside others first.

    Args:
        graph: what the network computes in one mode.
        sole: the tensors that have one name only, and share their memory with no other.
        changing: the buffers that a forward changes.
    """
    state = {n: s for n, s in graph.sources.items() if _is_state(s, changing)}
    live = ancestors([*graph.results, *(node for _, node in graph.written)])
    same = repeated(graph.module)
    active = descendants(n for n, source in graph.sources.items() if source.kind == "input")
    known = graph.sources, state, sole, frozenset(changing), same

    def new() -> _Pairs:
        return _Pairs(*known)

    found = []
    for node, leaves, side_by_side in _joints(graph, live):
        leaves = [leaf for leaf in leaves if leaf in active]  # sums of weights are no branches
        for alike in _alike(leaves, new):
            twins = _twins(node, alike, side_by_side, live)
            if twins is not None:
                found.append(twins)
    return sorted(found, key=lambda twins: len(twins.nodes[0]))


# ------------------------------------------------------------ where branches come together
def _joints(graph: Graph, live: Collection[Node]) -> Iterator[tuple[Node, list[Node], bool]]:
    """Sums and rows of tensors: the node, what it joins, and whether this stands side by side."""
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or node not in live:
            continue
        if _is_sum(node):
            if not any(_is_sum(user) for user in node.users) or len(node.users) > 1:
                yield node, list(_summands(node)), False
        elif operation_name(node) in ("stack", "cat", "concat", "concatenate"):
            yield node, [n for n in node.args[0] if isinstance(n, Node)], True


def _is_sum(node: Node) -> bool:
    if node.op != "call_function" or operation_name(node).removesuffix("_") != "add":
        return False
    return len(node.args) == 2 and bool(node.kwargs.get("alpha", 1) == 1)


def _summands(total: Node) -> Iterator[Node]:
    """What a sum of sums adds up, in the order of the graph."""
    for part in total.args:
        if isinstance(part, Node) and _is_sum(part) and len(part.users) == 1:
            yield from _summands(part)
        elif isinstance(part, Node):
            yield part


# ------------------------------------------------------------ nodes in pairs
@dataclass
class _Pairs:
    """The nodes and tensors of two branches that correspond."""

    sources: Mapping[Node, Source]
    state: Mapping[Node, Source]
    sole: Collection[str]
    changing: frozenset[str]
    same: Mapping[Node, Node]
    image: dict[Node, Node] = field(default_factory=dict)
    origin: dict[Node, Node] = field(default_factory=dict)
    ports: dict[Node, Node] = field(default_factory=dict)

    def reach(self, first: Node, second: Node) -> bool:
        """Pair up all that two nodes are computed from; whether that is possible."""
        pending: list[tuple[Any, Any]] = [(first, second)]
        while pending:
            a, b = pending.pop()
            if isinstance(a, Node) and isinstance(b, Node):
                known = a in self.image or b in self.origin
                fits = self.image.get(a) is b if known else self._pair(a, b, pending)
            else:
                fits = _fit(a, b, pending)
            if not fits:
                return False
        return True

    def _pair(self, a: Node, b: Node, pending: list[tuple[Any, Any]]) -> bool:
        """Take two nodes for each other; what they are computed from is left to do."""
        self.image[a], self.origin[b] = b, a
        if self.is_same(a, b):
            return True
        if a in self.sources or b in self.sources:
            return a in self.sources and b in self.sources and self._same_source(a, b)
        if a.op != "call_function" or a.op != b.op or a.target is not b.target:
            return False
        if _parts_of_one(a, b, self.is_same):
            self.ports[a] = b
            return True
        pending += [(a.args, b.args), (list(a.kwargs), list(b.kwargs))]
        pending += [(a.kwargs[k], b.kwargs.get(k)) for k in a.kwargs]
        return True

    def is_same(self, a: Any, b: Any) -> bool:
        """Whether two nodes compute the same from the same."""
        return self.same.get(a, a) is self.same.get(b, b)

    def _same_source(self, first: Node, second: Node) -> bool:
        """Tensors of one kind and shape, which nobody shares; constants with equal values."""
        a, b = self.sources[first], self.sources[second]
        if a.kind != b.kind or a.kind == "input" or a.tensor.shape != b.tensor.shape:
            return False
        if a.tensor.dtype != b.tensor.dtype or (first in self.state) != (second in self.state):
            return False
        if first in self.state:
            return a.name in self.sole and b.name in self.sole
        return not {a.name, b.name} & self.changing and bool(torch.equal(a.tensor, b.tensor))


def _is_state(source: Source, changing: Collection[str]) -> bool:
    """Whether a tensor is one that moves: a parameter, or a buffer that follows its channels."""
    if source.kind != "buffer":
        return source.kind == "parameter"
    floating = source.persistent and source.tensor.is_floating_point()
    return floating and (source.tensor.ndim == 1 or source.name in changing)


def _fit(a: Any, b: Any, pending: list[tuple[Any, Any]]) -> bool:
    """Whether two arguments are equal but for their nodes, which are left to pair up."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        pending += zip(a, b, strict=False)
        return len(a) == len(b)
    return not isinstance(b, Node) and type(a) is type(b) and bool(a == b)


_SPLITS = frozenset("split split_with_sizes chunk unbind tensor_split".split())


def _parts_of_one(a: Node, b: Node, is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether two nodes take parts of equal shape from one tensor, or compare one with numbers."""
    name = operation_name(a)
    shapes = [n.meta["val"].shape if isinstance(n.meta["val"], Tensor) else None for n in (a, b)]
    if shapes[0] is None or shapes[0] != shapes[1] or not (a.args and b.args):
        return False
    if a.args[1:] == b.args[1:] or not is_same(a.args[0], b.args[0]):
        return False
    numbers = all(isinstance(x, int) for n in (a, b) for x in n.args[1:])
    same_dim = a.args[1:2] == b.args[1:2] and len(a.args) == len(b.args)
    source = a.args[0]
    if name == "getitem":
        return numbers and isinstance(source, Node) and operation_name(source) in _SPLITS
    return numbers and (name == "eq" or (name in ("select", "slice") and same_dim))


# ------------------------------------------------------------ branches
def _alike(leaves: Sequence[Node], new: Callable[[], _Pairs]) -> Iterator[list[_Pairs]]:
    """What is joined and corresponds: each as pairs of its nodes with those of the first."""
    kinds: list[list[_Pairs]] = []
    for leaf in leaves:
        if leaf.op != "call_function" or leaves.count(leaf) > 1:
            continue
        for kind in kinds:
            first = next(iter(kind[0].image))
            pairs = new()
            if pairs.reach(first, leaf) and (len(kind) == 1 or _own(pairs) == _own(kind[1])):
                kind.append(pairs)
                break
        else:
            kinds.append([replace(new(), image={leaf: leaf})])
    return (kind for kind in kinds if len(kind) > 1)


def _own(pairs: _Pairs) -> dict[Node, bool]:
    """The nodes of the first branch that the other has not, and which of them are ports."""
    return {a: a in pairs.ports for a, b in pairs.image.items() if not pairs.is_same(a, b)}


def _twins(
    joint: Node,
    kind: Sequence[_Pairs],
    side_by_side: bool,
    live: Collection[Node],
) -> Twins | None:
    """The branches, if each has tensors of its own and nobody else sees what is inside."""
    sources, state = kind[0].sources, kind[0].state
    if next(iter(kind[0].image)) in kind[1].ports:
        return None
    own = [a for a in _own(kind[1]) if a not in kind[1].ports]
    inside = [a for a in own if a in state or a not in sources]
    if not inside:
        return None
    branches = [inside, *([pairs.image[a] for a in inside] for pairs in kind[1:])]
    ports = [list(kind[1].ports), *([pairs.image[a] for a in kind[1].ports] for pairs in kind[1:])]
    if side_by_side:
        for branch, row in zip(branches, ports, strict=True):
            row.append(branch[0])
    every = [node for branch in branches for node in branch]
    if len(set(every)) < len(every) or not _is_closed(joint, branches, live):
        return None
    tensors = tuple(tuple(sources[n].name for n in b if n in sources) for b in branches)
    nodes = tuple(tuple(n for n in b if n not in sources) for b in branches)
    return Twins(nodes, tensors, tuple(map(tuple, ports))) if tensors[0] else None


def _is_closed(joint: Node, branches: Sequence[Sequence[Node]], live: Collection[Node]) -> bool:
    """Whether nodes are read inside their own branch only, and the last one by the joint."""
    ends = _sums_below(joint)
    for branch in branches:
        members, last = set(branch), branch[0]
        for node in branch:
            allowed = ends if node is last else members
            users = {user for user in node.users if user in live or writes(user)}
            if not users <= allowed or _writes_elsewhere(node, members):
                return False
    return True


def _sums_below(joint: Node) -> set[Node]:
    """A joint, and the sums that it adds up."""
    found, pending = {joint}, [joint] if _is_sum(joint) else []
    while pending:
        for part in pending.pop().args:
            if isinstance(part, Node) and _is_sum(part) and len(part.users) == 1:
                found.add(part)
                pending.append(part)
    return found


def _writes_elsewhere(node: Node, members: Collection[Node]) -> bool:
    """Whether a node changes what others than itself read."""
    if not writes(node):
        return False
    changed = node.args[0]
    return not (isinstance(changed, Node) and changed in members and len(changed.users) == 1)
