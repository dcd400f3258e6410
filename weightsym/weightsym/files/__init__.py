"""Networks in files, read and written one tensor at a time: never a whole network in memory."""

from weightsym.files.fitting import NetworkNames, fit
from weightsym.files.stored import open_network
from weightsym.files.writing import write_like

__all__ = [
    "NetworkNames",
    "fit",
    "open_network",
    "write_like",
]
