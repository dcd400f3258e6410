"""Thousands of networks on disk: append, read by row or by layer, import, export."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.bank.archives import export_archives, import_archives
    from lightning_bnn.bank.checkpoint_bank import CheckpointBank
    from lightning_bnn.bank.folders import (
        export_files,
        find_prefix,
        import_files,
        read_networks,
        read_state,
        strip_prefix,
    )
    from lightning_bnn.bank.shipped import (
        bank_card,
        digest_of_networks,
        shipped_bank,
        shipped_banks,
        shipped_path,
    )

__all__ = [
    "CheckpointBank",
    "bank_card",
    "digest_of_networks",
    "export_archives",
    "export_files",
    "find_prefix",
    "import_archives",
    "import_files",
    "read_networks",
    "read_state",
    "shipped_bank",
    "shipped_banks",
    "shipped_path",
    "strip_prefix",
]

lazy_package(__name__)
