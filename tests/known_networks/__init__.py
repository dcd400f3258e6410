"""Networks with the symmetries that they are known to have, one module for every family."""

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
