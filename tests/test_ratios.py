"""The two ways that `benchmarks/ratios.py` times come to the same result; no test measures time."""

import importlib
import json
import sys

import pytest
import torch
from pages import ROOT

FILE = ROOT / "docs" / "benchmarks" / "ratios.json"
ROWS = json.loads(FILE.read_text())["rows"]


@pytest.fixture
def ratios(monkeypatch):
    """The script, as it finds its neighbours."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    known = set(sys.modules)
    yield importlib.import_module("ratios")
    for name in set(sys.modules) - known:
        if "benchmarks" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_every_ratio_is_recorded(ratios):
    said = {name: ratio.said for name, ratio in ratios.RATIOS.items()}
    assert {row["who"]: row["said"] for row in ROWS} == said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [row["who"] for row in ROWS])
def test_both_ways_come_to_the_same(name, ratios):
    """Weights that are drawn, and steps of training, are not compared."""
    with ratios.ways_of(name) as ways:
        ours, theirs = ways["ours"](), ways["theirs"]()
    assert (ours is None) == (theirs is None)
    if ours is not None:
        ours, theirs = (torch.as_tensor(value).double() for value in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
