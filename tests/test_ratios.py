"""How much faster than plain ways we are has not fallen to half of what is recorded.

The one test that measures time: CPU time, in turns, the fastest rounds, tried three times. It runs
alone (`make test-all`), in a process without neighbours.
"""

import importlib
import json
import sys

import pytest
import torch
from pages import ROOT

FILE = ROOT / "docs" / "benchmarks" / "ratios.json"
HALF = 0.5


@pytest.fixture
def ratios(monkeypatch):
    """The script, as it finds its neighbours."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    known = set(sys.modules)
    yield importlib.import_module("ratios")
    for name in set(sys.modules) - known:
        if (
            getattr(sys.modules[name], "__file__", None)
            and "benchmarks" in sys.modules[name].__file__
        ):
            del sys.modules[name]


def recorded():
    return {row["who"]: row["value"] for row in json.loads(FILE.read_text())["rows"]}


def fallen(ratios, name, ways, known):
    """What is wrong with a ratio, or nothing."""
    least = HALF * known[name]
    found = ratios.ratio(ways, least)
    said = ratios.RATIOS[name].said
    return None if found > least else f"{name} ({said}): {found:.3g}, it was {known[name]:.3g}"


def test_every_ratio_is_recorded(ratios):
    assert list(recorded()) == list(ratios.RATIOS)
    rows = json.loads(FILE.read_text())["rows"]
    assert [row["said"] for row in rows] == [way.said for way in ratios.RATIOS.values()]


@pytest.mark.ratios
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(recorded()))
def test_no_ratio_has_fallen_to_half(name, ratios):
    with ratios.ways_of(name) as ways:
        assert fallen(ratios, name, ways, recorded()) is None


@pytest.mark.ratios
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(recorded()))
def test_both_ways_come_to_the_same(name, ratios):
    """Weights that are drawn, and steps of training, are not compared."""
    with ratios.ways_of(name) as ways:
        ours, theirs = ways["ours"](), ways["theirs"]()
    assert (ours is None) == (theirs is None)
    if ours is not None:
        ours, theirs = (torch.as_tensor(value).double() for value in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
