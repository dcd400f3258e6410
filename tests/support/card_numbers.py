"""Numbers of cards, and those that are computed again."""

import math

import pytest


def as_on_the_card(card, diagnosis):
    """Numbers up to the rounding of another processor."""
    for space, values in card.diagnosis.spaces.items():
        for number, value in values.items():
            close = 3e-4 if number.startswith("rhat") else 0.01
            assert diagnosis.spaces[space][number] == pytest.approx(value, rel=close, nan_ok=True)
    for name, (value, error) in card.diagnosis.halves.items():
        tolerance = max(0.01 * abs(value), 0.1 * error if math.isfinite(error) else 0.0)
        assert diagnosis.halves[name].value == pytest.approx(value, abs=tolerance)
