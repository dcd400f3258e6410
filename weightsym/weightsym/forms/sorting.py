"""The permutations that sort the units of every group.

Units are compared by one number. If those of two units agree up to rounding, all numbers of the
units are compared, tensor by tensor in graph order: incoming weights, biases, gains, outgoing
weights. These are sorted by size, then in the order of the layer on the other side if that is
known. Units that agree in all of them keep their order: the result is the same for every permuted
copy of a network in which such units are exchangeable, as copies of each other are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from weightsym.forms.counting import count_ranks, dense_ranks
from weightsym.groups.axis_maps import permute_axis
from weightsym.groups.element import axis_index
from weightsym.groups.symmetries import PermutationGroup, Placement, Symmetries, incidence
from weightsym.groups.units import (
    STATISTICS,
    by_kernel,
    common_weight,
    reader,
    statistic,
    twin_places,
    unit_rows,
    writer,
)
from weightsym.groups.validation import check_finite, check_params
from weightsym.networks.devices import kept_on
from weightsym.params import Params, is_stacked

SortKey = Literal["max", "first", "mean", "median", "norm", "outgoing"]
_POOLED: dict[SortKey, SortKey] = {"first": "max", "outgoing": "max"}
_ROUNDING = 16  # units in the last place


def sort_permutations(
    params: Params,
    sym: Symmetries,
    by: SortKey = "max",
    descending: bool = True,
    *,
    held: Collection[int] = (),
) -> list[Tensor]:
    r"""Return permutations that sort the units of every group.

    .. math:: k_{p(1)} \geq k_{p(2)} \geq \dots \geq k_{p(n)}

    Args:
        params: one network or a stack.
        sym: result of `discover`.
        by: statistic of the weights that enter a unit: their ``"max"``, ``"mean"``, ``"median"``,
            ``"norm"`` or the ``"first"`` of them (once the layer before is sorted); or
            ``"outgoing"``, the first weight that leaves the unit, once the layer behind is sorted.
            Blocks are sorted by the same statistic over the whole block; of channels and heads of
            which each contains a part of each other (grouped queries), one has no first weight
            before the other is sorted: it is sorted by the largest.
        descending: largest first.
        held: indices of groups whose units are not sorted.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, permute, sort_permutations
    >>> net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> w = P.of(net) | {"0.weight": torch.tensor([[1.0], [3.0], [2.0]])}
    >>> sym = discover(net, torch.randn(8, 1))
    >>> permute(w, sym, sort_permutations(w, sym, "max"))["0.weight"].tolist()
    [[3.0], [2.0], [1.0]]
    """
    if by not in get_args(SortKey):
        raise ValueError(f"`by` must be one of {', '.join(get_args(SortKey))}, got {by!r}.")
    check_params(params, sym)
    check_finite(params, sym)
    lead = (next(iter(params.values())).shape[0],) if is_stacked(params, sym.shapes) else ()
    device = next(iter(params.values())).device
    orders = [torch.arange(g.units, device=device).expand(*lead, g.units) for g in sym.permutations]
    state, crossing = _State(params, sym, orders, set()), crossing_groups(sym)
    for index in _sequence(sym, backwards=by == "outgoing"):
        used = by if crossing[index] <= state.done else _POOLED.get(by, by)
        key = state.key(index, used)
        if key is not None and index not in held:
            places = state.places(index, key, descending)
            orders[index] = places.argsort(dim=-1, stable=True)
        state.done.add(index)
    return orders


@lru_cache(maxsize=8)
def _sequence(sym: Symmetries, backwards: bool) -> list[int]:
    """Return groups in graph order, or from the last layer.

    Blocks follow the channels by which they are compared, and precede the other channels inside
    them, whose first weight may lie in any block.
    """

    def placement(g: int) -> Placement | None:
        group = sym.permutations[g]
        return (reader(sym, group) if backwards else None) or writer(sym, group)

    def depth(g: int) -> int:
        placement = reader(sym, sym.permutations[g]) if backwards else None
        first = _first_axis(sym, sym.permutations[g])
        if (
            placement is None
        ):  # from the last layer: channels that no layer reads are behind all others
            is_last = backwards and sym.permutations[g].kind == "channel"
            return first - is_last * 2 * max(len(sym.axes), *(a.last_read for a in sym.axes))
        return -sym.axes[placement.axis].last_read

    def compared(g: int, member: int) -> bool:
        position = placement(g)
        return position is not None and any(
            p.axis == position.axis for p in sym.permutations[member].placements
        )

    def visit(g: int) -> list[int]:
        inside = sorted((m for row in sym.permutations[g].inner for m in row), key=depth)
        first = [m for m in inside if compared(g, m)]
        others = [m for m in inside if m not in first]
        return [*(k for m in first for k in visit(m)), g, *(k for m in others for k in visit(m))]

    inner = {g for group in sym.permutations for row in group.inner for g in row}
    outermost = (g for g in range(len(sym.permutations)) if g not in inner)
    return [k for g in sorted(outermost, key=depth) for k in visit(g)]


def _first_axis(sym: Symmetries, group: PermutationGroup) -> int:
    """Return the first axis, in graph order, that a group moves, alone or with its tensor."""
    moved = {name for row in group.tensors for name in row}
    axes = [placement.axis for placement in group.placements[:1]]
    axes += [k for k, axis in enumerate(sym.axes) if axis.tensor in moved and not axes][:1]
    return min(axes, default=0)


@lru_cache(maxsize=8)
def _around(sym: Symmetries) -> list[set[int]]:
    """Return the enclosing blocks of every group."""
    around: list[set[int]] = [set() for _ in sym.permutations]
    for g in reversed(range(len(sym.permutations))):
        for row in sym.permutations[g].inner:
            for member in row:
                around[member] |= {g, *around[g]}
    return around


@lru_cache(maxsize=8)
def crossing_groups(sym: Symmetries) -> list[set[int]]:
    """Return groups that split the units of each other, so that either order depends on both."""
    around = _around(sym)
    crossing: list[set[int]] = [set() for _ in sym.permutations]
    acts = incidence(sym.axes, sym.permutations, [np.zeros(g.units, int) for g in sym.permutations])
    for g, h in zip(*(acts.T @ acts).nonzero(), strict=True):
        if g != h and g not in around[h] and h not in around[g]:
            crossing[g].add(int(h))
    return crossing


# ------------------------------------------------------------ comparing units
@dataclass(frozen=True, eq=False)
class _State:
    """A network or a stack, the current orders of its units, and the sorted groups."""

    params: Params
    sym: Symmetries
    orders: list[Tensor]
    done: set[int]

    def key(self, index: int, by: SortKey) -> Tensor | None:
        """Return the number by which units are sorted, or None without incoming weights."""
        sym, group = self.sym, self.sym.permutations[index]
        reading = reader(sym, group) if by == "outgoing" else None
        placement = reading or writer(sym, group)
        placement = placement or (None if group.tensors else reader(sym, group))
        if placement is None:
            return self._of_tensors(group, by) if group.tensors else None
        if len(twin_places(sym, group, placement)) > 1:
            weight = common_weight(self.params, sym, group, placement)
            return statistic(self.params, sym, placement, _POOLED.get(by, by), weight)  # type: ignore[arg-type]
        if by == "first" or reading is not None:
            return self._first(index, placement)
        return statistic(self.params, sym, placement, "max" if by == "outgoing" else by)

    def _first(self, index: int, placement: Placement) -> Tensor:
        """Return the first weight of every unit, in the order of the sorted axes."""
        return unit_rows({}, self.sym, placement, self._in_order(index, placement))[..., 0]

    def _in_order(self, index: int, placement: Placement) -> Tensor:
        """Return the tensor of a placement with all axes in order, except those of some units.

        Enclosing blocks would move the units, and with row blocks also their inputs.
        """
        sym, axis = self.sym, self.sym.axes[placement.axis]
        w, moved = self.params[axis.tensor], sym.placements_by_axis("permutations")
        axes = [a for a in sym.axes_of[axis.tensor] if a in moved]
        blocks = any(sym.axes[a].blocks > 1 for a in axes)
        for a in axes:
            still = {index} | (_around(sym)[index] if blocks or a == placement.axis else set())
            pairs = [(p, self.orders[g]) for g, p in moved[a] if g not in still]
            order = axis_index(sym.axes[a], pairs)
            if order is not None:
                w = permute_axis(w, sym.axes[a], order, w.ndim - len(sym.shapes[axis.tensor]))
        return w

    def _of_tensors(self, group: PermutationGroup, by: SortKey) -> Tensor:
        """Return a statistic of the largest tensors of every block with tensors of its own."""
        row = max(group.tensors, key=lambda names: self.sym.shapes[names[0]].numel())
        weights = [self.params[name] for name in row]
        flat = [w.flatten(w.ndim - len(self.sym.shapes[row[0]])) for w in weights]
        rows = torch.stack(flat, -2)
        return STATISTICS.get(by, STATISTICS["max"])(rows)

    def places(self, index: int, key: Tensor, descending: bool) -> Tensor:
        """Return the rank of every unit by its key, and by all of its values in a tie."""
        places = _ranks(-key if descending else key)
        for placement in self.sym.permutations[index].placements:
            if self.sym.axes[placement.axis].tensor not in self.params:
                continue
            for rows in self._numbers(index, placement):
                several = count_ranks(places).gather(-1, places) > 1
                members = several.any(-1)
                tied = several[members].any(0).nonzero()[:, 0]
                if not len(tied):
                    return places
                new, finer = _places_of_rows(*rows(tied, members)), torch.zeros_like(places)
                finer[..., tied] = finer[..., tied].masked_scatter(
                    members[..., None], new.max() - new if descending else new
                )
                places = _ranks(places * (finer.max() + 1) + finer)
        return places

    def _numbers(
        self, index: int, placement: Placement
    ) -> Iterator[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """Yield functions that return values of units and members in one tensor, and a resolution.

        A mask selects the members.
        """
        sym, group = self.sym, self.sym.permutations[index]
        twins = len(twin_places(sym, group, placement)) > 1  # in no order: they may change places
        weight = common_weight(self.params, sym, group, placement) if twins else None

        def rows_of(units: Tensor, members: Tensor, w: Tensor | None = weight) -> Tensor:
            positions = kept_on(placement.positions, units.device)[units]
            return unit_rows(self.params, sym, replace(placement, positions=positions), w)[members]

        def sizes(units: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
            rows = by_kernel(rows_of(units, members), sym, placement).sort(-2).values.flatten(-2)
            return rows, _rounding(rows) * rows.abs().amax((-1, -2))

        def in_order(units: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
            rows = rows_of(units, members, self._in_order(index, placement))
            return rows, _rounding(rows) * rows.abs().amax((-1, -2))

        yield sizes
        if not twins and self._is_ordered(index, placement):
            yield in_order

    def _is_ordered(self, index: int, placement: Placement) -> bool:
        """Return whether the other side of a tensor is already sorted and not a block."""
        moved = self.sym.placements_by_axis("permutations")
        others = [a for a in self.sym.axes_of[self.sym.axes[placement.axis].tensor] if a in moved]
        groups = {g for a in others if a != placement.axis for g, _ in moved[a]}
        blocks = any(self.sym.axes[a].blocks > 1 for a in (*others, placement.axis))
        return not blocks and index not in groups and groups <= self.done


def _ranks(key: Tensor) -> Tensor:
    """Return the rank of every unit among the keys that are distinct up to rounding."""
    return dense_ranks(key, _rounding(key) * key.abs().amax(-1, keepdim=True))


def _rounding(numbers: Tensor) -> float:
    """Return the relative difference above which two numbers are distinct."""
    return _ROUNDING * torch.finfo(numbers.dtype).eps if numbers.is_floating_point() else 0.0


def _places_of_rows(rows: Tensor, within: Tensor) -> Tensor:
    """Return lexicographic ranks of rows, for all members of a stack at once.

    Entries are compared within their column: a million entries of a whole tensor are closer
    together than rounding.
    """
    numbers = dense_ranks(rows.transpose(-1, -2), within[..., None, None]).transpose(-1, -2)
    _, places = torch.unique(numbers.flatten(0, -2), dim=0, return_inverse=True)
    return places.reshape(rows.shape[:-1])
