"""Cyclical schedules of rates and temperatures: explore, then sample, repeatedly."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from weightsym.params import check_count, check_fraction, check_integer

__all__ = ["CyclicalSchedule", "interval_of", "parts_of"]

_OF_STEPS = (OneCycleLR, CyclicLR)
"""Schedules that torch intends to step after every batch."""


class CyclicalSchedule(LRScheduler):
    r"""Cosine cycles of the rate, with noise in the last part of each.

    .. math:: \eta_k = \frac{\eta_0}{2} \Big(\cos \frac{\pi (k \bmod L)}{L} + 1\Big)

    Step it after every optimizer step, as our modules do.

    Args:
        optimizer: a sampler of this package.
        cycle_length: number L of steps.
        exploration: fraction of each cycle at temperature 0.
        last_epoch: index of the last step, as for every scheduler.

    References:
        | Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning (Zhang et al., 2020)
        | https://arxiv.org/abs/1902.03932

    >>> import torch
    >>> from lightning_bnn.samplers import SGLD
    >>> sampler = SGLD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, num_data=1)
    >>> schedule, rates = CyclicalSchedule(sampler, cycle_length=4, exploration=0.5), []
    >>> for _ in range(8):
    ...     rates.append((round(sampler.param_groups[0]["lr"], 2), schedule.sampling))
    ...     sampler.step()
    ...     schedule.step()
    >>> rates[:4], rates[4:] == rates[:4]
    ([(1.0, False), (0.85, False), (0.5, True), (0.15, True)], True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_length: int,
        exploration: float = 0.8,
        last_epoch: int = -1,
    ) -> None:
        check_count("cycle_length", cycle_length)
        check_fraction("exploration", exploration)
        check_integer("last_epoch", last_epoch)
        if any("temperature" not in group for group in optimizer.param_groups):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} has no temperature: use a sampler."
            )
        self.cycle_length, self.exploration = cycle_length, exploration
        for group in optimizer.param_groups:
            group.setdefault("sampling_temperature", group["temperature"])
        super().__init__(optimizer, last_epoch)

    @property
    def position(self) -> float:
        """Position in this cycle, from 0 to 1."""
        return (self.last_epoch % self.cycle_length) / self.cycle_length

    @property
    def sampling(self) -> bool:
        """True if this is the part of a cycle in which networks are collected."""
        return self.position >= self.exploration

    def get_lr(self) -> list[Any]:
        """Return the rates of all groups, and set their temperatures."""
        for group in self.optimizer.param_groups:
            group["temperature"] = group["sampling_temperature"] if self.sampling else 0.0
        factor = (math.cos(math.pi * self.position) + 1) / 2
        return [rate * factor for rate in self.base_lrs]


def parts_of(scheduler: Any) -> list[Any]:
    """List a schedule and all schedules nested in it.

    >>> import torch
    >>> from torch.optim.lr_scheduler import ConstantLR, SequentialLR
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    >>> both = SequentialLR(sgd, [ConstantLR(sgd), ConstantLR(sgd)], [1])
    >>> [type(part).__name__ for part in parts_of(both)]
    ['SequentialLR', 'ConstantLR', 'ConstantLR']
    """
    inner = [child for s in getattr(scheduler, "_schedulers", ()) for child in parts_of(s)]
    return [scheduler, *inner]


def interval_of(scheduler: Any) -> str:
    """Return the interval of a schedule: ``"step"`` if any of its parts needs it, or ``"epoch"``.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    >>> interval_of(OneCycleLR(sgd, 0.1, total_steps=9))
    'step'
    """
    parts = parts_of(scheduler)
    of_steps = any(isinstance(s, (*_OF_STEPS, CyclicalSchedule)) for s in parts)
    return "step" if of_steps else "epoch"
