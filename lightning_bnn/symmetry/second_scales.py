"""Check that unit norms fix the scales of products, one after the other in the order of writers.

Where several groups of scalings act at one position, the norm of a row says something about one of
them only once the others are known. The least mass knows no order, and needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.symmetry.axis_actions import axis_permutation
from lightning_bnn.symmetry.elements import random_permutations
from lightning_bnn.symmetry.groups import Placement, ScalingGroup, Symmetries
from lightning_bnn.symmetry.mass_problem import axis_powers

__all__ = ["check_norms_fix_scales"]

_REFUSAL = (
    "`scaling` must be 'min-mass' or None for this network: products give it further scales, and "
    "unit norms do not fix them {}."
)
_ALIKE = "in the same way for all units that can be exchanged"


def check_norms_fix_scales(
    sym: Symmetries, writers: Sequence[tuple[int, Placement]], held: Sequence[Tensor] | None
) -> None:
    """Refuse norms of rows that do not fix all scales of products, or not one by one.

    Args:
        sym: what `discover` returned.
        writers: groups of scalings with the places whose norms are set, in the order of setting.
        held: for every group of scalings, the units whose scales matrices set.
    """
    if not sym.shared_axes:
        if _leave_out_units(sym):
            raise ValueError(_REFUSAL.format(_ALIKE))
        return
    sharing = [g for g, group in enumerate(sym.scalings) if _shares(sym, group)]
    masks = [torch.zeros(g.units, dtype=torch.bool) for g in sym.scalings] if held is None else held
    mixed = {g for g in range(len(sym.scalings)) if bool(masks[g].any())}
    known = {g for g in sharing if bool(masks[g].all())}
    place_of = dict(writers)
    for g in [g for g, _ in writers if g in sharing and g not in known]:
        beside = _acting_beside(sym, g, place_of[g])
        if place_of[g].meets_itself or not beside <= known:
            raise ValueError(_REFUSAL.format("one by one"))
        if beside & mixed:
            raise ValueError(_REFUSAL.format("beside matrices"))
        known.add(g)
    if not known.issuperset(sharing):
        raise ValueError(_REFUSAL.format("all"))
    if not _permutations_keep_groups(sym):
        raise ValueError(_REFUSAL.format(_ALIKE))


def _shares(sym: Symmetries, group: ScalingGroup) -> bool:
    return any(placement.axis in sym.shared_axes for placement in group.placements)


def _acting_beside(sym: Symmetries, group: int, placement: Placement) -> set[int]:
    """The other groups of scalings that act at the positions of a place."""
    here = placement.positions.unique()
    pairs = sym.placements_by_axis("scalings")[placement.axis]
    return {g for g, p in pairs if g != group and bool(torch.isin(p.positions, here).any())}


def _leave_out_units(sym: Symmetries) -> bool:
    """True if some of the units that can be exchanged have no scale, as others say it already."""
    permuted = sym.placements_by_axis("permutations")
    for axis, pairs in sym.placements_by_axis("scalings").items():
        scaled = torch.zeros(sym.axes[axis].blocks * sym.axes[axis].size, dtype=torch.bool)
        for _, placement in pairs:
            scaled[placement.positions.reshape(-1).cpu()] = True
        for _, placement in () if bool(scaled.all()) else permuted.get(axis, ()):
            inside = scaled[placement.positions.cpu()]
            if bool((inside.any(0) != inside.all(0)).any()):
                return True
    return False


def _permutations_keep_groups(sym: Symmetries) -> bool:
    """True if a permutation only changes places of scales: those of units that are one group."""
    generator = torch.Generator().manual_seed(0)
    orders = [
        torch.arange(group.units) if group.tensors else order
        for group, order in zip(sym.permutations, random_permutations(sym, generator), strict=True)
    ]
    before, after = (torch.zeros(sym.scaling_dof, dtype=torch.float64) for _ in range(2))
    permuted = sym.placements_by_axis("permutations")
    for axis in sym.placements_by_axis("scalings"):
        powers = axis_powers(sym, axis)
        marks = torch.randn(powers.shape[0], generator=generator, dtype=torch.float64)
        before += torch.from_numpy(powers.T @ marks.numpy())
        index = axis_permutation(sym, axis, orders) if axis in permuted else slice(None)
        moved = torch.zeros_like(marks)
        moved[index] = marks
        after += torch.from_numpy(powers.T @ moved.numpy())
    return torch.allclose(before.sort().values, after.sort().values, rtol=0, atol=1e-9)
