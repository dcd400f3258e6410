"""First and second moments of activations over batches, and how alike units are by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["MEASURES", "JointMoments", "Measure", "Moments"]

Measure = Literal["activations", "correlation", "regression"]


@dataclass
class Moments:
    """Count, means and sums of squared deviations of units, summed up batch by batch."""

    count: int = 0
    mean: Tensor | float = 0.0
    squares: Tensor | float = 0.0

    def add(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Take in ``(..., units, samples)``; return them centred, and how far the mean was off."""
        rows = rows.double()
        mean, new = rows.mean(-1), rows.shape[-1]
        centred, off = rows - mean[..., None], mean - self.mean
        self.squares = self.squares + centred.square().sum(-1) + self.share(new) * off.square()
        self.mean = self.mean + off * new / (self.count + new)
        self.count += new
        return centred, off

    def share(self, new: int) -> float:
        """How much a difference of means counts when more samples come."""
        return self.count * new / (self.count + new)

    @property
    def deviation(self) -> Tensor:
        """Standard deviations over all samples; zero where only rounding varies."""
        deviation = (torch.as_tensor(self.squares) / self.count).sqrt()
        return deviation.where(deviation > 1e-7 * torch.as_tensor(self.mean).abs(), 0.0)


class JointMoments:
    """What inner products, correlations and regressions of all pairs of units are made of.

    Rows are units of one network, the reference, columns those of the members of a stack.
    """

    def __init__(self) -> None:
        self.goal, self.own = Moments(), Moments()
        self.products: Tensor | float = 0.0

    def add(self, goal: Tensor, own: Tensor) -> None:
        """Take in activations ``(units, samples)`` and ``(members, units, samples)``."""
        share = self.goal.share(goal.shape[-1])
        (a, off_a), (b, off_b) = self.goal.add(goal), self.own.add(own)
        self.products = self.products + a @ b.mT + share * off_a[:, None] * off_b[:, None]

    # -------------------------------------------------------- measures
    def inner_products(self) -> Tensor:
        r"""Sums over samples: :math:`\sum_n a_{in} b_{jn}`."""
        means = torch.as_tensor(self.goal.mean)[:, None] * torch.as_tensor(self.own.mean)[:, None]
        return self.products + self.goal.count * means

    def correlations(self) -> Tensor:
        """Of centred activations divided by their deviations; zero for units that never vary."""
        deviations = self.goal.deviation[:, None] * self.own.deviation[:, None]
        return self.products / self.goal.count / _or_inf(deviations)

    def explained(self) -> Tensor:
        r"""What the best line from one unit to the other explains of the sum of squares.

        .. math:: \sum_n (a_{in} - \bar a_i)^2 - \min_{s, t} \sum_n (a_{in} - s\, b_{jn} - t)^2
        """
        squares = self.own.deviation[:, None].square() * self.goal.count
        return torch.as_tensor(self.products) ** 2 / _or_inf(squares)


def _or_inf(x: Tensor) -> Tensor:
    return x.where(x > 0, torch.inf)


MEASURES: dict[Measure, Callable[[JointMoments], Tensor]] = {
    "activations": JointMoments.inner_products,
    "correlation": JointMoments.correlations,
    "regression": JointMoments.explained,
}
