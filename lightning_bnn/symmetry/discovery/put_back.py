"""Symmetries of parameters that were followed part by part, from those of their parts.

What moves parts of a stack moves its rows, and what moves inside a part moves inside a row. A part
of a vector has an axis for each of its dimensions along the vector.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.symmetry.discovery.parts_of_parameters import Part
from lightning_bnn.symmetry.groups import Axis, PermutationGroup, Placement, Symmetries
from lightning_bnn.symmetry.rules.labels import Unsupported

__all__ = ["put_back"]


def put_back(
    sym: Symmetries, parts: Mapping[str, Part], shapes: Mapping[str, torch.Size]
) -> Symmetries:
    """Symmetries of whole parameters.

    Args:
        sym: what was found.
        parts: by name.
        shapes: those of the parameters, by name.

    Raises:
        Unsupported: a part has an axis that its stack has not.
    """
    if not parts:
        return sym
    wholes = _Wholes(sym.axes, parts, shapes)
    moved: dict[str, Any] = {
        kind: tuple(wholes.moved(group) for group in getattr(sym, kind))
        for kind in ("permutations", "scalings", "signs", "linear")
    }
    return replace(sym, axes=tuple(wholes.axes), **moved)


class _Wholes:
    """The axes of whole parameters, and where on them those of their parts are."""

    def __init__(
        self, axes: Sequence[Axis], parts: Mapping[str, Part], shapes: Mapping[str, torch.Size]
    ) -> None:
        self.axes: list[Axis] = []
        self.parts, self.shapes = parts, shapes
        self._rows: dict[str, int] = {}
        self._inside: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        self._at: list[tuple[int, Tensor]] = []
        uses: Counter[tuple[str, int | None]] = Counter()
        for axis in axes:
            slot = uses[axis.tensor, axis.dim]
            uses[axis.tensor, axis.dim] += 1
            part = parts.get(axis.tensor)
            if part is None:
                self.axes.append(axis)
                at = len(self.axes) - 1, torch.arange(axis.blocks * axis.size)[:, None]
            else:
                at = self._of_vector(axis, part) if part.of_vector else self._of_row(axis, slot)
            self._at.append(at)

    def _of_vector(self, axis: Axis, part: Part) -> tuple[int, Tensor]:
        """An axis along the vector, and the elements at every position of that of the part."""
        elements = torch.arange(part.start, part.stop).reshape(part.shape)
        if axis.dim is None:
            elements = elements.reshape(-1, 1)
        else:
            blocks = elements.unflatten(0, (axis.blocks, -1)).movedim(axis.dim + 1, 1)
            elements = blocks.reshape(axis.blocks * axis.size, -1)
        size = self.shapes[part.whole].numel()
        self.axes.append(replace(axis, tensor=part.whole, dim=0, size=size, blocks=1))
        return len(self.axes) - 1, elements

    def _of_row(self, axis: Axis, slot: int) -> tuple[int, Tensor]:
        """The axis of the stack, and the position on it of every one of the part."""
        if axis.dim is None or axis.blocks > 1:
            raise Unsupported("a part of a stack with channels that no axis of the stack has")
        part = self.parts[axis.tensor]
        self._rows_of(part.whole)
        index = self._inside[part.whole].setdefault((axis.dim, slot), len(self.axes))
        if index == len(self.axes):
            blocks = self.shapes[part.whole][0]
            self.axes.append(replace(axis, tensor=part.whole, dim=axis.dim + 1, blocks=blocks))
        last_read = max(self.axes[index].last_read, axis.last_read)
        self.axes[index] = replace(self.axes[index], last_read=last_read)
        return index, (part.start * axis.size + torch.arange(axis.size))[:, None]

    def _rows_of(self, stack: str) -> int:
        """The axis along which the parts of a stack are."""
        if stack not in self._rows:
            self._rows[stack] = len(self.axes)
            self.axes.append(Axis(stack, 0, self.shapes[stack][0], "expert"))
        return self._rows[stack]

    def moved(self, group: Any) -> Any:
        """A group with its places on whole parameters."""
        places = [self._place(p) for p in group.placements]
        changes: dict[str, Any] = {}
        if isinstance(group, PermutationGroup):
            rows = [row for row in group.tensors if row[0] in self.parts]
            places += [p for row in rows for p in self._exchanged([self.parts[n] for n in row])]
            changes["tensors"] = tuple(row for row in group.tensors if row not in rows)
        name = self.parts[group.name].whole if group.name in self.parts else group.name
        return replace(group, name=name, placements=_joined(places), **changes)

    def _place(self, place: Placement) -> Placement:
        axis, elements = self._at[place.axis]
        return replace(place, axis=axis, positions=elements[place.positions].flatten(-2))

    def _exchanged(self, row: Sequence[Part]) -> Iterator[Placement]:
        """Where parts of one stack lie in it: as rows, and as blocks of what is inside."""
        at = torch.tensor([[part.start] for part in row])
        stack = row[0].whole
        yield Placement(self._rows_of(stack), at)
        for index in self._inside[stack].values():
            size = self.axes[index].size
            yield Placement(index, at * size + torch.arange(size))


def _joined(places: Sequence[Placement]) -> tuple[Placement, ...]:
    """Places on one axis as one."""
    together: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for place in places:
        together[place.axis, place.exponent].append(place.positions)
    joined = (Placement(a, torch.cat(at, -1), power) for (a, power), at in together.items())
    return tuple(sorted(joined, key=lambda place: place.axis))
