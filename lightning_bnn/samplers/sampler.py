"""The base of all samplers: their settings, and the source of their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from weightsym.params import (
    check_count,
    check_fraction,
    check_integer,
    check_not_negative,
    check_positive,
)

__all__ = ["Sampler"]

_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "lr": check_not_negative,
    "temperature": check_not_negative,
    "prior_precision": partial(check_not_negative, optional=True),
    "weight_decay": partial(check_not_negative, optional=True),
    "num_data": partial(check_count, optional=True),
    "seed": partial(check_integer, optional=True),
    "momentum": check_fraction,
    "descent_steps": partial(check_count, least=0),
    "adapt_steps": partial(check_count, least=0),
    "energy_variance": check_positive,
    "length": partial(check_positive, optional=True),
}
"""Conditions on settings that several samplers share, by name."""


class Sampler(torch.optim.Optimizer):
    """A torch optimizer with noise that moves every entry, or every chain, separately.

    All changing state is in the parameter groups and the state, so that a resumed run draws the
    same numbers as an uninterrupted one.

    Args:
        params: parameters or parameter groups.
        **settings: of the groups.

    >>> from lightning_bnn.samplers import MCLMC, SGLD
    >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
    >>> isinstance(SGLD([weight]), Sampler), isinstance(MCLMC([weight]), Sampler)
    (True, True)
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        for name, value in settings.items():
            if name in _CHECKS:
                _CHECKS[name](name, value)
        super().__init__(params, {**settings, "step": 0})

    @property
    def is_tuning(self) -> bool:
        """True if the last step still descended or adapted, and gave no draw."""
        return any(
            group["step"] <= group.get("descent_steps", 0) + group["adapt_steps"]
            for group in self.param_groups
            if "adapt_steps" in group
        )

    def metrics(self) -> dict[str, Any]:
        """Metrics to log after a step."""
        return {}


def seed_of(group: dict[str, Any]) -> int:
    """Return the seed of a group, by default torch's own, or 0 if processes may differ."""
    if group["seed"] is None:
        alone = not (distributed.is_available() and distributed.is_initialized())
        group["seed"] = torch.initial_seed() if alone else 0
    return group["seed"]


def cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into the shapes of some tensors."""
    pieces = flat.split([t.numel() for t in like])
    return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]
