"""How references are sampled, and how they are exchanged with others."""

from bnn_research.references.competition import read_competition
from bnn_research.references.posteriordb import export_posteriordb

__all__ = ["export_posteriordb", "read_competition"]
