"""How posteriors are compared with a reference: all that decides the numbers beside the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_bnn.judging.evaluators import Score

__all__ = ["Made", "Options"]

Made = Literal["trained", "sampled"]
"""How networks came about: by training runs, or as draws of the posterior."""


@dataclass(frozen=True)
class Options:
    """How posteriors are compared, see `lightning_bnn.studies.compare.compare`.

    Attributes:
        reference_samples: networks of every chain of the reference at most.
        functions: whether laws are compared as functions, too.
    """

    protocol: str = "full"
    samples: int = 100
    ood: str | None = None
    score: Score = "max_probability"
    seed: int = 0
    device: str | None = None
    reference_is: Made | None = None
    reference_samples: int | None = None
    functions: bool = False

    def usable_device(self) -> str:
        """The device that was asked for, or the best one; refused if there is none of its name."""
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"`device` {device!r} cannot be used here: {error}") from None
        return device
