"""The health of members: finite weights, and losses as low as was asked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weightsym.params import check_positive, precise


class Diverged(ValueError):
    """There is no network left that could be part of a posterior."""


def finite_members(stacks: Iterable[Tensor]) -> Tensor:
    """Mark the members that have finite weights only.

    Args:
        stacks: tensors whose first dimension counts members.
    """
    finite = [torch.isfinite(t.detach()).flatten(1).all(1) for t in stacks]
    return torch.stack(finite).all(0) if finite else torch.tensor(math.nan)


class Divergence:
    """Members that have diverged, told by their mean training losses over an epoch.

    Args:
        members: how many there are.
        max_loss: members above it after the last epoch are left out; None leaves out only those
            that are broken.
    """

    def __init__(self, members: int, max_loss: float | None = None) -> None:
        check_positive("max_loss", max_loss, optional=True)
        self.max_loss = max_loss
        self.left_out = torch.zeros(members, dtype=torch.bool)
        self.means: Tensor | None = None
        self._judged = False
        self._sum: Tensor | None = None
        self._steps = 0

    def among(self, members: Tensor) -> Tensor:
        """Those of some members that are not left out, an error if there are none."""
        included = members[~self.left_out.to(members.device)[members]]
        if len(included) == 0:
            means = self.means
            losses = "" if means is None else f": losses are {means.min():.3g} to {means.max():.3g}"
            raise Diverged(
                f"Every member has a loss above `max_loss` {self.max_loss}, or has diverged"
                f"{losses}."
            )
        return included

    def add(self, losses: Tensor) -> None:
        """Add the losses of a step, each taken before the weights move."""
        losses = precise(losses.detach())
        self._sum = losses.clone() if self._sum is None else self._sum.to(losses.device) + losses
        self._steps += 1

    def take(self) -> Tensor | None:
        """Mean losses since the last call, None if there was no step."""
        total, steps = self._sum, self._steps
        self._sum, self._steps = None, 0
        return None if total is None else (total / steps).cpu()

    def judge(self, means: Tensor, finite: Tensor, last: bool) -> None:
        """Decide who is left out.

        Args:
            means: losses of the epoch.
            finite: whose weights are.
            last: whether this was the last epoch.
        """
        self.means, self._judged = means, last
        broken = ~finite.cpu() | means.isnan()
        limit = self.max_loss if last and self.max_loss is not None else torch.inf
        self.left_out = broken | (means > limit)

    def finish(self) -> None:
        """Apply the limit, if the epoch before turns out to have been the last."""
        if self.means is None or self._judged:
            return
        limit = torch.inf if self.max_loss is None else self.max_loss
        self.left_out = self.left_out | (self.means > limit)

    def state_dict(self, last: bool = False) -> dict[str, Any]:
        """For checkpoints, also within an epoch.

        Args:
            last: whether the last epoch is over, although it was not judged yet.
        """
        left_out = self.left_out
        if last and self._steps and self.max_loss is not None:
            assert self._sum is not None
            left_out = left_out | (self._sum.cpu() / self._steps > self.max_loss)
        return {
            "left_out": left_out, "means": self.means, "sum": self._sum, "steps": self._steps,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.left_out, self.means = state["left_out"], state["means"]
        self._sum, self._steps = state["sum"], state["steps"]
