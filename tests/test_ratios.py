"""The two ways that `benchmarks/ratios.py` times come to the same result; no test measures time."""

import json

import pytest
import torch
from pages import ROOT, benchmark_scripts

FILE = ROOT / "docs" / "benchmarks" / "ratios.json"
ROWS = json.loads(FILE.read_text())["rows"]


scripts = pytest.fixture(benchmark_scripts)


@pytest.fixture
def ratios(scripts):
    return scripts("ratios")


def test_every_ratio_is_recorded(ratios):
    said = {name: ratio.said for name, ratio in ratios.RATIOS.items()}
    assert {row["who"]: row["said"] for row in ROWS} == said


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [row["who"] for row in ROWS])
def test_both_ways_come_to_the_same(name, ratios):
    """Weights that are drawn, and steps of training, are not compared."""
    ways = ratios.ways_of(name)
    ours, theirs = ways["ours"](), ways["theirs"]()
    assert (ours is None) == (theirs is None)
    if ours is not None:
        ours, theirs = (torch.as_tensor(value).double() for value in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
