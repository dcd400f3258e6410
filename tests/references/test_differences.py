"""Numbers that were computed again: rounding is nothing, a per cent or an R-hat's digit is."""

import math
from dataclasses import replace

import pytest

from lightning_bnn.references.diagnosis import Diagnosis, differences
from lightning_bnn.tables import Measured

NUMBERS = {"rhat_max": 1.02, "rhat_median": 1.001, "ess_min": 500.0, "ess_tail_min": 600.0}
BEFORE = Diagnosis(
    8,
    100,
    dict.fromkeys(("function", "canonical", "weights"), NUMBERS),
    {"law": Measured(1e-5, 1e-4), "tv": Measured(0.01), "f_law": Measured(math.nan)},
)


def moved(space, **numbers):
    return replace(BEFORE, spaces={**BEFORE.spaces, space: {**NUMBERS, **numbers}})


def half(**numbers):
    return replace(BEFORE, halves={**BEFORE.halves, **numbers})


@pytest.mark.parametrize(
    "now",
    [
        BEFORE,
        moved("canonical", ess_min=501.5, rhat_max=1.02001),
        half(law=Measured(1.5e-5, 1e-4), tv=Measured(0.010001)),
        half(kl=Measured(3.0)),
    ],
)
def test_what_rounding_changes_is_the_same(now):
    assert differences(BEFORE, now) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (moved("canonical", ess_min=515.0), "least ESS of canonical weights 515, but 500"),
        (moved("function", ess_tail_min=580.0), "least ESS of tails of predictions 580, but 600"),
        (moved("weights", rhat_max=1.021), "largest R-hat of raw weights 1.021, but 1.02"),
        (moved("function", rhat_median=1.0015), "median R-hat of predictions 1.0015, but 1.001"),
        (moved("function", rhat_max=math.nan), "largest R-hat of predictions nan, but 1.02"),
        (half(law=Measured(3e-5, 1e-4)), "law of both halves of the chains 3e-05, but 1e-05"),
        (half(tv=Measured(0.0103)), "tv of both halves of the chains 0.0103, but 0.01"),
    ],
)
def test_what_rounding_does_not_change_is_named(now, words):
    assert differences(BEFORE, now) == [words]
