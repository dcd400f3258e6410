"""Sampling of references, and their exchange with other projects."""

from bnn_research.references.competition import read_competition
from bnn_research.references.posteriordb import export_posteriordb

__all__ = ["export_posteriordb", "read_competition"]
