"""Dynamics of constant speed: rotation by gradients, refreshment by noise, step adaptation."""

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
    """Turn directions by a constant gradient, and return the gain of kinetic energy.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        gradient: of the energy.
        sizes: step sizes, ``(chains,)``.
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
    """Partially refresh directions with noise.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        noise: standard normal numbers.
        sizes: of the step, ``(chains,)``.
        lengths: after which a direction is forgotten, ``(chains,)``.
    """
    library = library_of(direction)
    spread = library.sqrt(library.expm1(2 * sizes / lengths) / direction.shape[1])
    return unit(direction + spread[:, None] * noise)


_FADE, _TRUST, _ORDER = 99 / 101, 9.0, 6
_SHRINK = 0.8


@dataclass
class Tuning:
    """The step sizes of every chain with their statistics, all ``(chains,)`` in double precision.

    Attributes:
        sizes: current step sizes.
        largest: largest step sizes that have not failed yet.
        weighted: decayed sum of squared errors over the sixth power of their step sizes, with
            smaller weights for outliers.
        weights: decayed sum of these weights.
        lengths: after which directions are forgotten.
        squares: sum of squared errors over the number of weights, since the adaptation.
        steps: number of steps in this sum.
        failed: number of further steps that were undone because they were not finite.
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
        """Create the tuning of new chains.

        Args:
            chains: number of chains.
            size: of their steps.
            length: after which directions are forgotten.
            device: of the arrays.
        """
        first = [size, math.inf, 0.0, 0.0, length, 0.0, 0.0, 0.0]
        rows = torch.tensor(first, dtype=widest(device), device=device)
        return cls.from_rows(rows[:, None].repeat(1, chains))

    @classmethod
    def from_rows(cls, rows: Tensor) -> Tuning:
        """Restore the result of `as_rows`.

        Args:
            rows: one per field.
        """
        return cls(*as_array(rows))

    def as_rows(self) -> Tensor:
        """Return one row per field, ``(fields, chains)``, in the precision of checkpoints."""
        rows = [getattr(self, field.name) for field in fields(self)]
        return torch.as_tensor(library_of(self.sizes).stack(rows))

    def adapt(self, errors: Array, wanted: float) -> None:
        """Adapt the sizes of the next step to the errors of one step.

        A failed step limits all later ones of its chain.

        Args:
            errors: squares over the number of weights; not finite for failed steps.
            wanted: target of their mean.
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
        """Count the errors of one sampling step.

        Args:
            errors: as in `adapt`.
        """
        library = library_of(errors)
        well = library.isfinite(errors)
        self.squares = self.squares + library.where(well, errors, 0.0)
        self.steps = self.steps + well
        self.failed = self.failed + ~well


class TunedSteps:
    """A mixin for samplers whose parameter groups store the tuning of chains as rows."""

    param_groups: list[dict[str, Any]]

    @property
    def step_sizes(self) -> Tensor:
        """Size of the next step of every chain, None before the first one."""
        return self._known("sizes")

    @property
    def lengths(self) -> Tensor:
        """Distance after which each chain forgets its direction, None before the first step."""
        return self._known("lengths")

    @property
    def energy_variances(self) -> Tensor:
        """Mean squared energy error of a step over d since the tuning, for every chain, or NaN."""
        return self._known("squares") / self._known("steps")

    @property
    def failed_steps(self) -> Tensor:
        """Number of non-finite, undone steps of every chain since the tuning."""
        return self._known("failed")

    def metrics(self) -> dict[str, Tensor]:
        """Metrics to log, as means over the chains."""
        numbers = {"step_size": self.step_sizes, "memory_length": self.lengths}
        if all(g["step"] > g["descent_steps"] + g["adapt_steps"] for g in self.param_groups):
            numbers["energy_variance"] = self.energy_variances
        return {name: values.mean() for name, values in numbers.items() if len(values)}

    def _known(self, name: str) -> Tensor:
        k = [field.name for field in fields(Tuning)].index(name)
        tunings = [rows[k] for group in self.param_groups for rows in group["tuning"].values()]
        return torch.cat(tunings) if tunings else torch.tensor([])


def add_to_spread(state: dict[str, Any], x: Tensor) -> None:
    """Update the running mean and the sum of squared deviations, by Welford."""
    for name in ("mean", "deviation"):
        state.setdefault(name, torch.zeros_like(x))
    state["count"] = state.get("count", 0) + 1
    away = x - state["mean"]
    state["mean"] += away / state["count"]
    state["deviation"] += away * (x - state["mean"])


def total_spread(state: dict[str, Any]) -> Tensor:
    """Return the summed variances of all weights, for every chain."""
    deviation = state.pop("deviation")
    state.pop("mean")
    return deviation.sum(1, dtype=widest(deviation.device)) / state.pop("count")


def adam(
    state: dict[str, Any], gradient: Tensor, k: int, steps: int, rate: float
) -> tuple[Tensor, Tensor, float]:
    """Return the means, their sizes and the cosine-decayed rate of a step of Adam.

    Args:
        state: averages of gradients and of their squares, changed in place.
        gradient: at this step.
        k: index of the step.
        steps: total number of steps.
        rate: initial rate.
    """
    mean, square = (state.setdefault(n, torch.zeros_like(gradient)) for n in ("mean", "square"))
    mean.lerp_(gradient, 1 - _BETA)
    square.mul_(_BETA_SQUARE).addcmul_(gradient, gradient, value=1 - _BETA_SQUARE)
    size = square.sqrt().div_(math.sqrt(1 - _BETA_SQUARE ** (k + 1))).add_(_EPS)
    falling = 1 + math.cos(math.pi * k / steps)
    return mean, size, falling * (rate / 2 / (1 - _BETA ** (k + 1)))


_BETA, _BETA_SQUARE, _EPS = 0.9, 0.999, 1e-8


def as_array(tensor: Tensor) -> Array:
    """Convert a tensor to the array type used for its device."""
    return precise(tensor).numpy() if tensor.device.type == "cpu" else precise(tensor)


def library_of(array: Array) -> Any:
    """Return the library of an array, numpy or torch, which have the same functions."""
    return torch if isinstance(array, Tensor) else np


def lengths_of(rows: Array) -> Array:
    """Return the Euclidean length of every row."""
    return library_of(rows).sqrt((rows * rows).sum(1))


def unit(rows: Array) -> Array:
    """Scale rows to unit length."""
    return rows / (lengths_of(rows) + _LEAST)[:, None]
