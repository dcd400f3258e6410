"""Posteriors that were sampled: draws of their weights, and how far these can be trusted."""

from lightning_bnn.references.cards import Card
from lightning_bnn.references.diagnosis import Diagnosis, diagnose
from lightning_bnn.references.shipped import (
    is_gold,
    read_reference,
    readable_card,
    reference_folder,
    reference_location,
    reference_names,
)

__all__ = [
    "Card",
    "Diagnosis",
    "diagnose",
    "is_gold",
    "read_reference",
    "readable_card",
    "reference_folder",
    "reference_names",
    "reference_location",
]
