"""Thousands of networks on disk: append, read by row or by layer, import, export."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.bank.checkpoint_bank import CheckpointBank
    from lightning_bnn.bank.folders import chains_of, export_files, import_files, read_networks
    from lightning_bnn.bank.labelled import labelled_networks
    from lightning_bnn.bank.shipped import shipped_bank, shipped_banks

__all__ = [
    "CheckpointBank",
    "chains_of",
    "export_files",
    "import_files",
    "labelled_networks",
    "read_networks",
    "shipped_bank",
    "shipped_banks",
]

lazy_package(__name__)
