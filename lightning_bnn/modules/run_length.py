"""How long a run will be, as far as it knows."""

from __future__ import annotations

import math
from typing import Any

from lightning_bnn.harvest import Schedule

__all__ = ["ends", "epochs_of", "expected"]


def epochs_of(trainer: Any) -> int | float:
    """Epochs of a run; infinite if it has no end."""
    return math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs


def expected(schedule: Schedule, trainer: Any) -> int | float:
    """How often a run will collect, about; infinite if it has no end."""
    steps = trainer.estimated_stepping_batches
    return schedule.count(math.inf if steps in (None, -1) else steps, epochs_of(trainer))


def ends(trainer: Any) -> bool:
    """Whether the epoch that is going on, or just over, is the last of a fit."""
    if not trainer.is_last_batch:
        return False
    epochs, steps = trainer.current_epoch + 1, trainer.global_step
    if trainer.should_stop:
        return epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)
    return epochs >= epochs_of(trainer) or 0 <= trainer.max_steps <= steps
