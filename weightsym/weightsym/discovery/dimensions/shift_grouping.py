"""From solved equations to groups of shifts: unknowns that act alike, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from weightsym.discovery.dimensions.hashing import mix
from weightsym.discovery.dimensions.shift_expressions import Expressions, Read, Solution
from weightsym.discovery.dimensions.values import Ints, distinct_rows, label_rows
from weightsym.groups.placements import Placement, Reader
from weightsym.groups.symmetries import Axis, ShiftGroup


class _Tensor(NamedTuple):
    """The unknowns of a parameter, by entry or along one of its dimensions."""

    name: str
    dim: int | None
    numbers: Tensor

    @property
    def size(self) -> int:
        """The number of unknown constants."""
        return self.numbers.numel()


class _Taker(NamedTuple):
    """A layer, the bias that absorbs its output, and the bias rows if they differ."""

    layer: Read
    bias: str
    rows: tuple[int, ...] | None


class Uses:
    """Constants that are added to parameters, and shifts that their entries absorb.

    Attributes:
        system: statements about numbers.
        shapes: of parameters, by name.
    """

    def __init__(self, system: Expressions) -> None:
        self.system = system
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, set[str]] = defaultdict(set)
        self._unknowns: dict[tuple[str, str], _Tensor] = {}
        self._reached: dict[str, Tensor] = {}
        self._taken = [np.zeros((0, 2), np.int64)]

    def note(self, name: str, role: str) -> None:
        """Note a role of a parameter. Nothing is added to parameters with several roles."""
        self._kinds[name].add(role)

    def entries(self, name: str, coords: tuple[Tensor, ...]) -> Tensor:
        """Return the unknowns of some entries of a parameter."""
        tensor = self._tensor(name, "entries", 0 if len(self.shapes[name]) == 1 else None)
        if name not in self._reached:
            self._reached[name] = torch.zeros(self.shapes[name], dtype=torch.bool)
        self._reached[name][coords] = True
        return tensor.numbers[coords]

    def columns(self, name: str, coords: tuple[Tensor, ...], dim: int) -> Tensor:
        """Return the unknowns that shift a matrix along one dimension of a view.

        Raises:
            ValueError: if the view is not the whole matrix.
        """
        shape = self.shapes[name]
        along = [[d for d, n in enumerate(c.shape) if n > 1] for c in coords]
        if len(shape) != 2 or any(c.numel() != n for c, n in zip(coords, shape, strict=True)):
            raise ValueError("a factor of a matrix")
        if along not in ([[0], [1]], [[1], [0]]):
            raise ValueError("a matrix of one row")
        position = along.index([dim])
        tensor = self._tensor(name, f"columns {position}", position)
        return tensor.numbers[coords[position]]

    def place(self, name: str, coords: tuple[Tensor, ...], out: int, groups: int) -> Read:
        """Locate a layer in its weight, whose view has outputs along dimension ``out``.

        Raises:
            ValueError: if it is not a block of rows of a matrix.
        """
        along = [[d for d, n in enumerate(c.shape) if n > 1] for c in coords]
        by_dim = {dims[0]: k for k, dims in enumerate(along) if dims}
        spare = [k for k, dims in enumerate(along) if not dims]
        if any(len(dims) > 1 for dims in along) or len(by_dim) + len(spare) < len(coords):
            raise ValueError("a factor that is not a matrix")
        dims = [by_dim[d] if d in by_dim else spare.pop(0) for d in (out, 1 - out)]
        rows, columns = (coords[k].reshape(-1).numpy() for k in dims)
        total, size = (self.shapes[name][k] for k in dims)
        blocks, used = groups, np.arange(groups)
        if groups == 1:
            step = int(np.gcd.reduce([rows[0], len(rows), total]))
            blocks, used = total // step, np.arange(rows[0], rows[0] + len(rows), step) // step
        in_order = np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
        if not in_order or (groups > 1 and (len(rows), len(columns)) != (total, size)):
            raise ValueError("the rows are reordered")
        positions = (
            np.arange(groups * size)[:, None] if groups > 1 else columns[:, None] + used * size
        )
        none = np.zeros(0, np.int64)
        return Read(name, dims[1], blocks, size, total, positions, rows, none, none)

    def _tensor(self, name: str, role: str, dim: int | None) -> _Tensor:
        self.note(name, role)
        if (name, role) not in self._unknowns:
            shape = self.shapes[name]
            sizes = [shape[dim]] if dim is not None else shape
            self._unknowns[name, role] = _Tensor(name, dim, self.system.fresh(*sizes))
        return self._unknowns[name, role]

    def take_up(self, bias: Tensor, outputs: Tensor) -> None:
        """Let parameter entries absorb the outputs that layers make of constants."""
        pairs = label_rows(bias, outputs)
        self._taken.append(pairs[pairs[:, 0] > 0])

    # -------------------------------------------------------------- what uses say together
    def solved(self) -> tuple[Solution, list[_Tensor], list[_Taker]]:
        """Solve the recorded equations."""
        self._hold()
        pairs = distinct_rows([*np.concatenate(self._taken).T])
        _, first, index = np.unique(pairs[:, 0], return_index=True, return_inverse=True)
        bias, outputs = torch.from_numpy(pairs[first]).T
        again = torch.from_numpy(pairs[:, 1])
        self.system.stop(self.system.combine(again, outputs[index], -1))  # at every use the same
        solution = Solution(self.system)
        tensors = list(self._unknowns.values())
        takers = self._takers(solution, bias.numpy(), outputs.numpy())
        solution.solve(np.concatenate(self.system.stops))
        return solution, tensors, takers

    def _hold(self) -> None:
        """Fix parameters with several roles, and treat rows beyond the example like the others."""
        taken = np.concatenate(self._taken)
        for (name, role), tensor in self._unknowns.items():
            if len(self._kinds[name]) > 1:
                self.system.stop(tensor.numbers)
                by_own = np.isin(taken[:, 0], tensor.numbers.numpy())
                self.system.stop(torch.from_numpy(taken[by_own, 1]))
            elif role == "entries":
                reached = self._reached[name]
                dims = [
                    d for d in range(reached.ndim)
                    if not torch.equal(reached.all(d), reached.any(d))
                ]  # fmt: skip
                if len(dims) == 1:
                    self.system.equate(tensor.numbers, dims)
                elif dims:
                    self.system.stop(tensor.numbers)

    def _takers(self, solution: Solution, bias: Ints, outputs: Ints) -> list[_Taker]:
        """Return the biases that absorb layer outputs, one row per entry."""
        layer_of, row_of, owner, index_of = np.full((4, self.system.count), -1)
        tensors = list(self._unknowns.values())
        for k, layer in enumerate(solution.reads):
            layer_of[layer.made], row_of[layer.made] = k, layer.rows
        for k, tensor in enumerate(tensors):
            flat = tensor.numbers.reshape(-1).numpy()
            owner[flat], index_of[flat] = k, np.arange(tensor.size)
        terms = solution.terms(outputs).tocoo()
        terms_at, columns = terms.coords
        takers = []
        for k, j in distinct_rows([owner[bias[terms_at]], layer_of[columns]]).tolist():
            chosen = (owner[bias[terms_at]] == k) & (layer_of[columns] == j)
            entries, rows = index_of[bias[terms_at[chosen]]], row_of[columns[chosen]]
            tensor, layer = tensors[k], solution.reads[j]
            once = len(np.unique(entries)) == len(entries) and bool((terms.data[chosen] == 1).all())
            in_place = np.array_equal(entries, rows) and tensor.size == layer.total
            if once and in_place and len(rows) == len(layer.rows):
                takers.append(_Taker(layer, tensor.name, None))
            elif once and len(entries) == tensor.size:
                by_entry = dict(zip(entries.tolist(), rows.tolist(), strict=True))
                takers.append(
                    _Taker(layer, tensor.name, tuple(by_entry[e] for e in range(tensor.size)))
                )
            else:
                self.system.stop(torch.from_numpy(layer.incoming))
        return takers


# ------------------------------------------------------------ groups
_Action: TypeAlias = tuple[int, str | None, tuple[int, ...] | None, int]
"""An axis, the bias that takes up what is added along it with its rows, or None, and how often."""


def groups_of_shifts(uses: Uses, axes: list[Axis]) -> Iterator[ShiftGroup]:
    """Group free unknowns that act alike at different positions, and append new axes."""
    solution, tensors, takers = uses.solved()
    actions: dict[_Action, int] = {}
    places = [np.zeros((3, 0), np.int64)]
    owner = np.full(solution.count, -1)

    def act(
        numbers: Ints, positions: Ints, axis: Axis, bias: str | None = None,
        rows: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        added = solution.of(numbers).tocoo()
        number = _number_of(axes, axis) if added.nnz else 0
        for times in np.unique(added.data).tolist():
            action = actions.setdefault((number, bias, rows, times), len(actions))
            entries, v = (x[added.data == times] for x in added.coords)
            columns = (v[:, None], np.array([[action]]), positions[entries])
            places.append(np.stack([x.ravel() for x in np.broadcast_arrays(*columns)]))

    for k, tensor in enumerate(tensors):
        numbers = tensor.numbers.reshape(-1).numpy()
        owner[numbers] = k
        role = "bias" if len(uses.shapes[tensor.name]) == 1 else "raw"
        column = np.arange(tensor.size)[:, None]
        act(numbers, column, Axis(tensor.name, tensor.dim, tensor.size, role))
    for layer, bias, rows in takers:
        axis = Axis(layer.weight, layer.dim, layer.size, "in", layer.blocks)
        act(layer.incoming, layer.positions, axis, bias, rows)
    every = np.concatenate(places, 1)
    for first, columns in _alike(every[:, owner[every[0]] >= 0], list(actions)):
        yield _group(tensors[owner[first]].name, columns, axes)


def _alike(places: Ints, actions: Sequence[_Action]) -> Iterator[tuple[int, dict[_Action, Tensor]]]:
    """Yield the first of the unknowns that act alike, and their positions by action, one per row.

    Args:
        places: unknowns, the numbers of actions, and positions, in three rows.
        actions: those that have the numbers.
    """
    v, action, position = places[:, np.lexsort(places[::-1])]
    members, first, inverse = np.unique(v, return_index=True, return_inverse=True)
    digest = np.zeros(len(members), np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(digest, inverse, mix(action))
    _, start = np.unique(digest, return_index=True)
    for k in np.sort(start).tolist():
        span = action[inverse == k]
        table = position[first[digest == digest[k]][:, None] + np.arange(len(span))]
        columns = {actions[a]: torch.from_numpy(table[:, span == a]) for a in np.unique(span)}
        yield int(members[k]), columns


def _number_of(axes: list[Axis], wanted: Axis) -> int:
    """Return the index of an axis, which is appended if missing."""
    for k, axis in enumerate(axes):
        if replace(axis, role=wanted.role, last_read=wanted.last_read) == wanted:
            return k
    axes.append(wanted)
    return len(axes) - 1


def _group(name: str, columns: Mapping[_Action, Tensor], axes: list[Axis]) -> ShiftGroup:
    """Build the group of some unknowns from the positions of each of their actions."""
    added, readers = [], []
    for (axis, bias, rows, times), positions in columns.items():
        placement = Placement(axis, positions, times)
        if bias is None:
            added.append(placement)
        else:
            readers.append(Reader(placement, bias, None if rows is None else torch.tensor(rows)))
    added.sort(key=lambda p: (axes[p.axis].tensor, p.exponent) != (name, 1))
    return ShiftGroup(len(next(iter(columns.values()))), name, tuple(added), tuple(readers))
