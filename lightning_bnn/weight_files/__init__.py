"""Networks in files, read and written one tensor at a time: never a whole network in memory."""

from lightning_bnn.weight_files.fitting import FittedNetwork, NetworkNames, fit
from lightning_bnn.weight_files.moving import moved
from lightning_bnn.weight_files.stored import StoredNetwork, open_network
from lightning_bnn.weight_files.writing import check_target, write_like

__all__ = [
    "FittedNetwork",
    "NetworkNames",
    "StoredNetwork",
    "check_target",
    "fit",
    "moved",
    "open_network",
    "write_like",
]
