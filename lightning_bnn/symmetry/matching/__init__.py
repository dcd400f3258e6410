"""Bring networks into one frame: permutations by weights or activations, and lines between them."""

from lightning_bnn.symmetry.matching.activations import match_activations
from lightning_bnn.symmetry.matching.align import Alignment, align, cycle_error
from lightning_bnn.symmetry.matching.interpolation import Barrier, barrier, interpolate
from lightning_bnn.symmetry.matching.learning import Learning
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.repair import Repaired, repair
from lightning_bnn.symmetry.matching.result import MatchResult

__all__ = [
    "Alignment",
    "Barrier",
    "MatchResult",
    "align",
    "barrier",
    "cycle_error",
    "interpolate",
    "match",
    "match_activations",
    "Learning",
    "Repaired",
    "repair",
]
