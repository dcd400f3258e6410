"""Signs of units: those that training seldom changes, and those that fit a reference."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.params import Params, is_weight
from lightning_bnn.symmetry.actions import multiply
from lightning_bnn.symmetry.canonical import canonical_scales_and_signs
from lightning_bnn.symmetry.groups import SignGroup, Symmetries
from lightning_bnn.symmetry.placements import Placement
from lightning_bnn.symmetry.units import unit_rows

__all__ = ["fitted_signs", "gain_signs", "steady_signs"]

_SWEEPS = 5


def steady_signs(params: Params, sym: Symmetries) -> list[Tensor]:
    """Signs that make gains positive, and elsewhere those of canonical forms.

    The largest weight of a unit may be another one after training; gains that begin at one stay
    positive.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
    """
    signs = gain_signs(params, sym)
    _, others = canonical_scales_and_signs(multiply(params, sym, {"signs": signs}), sym, None)
    return [
        sign if _gain(sym, group) is not None else other
        for group, sign, other in zip(sym.signs, signs, others, strict=True)
    ]


def gain_signs(params: Params, sym: Symmetries) -> list[Tensor]:
    """Signs that make gains positive, one where no gain tells.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
    """
    places = [_gain(sym, group) for group in sym.signs]
    return [
        torch.ones(group.units)
        if placement is None
        else _sign(unit_rows(params, sym, placement)[..., 0])
        for placement, group in zip(places, sym.signs, strict=True)
    ]


def fitted_signs(params: Params, reference: Params, sym: Symmetries) -> Params:
    """The same functions with the signs that bring units closest to those of a reference.

    One group after the other takes the signs that suit the rest, until none changes: every step
    lowers the distance.

    Args:
        params: one network or a stack.
        reference: one network, whose units stand in the same order.
        sym: what `discover` returned.
    """
    for _ in range(_SWEEPS):
        moved = False
        for k, group in enumerate(sym.signs):
            sign = _sign(_similarity(params, reference, sym, group))
            if bool((sign < 0).any()):
                every = [torch.ones(g.units) for g in sym.signs]
                every[k], moved = sign, True
                params = multiply(params, sym, {"signs": every})
        if not moved:
            break
    return params


def _gain(sym: Symmetries, group: SignGroup) -> Placement | None:
    """The numbers of a norm that tell the sign of each unit, if no other group changes them."""
    for placement in group.placements:
        on_axis = sym.placements_by_axis("signs")[placement.axis]
        if sym.axes[placement.axis].role.startswith("gain") and placement.positions.shape[1] == 1:
            return placement if len(on_axis) == 1 else None
    return None


def _similarity(params: Params, reference: Params, sym: Symmetries, group: SignGroup) -> Tensor:
    """Inner products of units with those of a reference, over all weights that they flip."""
    total = torch.zeros(group.units, dtype=torch.float64)
    for placement in group.placements:
        name = sym.axes[placement.axis].tensor
        if is_weight(name, params[name]) and placement.exponent % 2:
            rows = (unit_rows(p, sym, placement).double() for p in (params, reference))
            total = total + (next(rows) * next(rows)).sum(-1)
    return total


def _sign(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0)
