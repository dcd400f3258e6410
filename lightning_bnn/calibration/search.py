"""The least value of a function of one positive number that may have several minima."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import minimize_scalar

__all__ = ["least_positive"]

_GRID = 41


def least_positive(loss: Callable[[float], float], low: float, high: float) -> tuple[float, bool]:
    """Where a function is least between two bounds, and whether that is one of these.

    A grid of logarithms finds the right valley, Brent's method its bottom.

    Args:
        loss: of the number.
        low: lower bound.
        high: upper bound.

    >>> value, at_bound = least_positive(lambda x: (x - 3) ** 2, 0.1, 10.0)
    >>> round(value, 6), at_bound
    (3.0, False)
    """
    start, step = math.log(low), (math.log(high) - math.log(low)) / (_GRID - 1)
    values = [loss(math.exp(start + step * k)) for k in range(_GRID)]
    best = min(range(_GRID), key=values.__getitem__)
    valley = (start + step * max(0, best - 1), start + step * min(_GRID - 1, best + 1))
    found = minimize_scalar(
        lambda x: loss(math.exp(x)), bounds=valley, method="bounded", options={"xatol": 1e-9}
    )
    ends = {value: loss(value) for value in (low, high)}
    nearest = min(ends, key=ends.__getitem__)
    if ends[nearest] <= found.fun:
        return nearest, True
    return math.exp(found.x), False
