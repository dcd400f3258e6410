"""Parameters that are stacks of tensors, one for each branch: followed one by one, then put back.

``for e in range(n): y = y + p[:, e] * f(x @ w[e])`` reads the parts of one parameter as modules in
a list read parameters of their own. While channels are followed, each part is a tensor ``w[e]``;
afterwards what moves parts moves rows of the stack, and what moves inside them moves inside a row.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.discovery.graph import Graph, ancestors
from lightning_bnn.symmetry.discovery.twins import find_twins
from lightning_bnn.symmetry.groups import Axis, PermutationGroup, Placement, ShiftGroup, Symmetries
from lightning_bnn.symmetry.rules.labels import Unsupported, operation_name

__all__ = ["Part", "parts_in_branches", "put_back", "taken_apart"]


class Part(NamedTuple):
    """A parameter, and the index of a part of it along its first dimension."""

    stack: str
    row: int

    @property
    def name(self) -> str:
        """The name under which it is followed."""
        return f"{self.stack}[{self.row}]"


# ------------------------------------------------------------ before channels are followed
def parts_in_branches(
    graphs: Sequence[Graph], sole: Collection[str], changing: Collection[str]
) -> dict[str, Part]:
    """The parts, by name, of all stacks that are read part by part, by branches that pair up."""
    found: dict[str, Part] | None = None
    for graph in graphs:
        parts = [p for ps in _parts(graph, sole).values() for p in ps.values()]
        named = {p.name: p for p in parts}
        if not named:
            return {}
        twins = find_twins(taken_apart(graph, named), {*sole, *named}, changing)
        rows = [row for t in twins for row in zip(*t.tensors, strict=True)]
        stacks = [{named[n].stack if n in named else "" for n in row} for row in rows]
        used = {stack for of in stacks for stack in of}
        mixed = {stack for of in stacks for stack in of if len(of) > 1}
        kept = {n: p for n, p in named.items() if p.stack in used - mixed}
        found = kept if found is None else {n: p for n, p in kept.items() if n in found}
    return found or {}


def taken_apart(graph: Graph, parts: Mapping[str, Part]) -> Graph:
    """A graph in which these parts are tensors of their own."""
    if not parts:
        return graph
    stacks = {part.stack for part in parts.values()}
    result = copy.copy(graph)
    result.sources = dict(graph.sources)
    for placeholder, nodes in _parts(graph, stacks).items():
        whole = graph.sources[placeholder]
        for node, part in nodes.items():
            own = whole._replace(name=part.name, tensor=whole.tensor[part.row])
            result.sources[node] = own
    return result


def _parts(graph: Graph, sole: Collection[str]) -> dict[Node, dict[Node, Part]]:
    """By parameter the nodes that are parts of it, if nothing else reads it."""
    written = [node for _, node in graph.written]
    live = ancestors([*graph.results, *written])
    found = {}
    for placeholder, source in graph.sources.items():
        if source.kind != "parameter" or source.name not in sole or source.tensor.ndim < 2:
            continue
        rows = list(_rows(placeholder, live))
        if len(source.tensor) > 1 and rows and None not in rows:
            count = len(source.tensor)
            nodes = {n: Part(source.name, k % count) for n, k in (r for r in rows if r)}
            if not {*nodes} & {*graph.results, *written}:
                found[placeholder] = nodes
    return found


def _rows(node: Node, live: Collection[Node]) -> Iterator[tuple[Node, int] | None]:
    """Nodes that take one row of a tensor, with its index; None for any other use."""
    for user in node.users:
        name = operation_name(user) if user.op == "call_function" else ""
        if user not in live:
            continue
        dim = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)
        if name == "select" and dim == 0 and isinstance(user.args[2], int):
            yield user, user.args[2]
        elif name == "unbind" and dim == 0:
            yield from ((part, int(str(part.args[1]))) for part in user.users if part in live)
        else:
            yield None


# ------------------------------------------------------------ after groups are found
def put_back(
    sym: Symmetries, parts: Mapping[str, Part], shapes: Mapping[str, torch.Size]
) -> Symmetries:
    """Symmetries of the stacks, from those of their parts.

    Args:
        sym: what was found.
        parts: by name.
        shapes: those of the stacks, by name.

    Raises:
        Unsupported: a part has axes that no axis of its stack is made of.
    """
    if not parts:
        return sym
    stacks = _Stacks(sym.axes, parts, shapes)
    moved: dict[str, Any] = {
        kind: tuple(stacks.moved(group) for group in getattr(sym, kind))
        for kind in ("permutations", "scalings", "signs", "linear")
    }
    shifts = tuple(stacks.shifted(s) for s in sym.shifts if not stacks.are_read_by(s))
    return replace(sym, axes=tuple(stacks.axes), shifts=shifts, **moved)


class _Stacks:
    """The axes of stacks, and where on them those of their parts are."""

    def __init__(
        self, axes: Sequence[Axis], parts: Mapping[str, Part], shapes: Mapping[str, torch.Size]
    ) -> None:
        self.axes: list[Axis] = []
        self.parts, self.shapes = parts, shapes
        self._rows: dict[str, int] = {}
        self._inside: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        self._at: list[tuple[int, int]] = []
        uses: Counter[tuple[str, int | None]] = Counter()
        for axis in axes:
            if axis.tensor in parts:
                slot = uses[axis.tensor, axis.dim]
                uses[axis.tensor, axis.dim] += 1
                self._at.append(self._of_part(axis, slot))
            else:
                self._at.append((len(self.axes), 0))
                self.axes.append(axis)

    def _of_part(self, axis: Axis, slot: int) -> tuple[int, int]:
        """The axis of the stack, and where on it this part begins."""
        if axis.dim is None or axis.blocks > 1:
            raise Unsupported("a part of a stack with channels that no axis of the stack has")
        stack, row = self.parts[axis.tensor]
        self._rows_of(stack)
        index = self._inside[stack].setdefault((axis.dim, slot), len(self.axes))
        if index == len(self.axes):
            blocks = self.shapes[stack][0]
            self.axes.append(replace(axis, tensor=stack, dim=axis.dim + 1, blocks=blocks))
        last_read = max(self.axes[index].last_read, axis.last_read)
        self.axes[index] = replace(self.axes[index], last_read=last_read)
        return index, row * axis.size

    def _rows_of(self, stack: str) -> int:
        """The axis along which the parts of a stack are."""
        if stack not in self._rows:
            self._rows[stack] = len(self.axes)
            self.axes.append(Axis(stack, 0, self.shapes[stack][0], "expert"))
        return self._rows[stack]

    def moved(self, group: Any) -> Any:
        """A group with its places on the stacks."""
        places = [self._place(p) for p in group.placements]
        changes: dict[str, Any] = {}
        if isinstance(group, PermutationGroup):
            rows = [row for row in group.tensors if row[0] in self.parts]
            places += [p for row in rows for p in self._exchanged([self.parts[n] for n in row])]
            changes["tensors"] = tuple(row for row in group.tensors if row not in rows)
        name = self.parts[group.name].stack if group.name in self.parts else group.name
        return replace(group, name=name, placements=_joined(places), **changes)

    def shifted(self, group: ShiftGroup) -> ShiftGroup:
        """A group of shifts with its places on the stacks."""
        readers = (replace(r, channels=self._place(r.channels)) for r in group.readers)
        return replace(self.moved(group), readers=tuple(readers))

    def _place(self, place: Placement) -> Placement:
        axis, start = self._at[place.axis]
        return replace(place, axis=axis, positions=place.positions + start)

    def _exchanged(self, row: Sequence[Part]) -> Iterator[Placement]:
        """Where parts of one stack lie in it: as rows, and as blocks of what is inside."""
        at = torch.tensor([[part.row] for part in row])
        stack = row[0].stack
        yield Placement(self._rows_of(stack), at)
        for index in self._inside[stack].values():
            size = self.axes[index].size
            yield Placement(index, at * size + torch.arange(size))

    def are_read_by(self, shift: ShiftGroup) -> bool:
        """Whether parts of a stack read what is shifted, of whose biases none can be named."""
        weights = {self.axes[self._at[r.channels.axis][0]].tensor for r in shift.readers}
        biases = {r.bias for r in shift.readers}
        return bool(weights & self._rows.keys() or biases & self.parts.keys())


def _joined(places: Sequence[Placement]) -> tuple[Placement, ...]:
    """Places on one axis as one."""
    together: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for place in places:
        together[place.axis, place.exponent].append(place.positions)
    joined = (Placement(a, torch.cat(at, -1), power) for (a, power), at in together.items())
    return tuple(sorted(joined, key=lambda place: place.axis))
