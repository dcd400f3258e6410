"""Standard errors: over modes by the jackknife, over examples by the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_bnn.metrics.mmd import jackknife_variance
from lightning_bnn.tables import Measured, spread
from weightsym.params import keyed_generator

Numbers = dict[str, Measured]
_GROUPS = 20
"""Largest number of groups that the jackknife leaves out in turn."""


def over_modes(numbers: Sequence[Mapping[str, float]]) -> Numbers:
    """Return mean and standard deviation of every metric over modes."""
    return {
        name: spread(torch.tensor([of_mode[name] for of_mode in numbers], dtype=torch.float64))
        for name in numbers[0]
    }


def left_out(parts: Sequence[Tensor]) -> list[Tensor]:
    """Select all rows but those of one part, for each part in turn; none for fewer than three.

    Many parts are first joined into groups of neighbours.
    """
    edges = torch.linspace(0, len(parts), min(len(parts), _GROUPS) + 1).round().long().tolist()
    groups = list(zip(edges, edges[1:], strict=False))
    if len(groups) < 3:
        return []
    return [torch.cat([*parts[:first], *parts[last:]]) for first, last in groups]


def jackknife(whole: Mapping[str, float], left: Sequence[Mapping[str, float]]) -> Numbers:
    r"""Return the metrics of all parts, with standard errors from leaving out one at a time.

    .. math:: s^2 = \frac{K - 1}{K} \sum_k (\theta_{-k} - \bar\theta)^2

    Args:
        whole: numbers of all parts.
        left: numbers without each part in turn; if there are none, errors are NaN.

    >>> numbers = jackknife({"mean": 3.0}, [{"mean": 4.0}, {"mean": 3.5}, {"mean": 1.5}])
    >>> round(numbers["mean"].error, 6)
    1.527525
    """
    return _with_errors(whole, left, lambda values: jackknife_variance(values).sqrt())


def _with_errors(
    whole: Mapping[str, float],
    others: Sequence[Mapping[str, float]],
    error: Callable[[Tensor], Tensor],
) -> Numbers:
    """Attach errors to metrics from those of other parts or samples, NaN without any."""
    columns = {name: torch.tensor([o[name] for o in others], dtype=torch.float64) for name in whole}
    return {
        name: Measured(number, float(error(columns[name])) if others else math.nan)
        for name, number in whole.items()
    }


def bootstrap(
    sizes: Sequence[int],
    numbers_of: Callable[..., Mapping[str, float]],
    repeats: int = 50,
    seed: int = 0,
) -> Numbers:
    """Return the metrics of all examples, with standard deviations over bootstrap samples.

    Args:
        sizes: of the data sets.
        numbers_of: the numbers, given indices of examples of every data set.
        repeats: how often examples are drawn.
        seed: of the draws.
    """
    generator = keyed_generator(seed, "bootstrap")
    whole = numbers_of(*(torch.arange(n) for n in sizes))
    again = [
        numbers_of(*(torch.randint(n, (n,), generator=generator) for n in sizes))
        for _ in range(repeats)
    ]
    return _with_errors(whole, again, torch.std)
