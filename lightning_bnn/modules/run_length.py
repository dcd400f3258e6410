"""How long a run will be, as far as it knows."""

from __future__ import annotations

import math
from typing import Any

from lightning_bnn.harvest import Schedule

__all__ = ["epochs_of", "expected"]


def epochs_of(trainer: Any) -> float:
    """Epochs of a run; infinite if it has no end."""
    return math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs


def expected(schedule: Schedule, trainer: Any) -> float:
    """How often a run will collect, about; infinite if it has no end."""
    steps = trainer.estimated_stepping_batches
    return schedule.count(math.inf if steps in (None, -1) else steps, epochs_of(trainer))
