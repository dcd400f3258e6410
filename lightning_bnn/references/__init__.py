"""Sampled posteriors: draws of their weights, and diagnostics of these draws."""

from lightning_bnn.references.cards import Card
from lightning_bnn.references.diagnosis import diagnose
from lightning_bnn.references.shipped import read_reference, reference_names

__all__ = [
    "Card",
    "diagnose",
    "read_reference",
    "reference_names",
]
