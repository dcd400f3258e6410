"""How posteriors are freed of symmetries before they are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_bnn.params import Params
from lightning_bnn.symmetry import Removal, Symmetries, discover, plan_removal
from lightning_bnn.symmetry.canonical import SortKey
from lightning_bnn.symmetry.groups import Group

__all__ = ["PROTOCOLS", "Protocol", "inner_symmetries"]


@dataclass(frozen=True)
class Protocol:
    """What is removed, and how.

    Attributes:
        about: one sentence for tables.
        sort_by: what units are sorted by, in descending order, once their norm is one.
        inner_only: leave residual streams and blocks of channels as they are.
    """

    about: str
    sort_by: SortKey
    inner_only: bool

    def symmetries(self, model: nn.Module, *example: Any) -> Symmetries:
        """Those that are removed."""
        found = discover(model, *example)
        return inner_symmetries(found) if self.inner_only else found

    def removal(self, networks: Params | Iterable[Params], sym: Symmetries) -> Removal:
        """The group elements that lead to the representatives."""
        return plan_removal(networks, sym, "unit-norm", self.sort_by)


PROTOCOLS = {
    "full": Protocol(
        "all symmetries that were found are removed: signs, unit norms, units sorted by their "
        "largest weight",
        "max",
        False,
    ),
    "p1": Protocol(
        "as in P1's code: unit norms, |gain| after BatchNorm, units sorted by their first weight; "
        "residual streams and blocks of channels stay as they are",
        "first",
        True,
    ),
}


def inner_symmetries(sym: Symmetries) -> Symmetries:
    """Permutations and scales of units that one layer writes; no blocks, no signs.

    Args:
        sym: what `discover` returned.
    """
    kept = tuple(g for g in sym.permutations if g.kind != "block" and _one_writer(sym, g))
    alone = tuple(dataclasses.replace(group, inner=()) for group in kept)
    scalings = tuple(group for group in sym.scalings if _one_writer(sym, group))
    return dataclasses.replace(sym, permutations=alone, scalings=scalings, signs=())


def _one_writer(sym: Symmetries, group: Group) -> bool:
    axes = [sym.axes[place.axis] for place in group.placements]
    return all(
        len({axis.tensor for axis in axes if axis.role == role}) <= 1 for role in ("out", "gain")
    )
