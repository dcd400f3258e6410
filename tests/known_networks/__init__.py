"""Networks with the symmetries that they are known to have, one module for every family."""

from known_networks import (
    architectures,
    attention,
    experts,
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
    "counted",
    "experts",
    "operations",
    "recurrent",
    "shifts",
    "training",
    "weights",
]
