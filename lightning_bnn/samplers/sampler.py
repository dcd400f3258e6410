"""The base of all samplers: their settings, and where their random numbers come from."""

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
"""Values that settings of several samplers may have, by name."""


class Sampler(torch.optim.Optimizer):
    """A torch optimizer with noise. It moves each number by itself, or each chain.

    Everything that changes while it runs lives in the parameter groups and the state, so that a
    resumed run draws what the uninterrupted one would have drawn.

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
        """Whether the last step still descended or adapted, so that it gave no draw."""
        return any(
            group["step"] <= group.get("descent_steps", 0) + group["adapt_steps"]
            for group in self.param_groups
            if "adapt_steps" in group
        )

    def metrics(self) -> dict[str, Any]:
        """Numbers that are worth logging after a step."""
        return {}


def seed_of(group: dict[str, Any]) -> int:
    """The seed of a group. If none was given, torch's own; 0 where processes may have different."""
    if group["seed"] is None:
        alone = not (distributed.is_available() and distributed.is_initialized())
        group["seed"] = torch.initial_seed() if alone else 0
    return group["seed"]


def cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Pieces of a vector, with the shapes of some tensors."""
    pieces = flat.split([t.numel() for t in like])
    return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]
