"""Health of members: finite weights, and losses below a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weightsym.params import check_positive, precise


class Diverged(ValueError):
    """Raised when no network is left for the posterior."""


def finite_members(stacks: Iterable[Tensor]) -> Tensor:
    """Mark the members whose weights are all finite.

    Args:
        stacks: tensors whose first dimension counts members.
    """
    zeros = [t.detach().flatten(1).mul(0).sum(1) for t in stacks]  # NaN unless all are finite
    return torch.stack(zeros).sum(0).isfinite() if zeros else torch.tensor(math.nan)


class Divergence:
    """Members that have diverged, judged by their mean training losses over an epoch.

    Args:
        members: number of members.
        max_loss: limit on the loss of the last epoch, above which members are left out; None leaves
            out only broken ones.
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
        """Return the members that are not left out, and raise `Diverged` if none remains."""
        included = members[~self.left_out.to(members.device)[members]]
        if len(included) == 0:
            means = self.means
            losses = "" if means is None else f": losses are {means.min():.3g} to {means.max():.3g}"
            raise Diverged(
                f"Every member has diverged or has a loss above `max_loss` {self.max_loss}{losses}."
            )
        return included

    def add(self, losses: Tensor) -> None:
        """Add the losses of a step, each taken before the weights move."""
        losses = precise(losses.detach())
        self._sum = losses.clone() if self._sum is None else self._sum.to(losses.device) + losses
        self._steps += 1

    def take(self) -> Tensor | None:
        """Return the mean losses since the last call, or None if there was no step."""
        total, steps = self._sum, self._steps
        self._sum, self._steps = None, 0
        return None if total is None else (total / steps).cpu()

    def judge(self, means: Tensor, finite: Tensor, last: bool) -> None:
        """Decide which members to leave out.

        Args:
            means: losses of the epoch.
            finite: mask of the members with finite weights.
            last: whether this was the last epoch.
        """
        self.means, self._judged = means, last
        broken = ~finite.cpu() | means.isnan()
        limit = self.max_loss if last and self.max_loss is not None else torch.inf
        self.left_out = broken | (means > limit)

    def finish(self) -> None:
        """Apply the limit if the previous epoch turns out to have been the last."""
        if self.means is None or self._judged:
            return
        limit = torch.inf if self.max_loss is None else self.max_loss
        self.left_out = self.left_out | (self.means > limit)

    def state_dict(self, last: bool = False) -> dict[str, Any]:
        """Return the state for checkpoints, also within an epoch.

        Args:
            last: whether the last epoch is over but not yet judged.
        """
        left_out = self.left_out
        if last and self._steps and self.max_loss is not None:
            assert self._sum is not None
            left_out = left_out | (self._sum.cpu() / self._steps > self.max_loss)
        return {
            "left_out": left_out, "means": self.means, "sum": self._sum, "steps": self._steps,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.left_out, self.means = state["left_out"], state["means"]
        self._sum, self._steps = state["sum"], state["steps"]
