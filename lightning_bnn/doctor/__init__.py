"""Is a posterior any good, and what is wrong with it: findings with reasons and remedies."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.doctor.evidence import Evidence, Examples, Settings
    from lightning_bnn.doctor.examine import examine
    from lightning_bnn.doctor.findings import Finding, Report

__all__ = [
    "Evidence",
    "Examples",
    "Finding",
    "Report",
    "Settings",
    "examine",
]

lazy_package(__name__)
