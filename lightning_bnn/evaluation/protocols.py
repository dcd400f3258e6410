"""Protocols by which symmetries are removed from posteriors before they are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.metrics.remembered_mmd import RowTransform
from weightsym import Element, Group, SortKey, Symmetries, discover, plan_removal
from weightsym.params import Params


@dataclass(frozen=True)
class Protocol:
    """A selection of symmetries, and the way to remove them.

    Attributes:
        about: one sentence for tables.
        sort_by: what units are sorted by, in descending order, once their norm is one.
        as_released: leave residual streams, blocks of channels and signs as they are, and also
            give unit norm to weights before a BatchNorm, whose scale is free.
        pools: also measure all networks pooled, regardless of their modes, as P1 does.
    """

    about: str
    sort_by: SortKey
    as_released: bool = False
    pools: bool = False

    def remover(self, model: nn.Module, *example: Any) -> Remover:
        """Return a remover of these symmetries for networks of one architecture.

        Args:
            model: one of them.
            *example: its inputs.
        """
        sym = discover(model, *example)
        if not self.as_released:
            return Remover(sym, frozenset(), self.sort_by)
        return Remover(inner_symmetries(sym), before_norm(sym), self.sort_by)


@dataclass(frozen=True)
class Remover:
    """Removes symmetries from stacks.

    Attributes:
        symmetries: those that are removed.
        free: layers that get unit norm as well.
        sort_by: what units are sorted by.
    """

    symmetries: Symmetries
    free: frozenset[str]
    sort_by: SortKey

    def __call__(self, networks: Params | Iterable[Params]) -> RowTransform:
        """Return the elements that lead to the representatives, for `Transformed`."""
        plan = plan_removal(networks, self.symmetries, "unit-norm", self.sort_by)
        return _UnitRows(plan, self.free) if self.free else plan.rows


PROTOCOLS = {
    "full": Protocol(
        "all symmetries that were found are removed: signs, unit norms, units sorted by their "
        "largest weight",
        "max",
    ),
    "p1": Protocol(
        "as in P1's code: unit norms (before BatchNorm, too), |gain| after BatchNorm, units sorted "
        "by their first weight; residual streams and blocks of channels stay in their order",
        "first",
        as_released=True,
        pools=True,
    ),
}


@dataclass(frozen=True)
class _UnitRows:
    """Removal of symmetries and of row norms before a BatchNorm, which cancels them."""

    plan: Element
    names: frozenset[str]

    def __call__(self, name: str, values: Tensor, rows: slice) -> Tensor:
        values = self.plan.rows(name, values, rows)
        if name not in self.names:
            return values
        norms = values.flatten(2).norm(dim=2).clamp_min(torch.finfo(values.dtype).tiny)
        return values / norms.reshape(*norms.shape, *(1,) * (values.ndim - 2))


def before_norm(sym: Symmetries) -> frozenset[str]:
    """Return the weights of free scale, since a BatchNorm follows and cancels it.

    Such a layer writes channels that have statistics, and carries none of their scales itself.

    Args:
        sym: what `discover` returned.
    """
    normed = [
        [sym.axes[placement.axis] for placement in group.placements]
        for group in sym.permutations
        if any(sym.axes[placement.axis].role == "variance" for placement in group.placements)
    ]
    carrying = {
        sym.axes[placement.axis].tensor
        for group in sym.scalings
        for placement in group.placements
        if sym.axes[placement.axis].role == "out"
    }
    writers = {axis.tensor for axes in normed for axis in axes if axis.role == "out"}
    return frozenset(name for name in writers - carrying if len(sym.shapes[name]) > 1)


def inner_symmetries(sym: Symmetries) -> Symmetries:
    """Select permutations and scales of units that one layer writes, without blocks and signs.

    Args:
        sym: what `discover` returned.
    """
    groups = tuple(g for g in sym.permutations if g.kind != "block" and _one_writer(sym, g))
    alone = tuple(dataclasses.replace(group, inner=()) for group in groups)
    scalings = tuple(group for group in sym.scalings if _one_writer(sym, group))
    return dataclasses.replace(sym, permutations=alone, scalings=scalings, signs=())


def _one_writer(sym: Symmetries, group: Group) -> bool:
    axes = [sym.axes[placement.axis] for placement in group.placements]
    return all(
        len({axis.tensor for axis in axes if axis.role == role}) <= 1 for role in ("out", "gain")
    )
