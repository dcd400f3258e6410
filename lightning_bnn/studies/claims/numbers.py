"""Numbers with the doubt about them, and what can be said of them in spite of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Answer", "Number", "above", "agrees", "measured", "minus", "over_seeds", "within"]

Answer = bool | None
"""Yes, no, or None: it is within the errors."""


@dataclass(frozen=True)
class Number:
    """A number with its spread.

    Attributes:
        value: the number, mostly a mean.
        sd: the deviation that is shown behind it; NaN if there is none.
        doubt: half the width of its 95 % interval; 0 where nothing is known of it, so that the
            number alone decides.
    """

    value: int | float
    sd: int | float = math.nan
    doubt: int | float = 0.0

    def shown(self, digits: int = 2, unit: str = "") -> str:
        """As a table shows it.

        >>> Number(1.234, 0.5).shown(1, " %"), Number(2.0).shown()
        ('1.2 ± 0.5 %', '2.00')
        """
        if not math.isfinite(self.value):
            return "/"
        spread = f" ± {self.sd:.{digits}f}" if math.isfinite(self.sd) else ""
        return f"{self.value:.{digits}f}{spread}{unit}"


def over_seeds(values: Sequence[int | float]) -> Number:
    """Mean and deviation over repetitions. The doubt about the mean is Student's.

    Args:
        values: one for each repetition.

    >>> over_seeds([1.0, 2.0, 3.0]).shown()
    '2.00 ± 1.00'
    """
    if not values:
        raise ValueError("`values` must hold a number at least, got none.")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Number(mean)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return measured(mean, deviation, len(values))


def measured(value: int | float, sd: int | float, count: int | None = None) -> Number:
    """A number from a table that states its spread.

    Args:
        value: the mean.
        sd: deviation of what was averaged, or a standard error.
        count: how many were averaged; None if ``sd`` is a standard error.
    """
    from scipy.stats import t

    if not math.isfinite(sd):
        return Number(value)
    if count is None:
        return Number(value, sd, 1.96 * sd)
    width = float(t.ppf(0.975, count - 1)) / math.sqrt(count) if count > 1 else 0.0
    return Number(value, sd, width * sd)


def minus(x: Number, y: Number) -> Number:
    """The difference of two numbers whose errors are independent."""
    return Number(x.value - y.value, math.hypot(x.sd, y.sd), math.hypot(x.doubt, y.doubt))


def above(x: Number, y: Number) -> Answer:
    """Tell whether one number is larger than another, beyond the doubt about their difference.

    >>> above(Number(2.0, 1.0, 0.5), Number(1.0)), above(Number(1.2, 1.0, 0.5), Number(1.0))
    (True, None)
    """
    difference = minus(x, y)
    low, high = difference.value - difference.doubt, difference.value + difference.doubt
    return True if low > 0 else False if high <= 0 else None


def within(x: Number, low: Number, high: Number) -> Answer:
    """Tell whether a number lies between two bounds, beyond the doubt about it.

    >>> within(Number(1.0, 0.1, 0.2), Number(0.5), Number(2.0))
    True
    """
    least, most = x.value - x.doubt, x.value + x.doubt
    if low.value <= least and most <= high.value:
        return True
    return False if most < low.value or least > high.value else None


def agrees(x: Number, low: Number, high: Number) -> Answer:
    """Tell whether a number may lie between two others, for claims that nothing is to be seen.

    >>> agrees(Number(1.0, 0.1, 0.2), Number(1.1), Number(2.0))
    True
    """
    if not math.isfinite(x.value):
        return None
    doubts = low.doubt + x.doubt, high.doubt + x.doubt
    return low.value - doubts[0] <= x.value <= high.value + doubts[1]
