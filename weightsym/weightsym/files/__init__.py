"""Networks in files: one tensor at a time, or all networks of a folder as one stack."""

from weightsym.files.checkpoints import read_networks
from weightsym.files.fitting import fit
from weightsym.files.names import NetworkNames
from weightsym.files.stored import open_network
from weightsym.files.writing import write_like

__all__ = ["NetworkNames", "fit", "open_network", "read_networks", "write_like"]
