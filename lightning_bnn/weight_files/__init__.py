"""Networks in files, read and written one tensor at a time: never a whole network in memory."""

from lightning_bnn.weight_files.fitting import NetworkNames, fit
from lightning_bnn.weight_files.stored import open_network
from lightning_bnn.weight_files.writing import write_like

__all__ = [
    "NetworkNames",
    "fit",
    "open_network",
    "write_like",
]
