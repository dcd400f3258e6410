"""Partners of thousands of units, found by short random projections and proved by their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from weightsym.groups.placements import Placement
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.units import unit_rows
from weightsym.matching.moved import column_blocks, gram, inner_products

Weights = Mapping[str, Tensor]
MANY = 1024
"""Groups of as many units are matched by sketches first."""
_DIRECTIONS = 96
_DEVIATIONS = 3  # between an estimated inner product and its bound
_ROWS = 256  # whose products with all others are held at once
_FEW = 0.5  # of the units: if more are in doubt, sketches save nothing


class Partners(NamedTuple):
    """The partner of every unit of a reference.

    Attributes:
        order: the partners.
        products: inner products with them.
        sure: True if no other partner suits any unit as well.
    """

    order: np.ndarray
    products: Tensor
    sure: bool


class Sketches:
    r"""Inner products of units from random projections of their weights.

    .. math:: \langle b, a \rangle \approx \langle \Omega b, \Omega a \rangle \pm
        |a| |b| / \sqrt{d}

    The partner of a unit is sure where its exact product exceeds what the bound allows any other
    unit, on both sides; among all units in doubt an assignment decides by exact products.

    Args:
        sym: what `discover` returned.
        moving: one network as a stack.
        goal: the reference.
        most: how many weights of each unit are compared, by default all.
    """

    def __init__(
        self, sym: Symmetries, moving: Weights, goal: Weights, most: int | None = None
    ) -> None:
        self.sym, self.moving, self.goal, self.most = sym, moving, goal, most
        self._of_goal = dict[Placement, tuple[Tensor, Tensor]]()

    def partners(self, views: Sequence[Placement], flips: bool) -> Partners | None:
        """The partners of all units over some places, or None if most of them are in doubt.

        Args:
            views: places of the units.
            flips: compare up to signs.
        """
        goal = [self._goal_sketch(view) for view in views]
        moving = [_sketch(self._rows(self.moving, view), view) for view in views]
        b, a = (torch.cat([s for s, _ in every], 1) for every in (goal, moving))
        norms = [torch.stack([n for _, n in every]).sum(0).sqrt() for every in (goal, moving)]
        error = _DEVIATIONS / b.shape[1] ** 0.5
        order, beside = _nearest(b, a, norms[0] * error, norms[1], flips)
        products = self.products(views, order)
        values = products.abs() if flips else products
        counts = torch.bincount(order, minlength=len(order))
        sure = (values > beside) & (counts[order] == 1)
        left = (~sure).nonzero().flatten()
        if len(left) > _FEW * len(order):
            return None
        if len(left):
            free = torch.ones(len(order), dtype=torch.bool)
            free[order[sure]] = False
            columns = free.nonzero().flatten()
            table = self._table(views, left, columns)
            best = linear_sum_assignment((table.abs() if flips else table).numpy(), maximize=True)
            order[left] = columns[torch.from_numpy(best[1])]
            products[left] = table[best].to(products)
        return Partners(order.numpy(), products, not len(left))

    def _goal_sketch(self, view: Placement) -> tuple[Tensor, Tensor]:
        if view not in self._of_goal:
            self._of_goal[view] = _sketch(self._rows(self.goal, view), view)
        return self._of_goal[view]

    def products(self, views: Sequence[Placement], order: Tensor | None = None) -> Tensor:
        """Inner products of all units with those in their places, or in an order."""
        total = torch.zeros(len(views[0].positions), dtype=torch.float64)
        for view in views:
            goal, moving = self.rows(view)
            moving = moving if order is None else moving[order.to(moving.device)]
            total += inner_products(moving, goal)
        return total

    def rows(self, view: Placement) -> tuple[Tensor, Tensor]:
        """The weights of all units of the reference and of the network at a place."""
        return self._rows(self.goal, view), self._rows(self.moving, view)

    def _rows(self, weights: Weights, view: Placement) -> Tensor:
        w = weights[self.sym.axes[view.axis].tensor]
        return unit_rows({}, self.sym, view, w).reshape(len(view.positions), -1)[:, : self.most]

    def _table(self, views: Sequence[Placement], rows: Tensor, columns: Tensor) -> Tensor:
        total = torch.zeros(len(rows), len(columns), dtype=torch.float64)
        for view in views:
            goal, moving = self.rows(view)
            some = goal[rows.to(goal.device)], moving[columns.to(moving.device)]
            total += gram(some[0].to(some[1].device), some[1], torch.float32).cpu()
        return total


def _sketch(rows: Tensor, view: Placement) -> tuple[Tensor, Tensor]:
    """Rows on random directions, which are the same for both networks, and their squared norms."""
    generator = torch.Generator().manual_seed(view.axis)
    total, squares = torch.zeros(len(rows), _DIRECTIONS), torch.zeros(len(rows))
    for some in column_blocks(*rows.shape[::-1]):
        part = rows[:, some].float().cpu()
        directions = torch.randn(part.shape[1], _DIRECTIONS, generator=generator)
        total.addmm_(part, directions, alpha=_DIRECTIONS**-0.5)
        squares += part.square().sum(1)
    return total, squares


def _nearest(
    b: Tensor, a: Tensor, errors: Tensor, norms: Tensor, flips: bool
) -> tuple[Tensor, Tensor]:
    """The likeliest partner of every row, and a bound of all products beside that pair."""
    units = len(b)
    order, second = torch.empty(units, dtype=torch.int64), torch.empty(units)
    columns = torch.full((units,), -torch.inf)
    for first in range(0, units, _ROWS):
        some = slice(first, first + _ROWS)
        bounds = b[some] @ a.T
        if flips:
            bounds.abs_()
        bounds.addr_(errors[some], norms)
        order[some] = bounds.argmax(1)
        bounds.scatter_(1, order[some, None], -torch.inf)
        second[some] = bounds.amax(1)
        columns = torch.maximum(columns, bounds.amax(0))
    return order, torch.maximum(second, columns[order])
