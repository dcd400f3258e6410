"""How long a run will be, as far as it knows."""

from __future__ import annotations

import math
from typing import Any

from lightning_bnn.harvest import Schedule

__all__ = ["ends", "epochs_of", "expected"]


def epochs_of(trainer: Any) -> int | float:
    """Epochs of a run, whole ones; infinite if it has no end."""
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    if trainer.max_steps == -1:
        return epochs
    batches = trainer.num_training_batches if trainer.estimated_stepping_batches else 0
    if not 0 < batches < math.inf:  # a stream
        return epochs
    return min(epochs, trainer.max_steps // math.ceil(batches / trainer.accumulate_grad_batches))


def expected(schedule: Schedule, trainer: Any) -> int | float:
    """How often a run will collect, about; infinite if it has no end."""
    steps = trainer.estimated_stepping_batches
    return schedule.count(math.inf if steps in (None, -1) else steps, epochs_of(trainer))


def ends(trainer: Any) -> bool:
    """Whether this step, or the epoch that is just over, is the last of a fit."""
    epochs, steps = trainer.current_epoch + 1, trainer.global_step
    if trainer.should_stop:
        return epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)
    over = trainer.is_last_batch and trainer.max_epochs not in (None, -1)
    return (over and epochs >= trainer.max_epochs) or 0 <= trainer.max_steps <= steps
