"""Draws of sampled posteriors and a thousand OptuNets, which `lightning_bnn` reads."""

from pathlib import Path

__all__ = ["FOLDER"]
__version__ = "0.1.0"

FOLDER = Path(__file__).parent
"""Where the data are."""
