"""What the study of averages makes of its numbers: over sets of one seed, and over seeds."""

import math

import pytest
import torch
from scipy.stats import ttest_1samp

from lightning_bnn.studies import alignment
from lightning_bnn.studies.alignment import _summary
from lightning_bnn.tables import interval


def of_seed(*sets):
    return {"joint": {2: [{"excess": value} for value in sets]}}


def test_intervals_are_those_of_scipy():
    values = torch.randn(7, generator=torch.Generator().manual_seed(0)).double() + 1
    low, high = ttest_1samp(values.numpy(), 0).confidence_interval(0.95)
    found = interval(values)
    assert (found.value - found.error, found.value + found.error) == pytest.approx((low, high))
    assert math.isnan(interval(values[:1]).error)


def test_one_seed_is_told_by_its_sets_and_several_by_the_means_over_them():
    (one,) = _summary([of_seed(1.0, 2.0, 6.0)])["joint"].values()
    assert one["excess"] == (3.0, pytest.approx(math.sqrt(7)))
    (several,) = _summary([of_seed(1.0, 3.0), of_seed(4.0, 4.0), of_seed(0.0, 10.0)])[
        "joint"
    ].values()
    low, high = ttest_1samp([2.0, 4.0, 5.0], 0).confidence_interval(0.95)
    assert several["excess"].value == pytest.approx((low + high) / 2)
    assert several["excess"].error == pytest.approx((high - low) / 2)


@pytest.mark.bad_input
def test_seeds_must_be_one_at_least(tmp_path):
    with pytest.raises(ValueError, match="`seeds` must be at least 1, got 0"):
        alignment.alignment(scale="smallest", seeds=0, out=str(tmp_path / "out"))
