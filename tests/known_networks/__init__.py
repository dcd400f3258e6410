"""Networks with the symmetries that they are known to have, one module for every family."""

from pathlib import Path

import pytest

from known_networks import (
    architectures,
    attention,
    classics,
    experts,
    mixing,
    operations,
    recurrent,
    shifts,
    training,
    weights,
)
from known_networks.table import NETWORKS, Network, counted

__all__ = [
    "ORDERED",
    "REPEATED",
    "each",
    "marked",
    "NETWORKS",
    "Network",
    "architectures",
    "attention",
    "classics",
    "counted",
    "experts",
    "mixing",
    "operations",
    "recurrent",
    "shifts",
    "training",
    "weights",
]

REPEATED = set(Path(__file__).with_name("repeated.txt").read_text().splitlines())
"""Networks of which every line of code that they run is run by three others at least."""
ORDERED = sorted(NETWORKS, key=REPEATED.__contains__)


def marked(name):
    """A name with the tier in which laws hold for its network."""
    late = [pytest.mark.e2e] if name in REPEATED else []
    return pytest.param(name, marks=[pytest.mark.slow] if NETWORKS[name].slow else late)


each = pytest.mark.parametrize("name", [*map(marked, ORDERED)])
"""For a law of all networks."""
