"""How far outputs move with the weights at each place of a group: by one derivative for all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from weightsym.groups.actions import along_axis
from weightsym.groups.placements import LinearGroup, Placement, ShiftGroup
from weightsym.groups.symmetries import Group, PermutationGroup, Symmetries

Place = Placement | str
"""Positions along an axis, or a whole tensor."""
KINDS = ("permutations", "scalings", "signs", "linear", "shifts")


def places_of(sym: Symmetries) -> Iterator[Place]:
    """All places that groups move, without biases that nothing sees."""
    dead: dict[str, Tensor] = {}
    for placement in (p for group in sym.shifts if group.is_dead for p in group.placements):
        name, mask = tensor_at(placement, sym), _numbers_at(placement, sym)
        dead[name] = dead[name] | mask if name in dead else mask
    for place in (p for kind in KINDS for group in getattr(sym, kind) for p in places_in(group)):
        unfelt = None if isinstance(place, str) else dead.get(tensor_at(place, sym))
        if unfelt is None or bool((_numbers_at(place, sym) & ~unfelt).any()):
            yield place


def _numbers_at(place: Place, sym: Symmetries) -> Tensor:
    """True at the numbers of a tensor that are at a place."""
    assert not isinstance(place, str)
    axis = sym.axes[place.axis]
    chosen = torch.zeros(axis.length, dtype=torch.bool)
    chosen[place.positions.reshape(-1).cpu()] = True
    return axis.spread(chosen, sym.shapes[axis.tensor]).expand(sym.shapes[axis.tensor])


def places_in(group: Group | LinearGroup | ShiftGroup) -> Iterator[Place]:
    """All places that a group moves."""
    if isinstance(group, PermutationGroup):
        yield from (name for row in group.tensors for name in row)
    yield from group.placements


def tensor_at(place: Place, sym: Symmetries) -> str:
    """The name of the tensor that has a place."""
    return place if isinstance(place, str) else sym.axes[place.axis].tensor


class OutputMoves:
    r"""How far a random sum of the outputs moves where weights do.

    .. math:: s_P = \Big( \sum_{i \in P} \big( w_i \, \partial_i
        \sum_k r_k f_k(w) / |f| \big)^2 \Big)^{1/2}

    Args:
        run: from how weights are read to outputs.
        read: how they are read, in memory of their own.
        sym: the groups.
        sizes: of outputs, by tensor; those of size 0 do not count.
        fixed: tensors of which there is no derivative, such as statistics. They count as moving it.
    """

    def __init__(
        self,
        run: Callable[[Callable[[str], Tensor]], list[Tensor]],
        read: Callable[[str], Tensor],
        sym: Symmetries,
        sizes: Sequence[float],
        fixed: Collection[str] = (),
    ) -> None:
        self._sym, self._fixed = sym, fixed
        self._squares: dict[str, dict[int | None, Tensor]] = {}
        leaves: dict[str, Tensor] = {}
        groups = (group for kind in KINDS for group in getattr(sym, kind))
        moved = {tensor_at(place, sym) for group in groups for place in places_in(group)} - {*fixed}

        def leaf(name: str) -> Tensor:
            if name not in leaves:
                leaves[name] = read(name)
                if name in moved and leaves[name].is_floating_point():
                    hook = functools.partial(self._note, name)
                    leaves[name].requires_grad_().register_post_accumulate_grad_hook(hook)
            return leaves[name]

        with torch.enable_grad():
            pairs = [(t, s) for t, s in zip(run(leaf), sizes, strict=True) if t.requires_grad and s]
            if pairs:
                weights = _directions(pairs)
                of = [t for t in leaves.values() if t.requires_grad]
                torch.autograd.backward([t for t, _ in pairs], weights, inputs=of)

    def _note(self, name: str, t: Tensor) -> None:
        """Keep the squares of derivatives, times weights, by position on every axis."""
        assert t.grad is not None
        with torch.no_grad():
            moves = t.grad if t.grad.dtype.itemsize > 2 else t.grad.float()
            moves = moves.mul_(t).square_()
            kept: dict[int | None, Tensor] = {None: moves.sum()}
            for a in self._sym.axes_of.get(name, ()):
                rows = along_axis(moves, self._sym.axes[a], 0)
                kept[a] = (rows.flatten(0, -2).sum(0) if rows.ndim > 1 else rows.clone()).cpu()
        self._squares[name] = kept
        t.grad = None

    def at(self, place: Place) -> float:
        """How far it moves with the weights at a place."""
        kept = self._squares.get(tensor_at(place, self._sym))
        if kept is None:
            return 1.0 if tensor_at(place, self._sym) in self._fixed else 0.0
        if isinstance(place, str):
            return math.sqrt(float(kept[None]))
        return math.sqrt(float(kept[place.axis].double()[place.positions.flatten().cpu()].sum()))

    def without_any(self, axis: int) -> Tensor:
        """The positions of an axis with which it does not move, in a row of True and False."""
        kept = self._squares.get(self._sym.axes[axis].tensor)
        if kept is None:
            is_fixed = self._sym.axes[axis].tensor in self._fixed
            return torch.full((self._sym.axes[axis].length,), not is_fixed)
        return kept[axis] == 0


def _directions(pairs: Sequence[tuple[Tensor, float]]) -> list[Tensor]:
    """Random weights of outputs, as many times smaller as these are large, and together."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(t.shape, generator=generator, dtype=torch.float64) for t, _ in pairs]
    return [
        (r / (size * math.sqrt(t.numel()))).to(t) for r, (t, size) in zip(draws, pairs, strict=True)
    ]
