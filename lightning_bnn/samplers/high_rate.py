"""The learning rate of SWAG: as usual at first, then a ramp to a high one that stays."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["HighRate"]


class HighRate(LRScheduler):
    """Follows another schedule up to some epoch, then goes to a high rate in a straight line.

    Args:
        optimizer: whose rates are set.
        rate: the high one.
        start: epoch at which the ramp starts.
        ramp: length of the ramp, in epochs.
        before: schedule of the epochs before; by default the rate is constant.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rate: float,
        start: int,
        ramp: int = 5,
        before: LRScheduler | None = None,
    ) -> None:
        if isinstance(before, ReduceLROnPlateau):
            raise ValueError("`lr_scheduler` ReduceLROnPlateau cannot go before the high rate.")
        self.rate, self.begin, self.ramp, self.before = rate, start, ramp, before
        self.reached = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rate of every parameter group in this epoch."""
        beyond = self.last_epoch - self.begin
        if beyond > 0:
            part = min(1.0, beyond / max(1, self.ramp))
            return [lr + part * (self.rate - lr) for lr in self.reached]
        if self.before is not None and self.last_epoch > 0:
            self.before.step()
        self.reached = [group["lr"] for group in self.optimizer.param_groups]
        return list(self.reached)

    def state_dict(self) -> dict[str, Any]:
        """With the state of the schedule before."""
        own = {k: v for k, v in super().state_dict().items() if k != "before"}
        return {**own, "before": None if self.before is None else self.before.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With the state of the schedule before."""
        state = dict(state_dict)
        before = state.pop("before")
        super().load_state_dict(state)
        if self.before is not None:
            self.before.load_state_dict(before)
