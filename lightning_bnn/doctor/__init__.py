"""Is a posterior any good, and what is wrong with it: findings with reasons and remedies."""

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
