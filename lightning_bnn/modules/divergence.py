"""Which members have diverged, told by their losses over an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Diverged", "Divergence"]


class Diverged(ValueError):
    """There is no network left that could be part of a posterior."""


class Divergence:
    """Mean training loss of every member over an epoch, each taken before its step.

    Args:
        members: how many there are.
        max_loss: members above it after the last epoch are left out; None leaves out only those
            that are broken.
        restarts: how often a member may begin anew whose weights are not finite or whose loss is
            not a number.
    """

    def __init__(self, members: int, max_loss: float | None, restarts: int) -> None:
        self.max_loss, self.restarts = max_loss, restarts
        self.restarted = torch.zeros(members, dtype=torch.long)
        self.left_out = torch.zeros(members, dtype=torch.bool)
        self.means: Tensor | None = None
        self._fresh = torch.zeros(members, dtype=torch.bool)
        self._judged = False
        self._sum: Tensor | None = None
        self._steps = 0

    def add(self, losses: Tensor) -> None:
        """The losses of one step."""
        losses = losses.detach().double()
        self._sum = losses.clone() if self._sum is None else self._sum.to(losses.device) + losses
        self._steps += 1

    def take(self) -> Tensor | None:
        """The means since the last call; None if there was no step."""
        total, steps = self._sum, self._steps
        self._sum, self._steps = None, 0
        return None if total is None else (total / steps).cpu()

    def judge(self, means: Tensor, finite: Tensor, last: bool) -> list[int]:
        """Note who is left out; returns who begins anew.

        Args:
            means: losses of the epoch.
            finite: whose weights are.
            last: whether this was the last epoch.
        """
        self.means, self._judged = means, last
        broken = ~finite.cpu() | means.isnan()
        anew = broken & (self.restarted < self.restarts) & (not last)
        self.restarted += anew
        self._fresh = anew
        too_high = (
            means > self.max_loss if last and self.max_loss is not None else means > torch.inf
        )
        self.left_out = (broken & ~anew) | too_high
        return anew.nonzero().flatten().tolist()

    def finish(self) -> None:
        """The last epoch was the last, although nobody knew: who has just begun is left out."""
        if self.means is None or self._judged:
            return
        limit = torch.inf if self.max_loss is None else self.max_loss
        self.left_out = self.left_out | self._fresh | (self.means > limit)

    def take_share(self, first: int, last: int) -> None:
        """Forget all members but some."""
        for name in ("restarted", "left_out", "_fresh", "means"):
            held = getattr(self, name)
            setattr(self, name, None if held is None else held[first:last])
        self._sum = None if self._sum is None else self._sum[first:last]

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
            "restarted": self.restarted, "left_out": left_out, "means": self.means,
            "sum": self._sum, "steps": self._steps,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on."""
        self.restarted, self.left_out = state["restarted"], state["left_out"]
        self._sum, self._steps = state["sum"], state["steps"]
        self.means, self._fresh = state["means"], torch.zeros_like(self.left_out)
