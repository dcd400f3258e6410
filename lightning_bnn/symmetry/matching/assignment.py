"""Assign units of one network to those of another by similarity; blocks with their inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_bnn.symmetry.groups import Placement, Symmetries

__all__ = ["Family", "assign", "assign_all", "assign_blocks", "families"]


@dataclass(frozen=True)
class Family:
    """A group that is matched at once: channels, or blocks together with the channels inside them.

    ``inner`` are those of the inner groups that have no place in common, ``rows`` their indices;
    ``rest`` are the places of a block that none of them moves.
    """

    group: int
    inner: tuple[tuple[int, ...], ...]
    rest: tuple[Placement, ...]
    rows: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """All groups that the family changes."""
        return (self.group, *(g for row in self.inner for g in row))


def families(sym: Symmetries) -> list[Family]:
    """All groups in graph order, the inner ones also with their blocks.

    Blocks that have tensors of their own are left out: `exchange_branches` moves those.
    """
    all_families = []
    for k, group in enumerate(sym.permutations):
        if group.tensors:
            continue
        rows, taken = _apart(sym, group.inner)
        rest = []
        for place in group.placements:
            columns = torch.ones(place.positions.shape[1], dtype=torch.bool)
            if place.axis in taken:
                columns = ~torch.isin(place.positions[0], torch.cat(taken[place.axis]))
            if bool(columns.any()):
                rest.append(Placement(place.axis, place.positions[:, columns]))
        inner = tuple(group.inner[row] for row in rows)
        all_families.append(Family(k, inner, tuple(rest), rows))
    return sorted(all_families, key=lambda f: sym.permutations[f.group].placements[0].axis)


def _apart(
    sym: Symmetries, inner: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], dict[int, list[Tensor]]]:
    """Rows of inner groups without a place in common, and what they take of every axis."""
    rows, taken = [], dict[int, list[Tensor]]()
    for k, row in enumerate(inner):
        places = [p for g in row for p in sym.permutations[g].placements]
        if not any(
            bool(torch.isin(p.positions, torch.cat(taken[p.axis])).any())
            for p in places
            if p.axis in taken
        ):
            rows.append(k)
            for p in places:
                taken.setdefault(p.axis, []).append(p.positions.reshape(-1))
    return tuple(rows), taken


def assign(similarity: Float[Tensor, "units units"]) -> Int[Tensor, " units"]:
    """The permutation p with the largest sum of ``similarity[i, p[i]]``."""
    _, columns = linear_sum_assignment(similarity.detach().cpu().numpy(), maximize=True)
    return torch.from_numpy(columns)


def assign_all(
    similarity: Float[Tensor, "members units units"],
) -> Int[Tensor, "members units"]:
    """As `assign`, for every member of a stack."""
    tables = similarity.detach().cpu().numpy()
    return torch.from_numpy(np.stack([linear_sum_assignment(t, maximize=True)[1] for t in tables]))


def assign_blocks(rest: Tensor, inside: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Assign blocks by the best that can be had inside each pair of them.

    Args:
        rest: similarity ``(blocks, blocks)`` of what is fixed inside a block.
        inside: for every class of channels, their similarities ``(blocks, units, blocks, units)``.

    Returns:
        The block permutation and, per class, the order ``(blocks, units)`` inside each new block.
    """
    total = rest.detach().cpu().double().numpy().copy()
    orders = []
    for similarity in inside:
        table = similarity.detach().cpu().double().numpy()
        blocks, units = table.shape[:2]
        order = np.empty((blocks, blocks, units), np.int64)
        for a in range(blocks):
            for b in range(blocks):
                _, order[a, b] = linear_sum_assignment(table[a, :, b], maximize=True)
                total[a, b] += table[a, np.arange(units), b, order[a, b]].sum()
        orders.append(order)
    _, chosen = linear_sum_assignment(total, maximize=True)
    return torch.from_numpy(chosen), [
        torch.from_numpy(o[np.arange(len(chosen)), chosen]) for o in orders
    ]
