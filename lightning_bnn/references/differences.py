"""Where numbers that were computed again are others than before: to the last digit they all are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_bnn.references.diagnosis import SPACES, Diagnosis

__all__ = ["differences"]

_CLOSE = {"rhat_max": 3e-4, "rhat_median": 3e-4, "ess_min": 0.01, "ess_tail_min": 0.01}
"""Relative differences that rounding makes, on another processor too, and that say nothing.

Networks that are moved by 1e-7 of their size have R-hats that differ by up to 1e-5, and effective
sizes that differ by up to 0.2 %: canonical forms of units that are nearly alike change places.
"""
_CLOSE_PREDICTIONS, _OF_AN_ERROR = 0.01, 0.1
"""The same of mean distances of predictions, and of distances that have an error, in errors."""
_NAMES = {
    "rhat_max": "largest R-hat", "rhat_median": "median R-hat", "ess_min": "least ESS",
    "ess_tail_min": "least ESS of tails",
}  # fmt: skip


def differences(before: Diagnosis, now: Diagnosis) -> list[str]:
    """What two diagnoses of the same draws do not agree about, each in some words.

    Args:
        before: as a card has it.
        now: as it was computed again; numbers that only one of both has are not compared.
    """
    return [
        f"{what} {new:.5g}, but {old:.5g}"
        for what, old, new, tolerance in _pairs(before, now)
        if not (abs(old - new) <= tolerance or math.isnan(old) and math.isnan(new))
    ]


def _pairs(before: Diagnosis, now: Diagnosis) -> Iterator[tuple[str, float, float, float]]:
    """Every number of both: its words, what it was and is, and what counts as the same."""
    for space, numbers in before.spaces.items():
        for name, old in numbers.items():
            words = f"{_NAMES[name]} of {SPACES[space]}"
            yield words, old, now.spaces[space][name], _CLOSE[name] * abs(old)
    for name, (old, error) in before.halves.items():
        if name in now.halves:
            of_error = _OF_AN_ERROR * error if math.isfinite(error) else 0.0
            tolerance = max(_CLOSE_PREDICTIONS * abs(old), of_error)
            yield f"{name} of both halves of the chains", old, now.halves[name].value, tolerance
