"""Numbers with the doubt about them, and what can be said of them in spite of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "Answer",
    "Number",
    "above",
    "all_of",
    "below",
    "compared",
    "in_every_run",
    "measured",
    "meets",
    "minus",
    "near",
    "over_seeds",
    "within",
]

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
    """Mean and deviation over repetitions; the doubt about the mean is Student's.

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
    if not math.isfinite(sd):
        return Number(value)
    if count is None:
        return Number(value, sd, 1.96 * sd)
    return Number(value, sd, _student(count) * sd / math.sqrt(count) if count > 1 else 0.0)


def minus(one: Number, other: Number) -> Number:
    """The difference of two numbers whose errors are independent."""
    return Number(
        one.value - other.value, math.hypot(one.sd, other.sd), math.hypot(one.doubt, other.doubt)
    )


def above(number: Number, bound: int | float) -> Answer:
    """Whether it lies above a bound, beyond doubt.

    Args:
        number: which is judged.
        bound: that it is compared with.

    >>> above(Number(2.0, 1.0, 0.5), 1.0), above(Number(1.2, 1.0, 0.5), 1.0)
    (True, None)
    """
    low, high = number.value - number.doubt, number.value + number.doubt
    return True if low > bound else False if high <= bound else None


def below(number: Number, bound: int | float) -> Answer:
    """Whether it lies below a bound, beyond doubt."""
    return above(Number(-number.value, number.sd, number.doubt), -bound)


def within(number: Number, low: int | float, high: int | float) -> Answer:
    """Whether it lies between two bounds, beyond doubt.

    Args:
        number: which is judged.
        low: the lower bound.
        high: the upper bound.

    >>> within(Number(1.0, 0.1, 0.2), 0.5, 2), within(Number(1.0, 0.1, 0.2), 0.9, 2)
    (True, None)
    """
    least, most = number.value - number.doubt, number.value + number.doubt
    if low <= least and most <= high:
        return True
    return False if most < low or least > high else None


def meets(number: Number, low: int | float, high: int | float) -> Answer:
    """Whether it may lie between two bounds, for claims that nothing is to be seen.

    Args:
        number: which is judged.
        low: the lower bound.
        high: the upper bound.

    >>> meets(Number(1.0, 0.1, 0.2), 1.1, 2), meets(Number(1.0, 0.1, 0.2), 1.3, 2)
    (True, False)
    """
    if not math.isfinite(number.value):
        return None
    return low - number.doubt <= number.value <= high + number.doubt


def near(number: Number, wanted: int | float, tolerance: int | float) -> Answer:
    """Whether it is what the paper has, up to a tolerance."""
    return within(number, wanted - tolerance, wanted + tolerance)


def compared(one: Number, other: Number) -> Answer:
    """Whether one number is larger than another, beyond the doubt about their difference."""
    return above(minus(one, other), 0.0)


def all_of(answers: Iterable[Answer]) -> Answer:
    """Yes if all are; no if one is no; otherwise it is within the errors.

    >>> all_of([True, None]), all_of([True, False, None]), all_of([True])
    (None, False, True)
    """
    given = list(answers)
    if not given:
        raise ValueError("`answers` must hold one at least, got none.")
    if False in given:
        return False
    return None if None in given else True


def in_every_run(values: Iterable[float], condition: Callable[[float], bool]) -> Answer:
    """Whether every repetition meets a condition; None if some do and some do not.

    For claims about one experiment, which each repetition is, and not about a mean.

    Args:
        values: one for each repetition.
        condition: what is claimed.

    >>> in_every_run([0.5, 0.7], lambda share: share < 1)
    True
    """
    answers = {bool(condition(value)) for value in values if math.isfinite(value)}
    return answers.pop() if len(answers) == 1 else None


def _student(count: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, count - 1))
