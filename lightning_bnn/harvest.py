"""Schedules of collecting weights, periodic in steps or epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weightsym.params import check_count


@dataclass(frozen=True)
class Schedule:
    """A schedule with a period in steps or in epochs.

    Steps are optimizer steps. A schedule receives the counts before and after a batch, since one
    batch may make several steps, or none.

    Args:
        every_n_steps: period in optimizer steps.
        every_n_epochs: period in epochs.
        start: first step (or epoch) of the schedule.

    >>> schedule = Schedule(every_n_steps=3)
    >>> [step for step in range(2, 12, 2) if schedule.after_step(step - 2, step)]
    [4, 6, 10]
    """

    every_n_steps: int | None = None
    every_n_epochs: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if (self.every_n_steps is None) == (self.every_n_epochs is None):
            raise ValueError("Set exactly one of `every_n_steps` and `every_n_epochs`.")
        check_count("every_n_steps", self.every_n_steps, optional=True)
        check_count("every_n_epochs", self.every_n_epochs, optional=True)
        check_count("start", self.start, 0)

    def after_step(self, before: int, step: int) -> bool:
        """Return whether to collect, given the counts of steps before and now."""
        if step <= before or step < self.start:
            return False
        n = self.every_n_steps
        return n is not None and step // n > before // n

    def after_epoch(self, epochs: int) -> bool:
        """Return whether to collect after a number of epochs."""
        n = self.every_n_epochs
        return n is not None and epochs >= self.start and epochs % n == 0

    def count(self, steps: int | float, epochs: int | float) -> int | float:
        """Estimate the number of collections in a run, infinite if it has no end."""
        total, period = (
            (steps, self.every_n_steps) if self.every_n_steps else (epochs, self.every_n_epochs)
        )
        assert period is not None
        return math.inf if math.isinf(total) else max(0, (total - self.start) // period + 1)


# ------------------------------------------------------------ how long a run will be
def epochs_of(trainer: Any) -> int | float:
    """Return the number of whole epochs of a run, infinite if it has no end."""
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    if trainer.max_steps == -1:
        return epochs
    batches = trainer.num_training_batches if trainer.estimated_stepping_batches else 0
    if not 0 < batches < math.inf:  # a stream
        return epochs
    return min(epochs, trainer.max_steps // math.ceil(batches / trainer.accumulate_grad_batches))


def expected(schedule: Schedule, trainer: Any) -> int | float:
    """Estimate the number of collections in a run, infinite if it has no end."""
    steps = trainer.estimated_stepping_batches
    return schedule.count(math.inf if steps in (None, -1) else steps, epochs_of(trainer))


def ends(trainer: Any) -> bool:
    """Return whether this step, or the epoch that has just ended, is the last of a fit."""
    epochs, steps = trainer.current_epoch + 1, trainer.global_step
    if trainer.should_stop:
        return epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)
    over = trainer.is_last_batch and trainer.max_epochs not in (None, -1)
    return (over and epochs >= trainer.max_epochs) or 0 <= trainer.max_steps <= steps
