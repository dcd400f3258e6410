"""Is a posterior any good, and what is wrong with it: findings with reasons and remedies."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.doctor.evidence import Evidence, Examples, NotPossible, Settings
    from lightning_bnn.doctor.examine import CHECKS, examine
    from lightning_bnn.doctor.findings import Finding, Report

__all__ = [
    "CHECKS",
    "Evidence",
    "Examples",
    "Finding",
    "NotPossible",
    "Report",
    "Settings",
    "examine",
]

lazy_package(__name__)
