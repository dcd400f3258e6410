"""Dynamics of constant speed: gradients bend directions, noise refreshes them, steps adapt."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightsym.params import precise, widest

Array = Any
"""Of numpy on the CPU, whose small operations take a third of the time of torch's, else a tensor.
All are in the `widest` type."""
_LEAST = 1e-30


def bend(direction: Array, gradient: Array, sizes: Array) -> tuple[Array, Array]:
    """Directions after a time in which the gradient was the same, and what kinetic energy gained.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        gradient: of the energy.
        sizes: how long, ``(chains,)``.
    """
    library, freedom = library_of(gradient), gradient.shape[1] - 1
    norm = lengths_of(gradient)
    safe = norm + _LEAST
    angle = norm * (sizes / freedom)
    cosine = (gradient * direction).sum(1) / -safe
    fade = library.exp(-angle)
    faded = 1 - fade
    length = abs((1 + cosine) + (1 - cosine) * fade * fade) + _LEAST  # negative by rounding
    along = faded * (1 + fade + cosine * faded) / (-safe * length)
    turned = along[:, None] * gradient + (2 * fade / length)[:, None] * direction
    return turned, freedom * (angle - math.log(2) + library.log(length))


def refresh(direction: Array, noise: Array, sizes: Array, lengths: Array) -> Array:
    """Directions that forget themselves over some length.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        noise: standard normal numbers.
        sizes: of the step, ``(chains,)``.
        lengths: after which a direction is forgotten.
    """
    library = library_of(direction)
    spread = library.sqrt(library.expm1(2 * sizes / lengths) / direction.shape[1])
    return unit(direction + spread[:, None] * noise)


_FADE, _TRUST, _ORDER = 99 / 101, 9.0, 6
_SHRINK = 0.8


@dataclass
class Tuning:
    """The step sizes of every chain and what they rest on, each field ``(chains,)`` and precise.

    Attributes:
        sizes: of steps.
        largest: that have not failed yet.
        weighted: faded sum of squared errors over the sixth power of their step sizes, each with
            a weight that trusts outliers less.
        weights: faded sum of these weights.
        lengths: after which directions are forgotten.
        squares: sum of squared errors over the number of weights, since the adaptation.
        steps: how many they are of.
        failed: how many more were undone since, as something was not finite.
    """

    sizes: Array
    largest: Array
    weighted: Array
    weights: Array
    lengths: Array
    squares: Array
    steps: Array
    failed: Array

    @classmethod
    def start(cls, chains: int, size: float, length: float, device: torch.device) -> Tuning:
        """Of chains that know nothing yet.

        Args:
            chains: how many.
            size: of their steps.
            length: after which directions are forgotten.
            device: where the arrays are.
        """
        first = [size, math.inf, 0.0, 0.0, length, 0.0, 0.0, 0.0]
        rows = torch.tensor(first, dtype=widest(device), device=device)
        return cls.from_rows(rows[:, None].repeat(1, chains))

    @classmethod
    def from_rows(cls, rows: Tensor) -> Tuning:
        """Read what `as_rows` has made.

        Args:
            rows: one for each field.
        """
        return cls(*as_array(rows))

    def as_rows(self) -> Tensor:
        """One row for each field, ``(fields, chains)``, which checkpoints keep in its precision."""
        rows = [getattr(self, field.name) for field in fields(self)]
        return torch.as_tensor(library_of(self.sizes).stack(rows))

    def adapt(self, errors: Array, wanted: float) -> None:
        """Take the errors of one step into account, and choose the sizes of the next.

        A step that failed makes all later ones of its chain smaller.

        Args:
            errors: squares over the number of weights; not finite where a step has failed.
            wanted: their mean.
        """
        library = library_of(errors)
        well = library.isfinite(errors)
        ratio = library.where(well, errors, wanted) / wanted + 1e-8
        trust = library.where(well, library.exp(-0.5 * (library.log(ratio) / _TRUST) ** 2), 0.0)
        fade = library.where(well, _FADE, 1.0)
        self.weighted = fade * self.weighted + trust * ratio / self.sizes**_ORDER
        self.weights = fade * self.weights + trust
        self.largest = library.where(well, self.largest, _SHRINK * self.sizes)
        lengths = (self.weighted / self.weights) ** (-1 / _ORDER)
        lengths = library.where(self.weights > 0, lengths, self.sizes)
        self.sizes = library.minimum(lengths, self.largest)

    def watch(self, errors: Array) -> None:
        """Count the errors of one step of the sampling.

        Args:
            errors: as in `adapt`.
        """
        library = library_of(errors)
        well = library.isfinite(errors)
        self.squares = self.squares + library.where(well, errors, 0.0)
        self.steps = self.steps + well
        self.failed = self.failed + ~well


class TunedSteps:
    """What is known of chains whose tuning is kept in the groups of a sampler, as rows."""

    param_groups: list[dict[str, Any]]

    @property
    def step_sizes(self) -> Tensor:
        """Size of the next step of every chain, nothing before the first one."""
        return self._known("sizes")

    @property
    def lengths(self) -> Tensor:
        """Length after which each chain forgets its direction, nothing before the first step."""
        return self._known("lengths")

    @property
    def energy_variances(self) -> Tensor:
        """Mean squared energy error of a step over d, of every chain since the tuning, else NaN."""
        return self._known("squares") / self._known("steps")

    @property
    def failed_steps(self) -> Tensor:
        """Number of steps of every chain that were undone since the tuning, as not finite."""
        return self._known("failed")

    def metrics(self) -> dict[str, Tensor]:
        """Numbers that are worth logging, means over the chains of what is known by now."""
        numbers = {"step_size": self.step_sizes, "memory_length": self.lengths}
        if all(g["step"] > g["descent_steps"] + g["adapt_steps"] for g in self.param_groups):
            numbers["energy_variance"] = self.energy_variances
        return {name: values.mean() for name, values in numbers.items() if len(values)}

    def _known(self, name: str) -> Tensor:
        k = [field.name for field in fields(Tuning)].index(name)
        known = [rows[k] for group in self.param_groups for rows in group["tuning"].values()]
        return torch.cat(known) if known else torch.tensor([])


def add_to_spread(state: dict[str, Any], x: Tensor) -> None:
    """Running mean and sum of squared deviations, by Welford."""
    for name in ("mean", "deviation"):
        state.setdefault(name, torch.zeros_like(x))
    state["count"] = state.get("count", 0) + 1
    away = x - state["mean"]
    state["mean"] += away / state["count"]
    state["deviation"] += away * (x - state["mean"])


def total_spread(state: dict[str, Any]) -> Tensor:
    """Sum of the variances of all weights, of every chain."""
    deviation = state.pop("deviation")
    state.pop("mean")
    return deviation.sum(1, dtype=widest(deviation.device)) / state.pop("count")


def adam(
    state: dict[str, Any], gradient: Tensor, k: int, steps: int, rate: float
) -> tuple[Tensor, Tensor, float]:
    """The means, their sizes and the rate of a step of Adam, which falls to zero as a cosine.

    Args:
        state: with the averages of gradients and of their squares, which are changed.
        gradient: at this step.
        k: number of the step.
        steps: how many there will be.
        rate: at first.
    """
    mean, square = (state.setdefault(n, torch.zeros_like(gradient)) for n in ("mean", "square"))
    mean.lerp_(gradient, 1 - _BETA)
    square.mul_(_BETA_SQUARE).addcmul_(gradient, gradient, value=1 - _BETA_SQUARE)
    size = square.sqrt().div_(math.sqrt(1 - _BETA_SQUARE ** (k + 1))).add_(_EPS)
    falling = 1 + math.cos(math.pi * k / steps)
    return mean, size, falling * (rate / 2 / (1 - _BETA ** (k + 1)))


_BETA, _BETA_SQUARE, _EPS = 0.9, 0.999, 1e-8


def as_array(tensor: Tensor) -> Array:
    """The array that computes on a device."""
    return precise(tensor).numpy() if tensor.device.type == "cpu" else precise(tensor)


def library_of(array: Array) -> Any:
    """The library whose functions take an array: both have the same."""
    return torch if isinstance(array, Tensor) else np


def lengths_of(rows: Array) -> Array:
    """The Euclidean length of every row."""
    return library_of(rows).sqrt((rows * rows).sum(1))


def unit(rows: Array) -> Array:
    """Rows of unit length."""
    return rows / (lengths_of(rows) + _LEAST)[:, None]
