"""The similarity of two networks at soft permutations: value and slopes, kept along a way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.groups import Placement
from lightning_bnn.symmetry.matching.relaxation import Relaxation

__all__ = ["Similarity", "Tangent", "inner"]

Part = tuple[Tensor, Mapping[int, Sequence[Tensor]]]
"""Of one tensor what stands still, and by axis one matrix of slopes for each piece."""


@dataclass(frozen=True, eq=False)
class Tangent:
    """Value and slopes of a similarity somewhere.

    Attributes:
        value: of every member.
        gradients: by the matrices of all tables.
        parts: by tensor, what both are made of.
    """

    value: Tensor
    gradients: list[Tensor]
    parts: Mapping[str, Part]

    def of(self, rows: Tensor) -> Tangent:
        """The same for some of the members."""
        if bool(rows.all()):
            return self
        parts = {
            name: (still[rows], {axis: [s[rows] for s in own] for axis, own in slopes.items()})
            for name, (still, slopes) in self.parts.items()
        }
        return Tangent(self.value[rows], [g[rows] for g in self.gradients], parts)


@dataclass(frozen=True, eq=False)
class Similarity:
    """The similarity of a stack with a reference, at one matrix for every table or one order.

    Attributes:
        relaxation: of the symmetries of the network.
        params: the stack, in single or double precision.
        reference: one network.
        goals: the weights of its units by the keys of their views, as they are needed.
    """

    relaxation: Relaxation
    params: Params
    reference: Params
    goals: dict[int, Tensor] = field(default_factory=dict)

    def of(self, rows: Tensor) -> Similarity:
        """The same for some of the members."""
        if bool(rows.all()):
            return self
        return replace(self, params={n: w[rows] for n, w in self.params.items()})

    def value(self, at: Sequence[Tensor]) -> Tensor:
        """Of every member, without slopes."""
        return self.relaxation.value_at(self.params, self.reference, at)

    def tangent(self, at: Sequence[Tensor]) -> Tangent:
        """Value and slopes, from the weights."""
        return self._whole({name: self._part(name, at) for name in self.relaxation.pieces}, at)

    def between(
        self, here: Tangent, corner: Tangent, share: Tensor, at: Sequence[Tensor]
    ) -> Tangent:
        """Value and slopes on the way from one point to another.

        What stands still of a tensor, and its slopes, are linear in the matrices along its other
        axis, if it has no more than one other: then both ends tell.

        Args:
            here: at the start.
            corner: at the end.
            share: of the way, for every member.
            at: the matrices there.
        """
        parts: dict[str, Part] = {}
        for name, (still, slopes) in here.parts.items():
            if len(slopes) > 2:
                parts[name] = self._part(name, at)
                continue
            last, ends = corner.parts[name]
            parts[name] = (
                still.lerp(last, share),
                {
                    axis: [_lerp(a, b, share) for a, b in zip(own, ends[axis], strict=True)]
                    for axis, own in slopes.items()
                },
            )
        return self._whole(parts, at)

    def _part(self, name: str, at: Sequence[Tensor]) -> Part:
        still: Tensor | None = None
        slopes: dict[int, list[Tensor]] = {}
        for axis, pieces in self.relaxation.pieces[name].items():
            w = self.params[name]
            for other in self.relaxation.pieces[name]:
                w = w if other == axis else self.relaxation.moved(w, name, other, at)
            slopes[axis] = [self._slope(w, place) for _, place in pieces]
            if still is None:
                still = (w * self.reference[name].to(w)).flatten(1).sum(1, dtype=torch.float64)
                for slope in slopes[axis]:
                    still -= slope.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64)
        assert still is not None
        return still.cpu(), slopes

    def _slope(self, w: Tensor, place: Placement) -> Tensor:
        """Inner products of the units at a place of the reference and of every member."""
        view = self.relaxation.plan.view(place)
        if view.key not in self.goals:
            self.goals[view.key] = view.rows(self.reference[view.tensor].to(w)[None])[0]
        return self.goals[view.key] @ view.rows(w).mT

    def _whole(self, parts: Mapping[str, Part], at: Sequence[Tensor]) -> Tangent:
        value = torch.stack([still for still, _ in parts.values()]).sum(0)
        like = next(iter(self.params.values()))
        units = [table.units for table in self.relaxation.tables]
        gradients = [like.new_zeros(len(like), n, n) for n in units]
        for name, (_, slopes) in parts.items():
            for number, (axis, pieces) in enumerate(self.relaxation.pieces[name].items()):
                for (k, _), slope in zip(pieces, slopes[axis], strict=True):
                    gradients[k] += slope
                    if number == 0:
                        value += inner(at[k], slope)
        return Tangent(value, gradients, parts)


def _lerp(a: Tensor, b: Tensor, share: Tensor) -> Tensor:
    return a.lerp(b, share.to(a)[:, None, None])


def inner(at: Tensor, slope: Tensor) -> Tensor:
    """Inner product of slopes with matrices, or with those of orders, of every member."""
    if at.is_floating_point():
        return (at * slope).sum((1, 2), dtype=torch.float64).cpu()
    return slope.gather(2, at.to(slope.device)[:, :, None]).sum((1, 2), dtype=torch.float64).cpu()
