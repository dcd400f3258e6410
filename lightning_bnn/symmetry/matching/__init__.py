"""Bring networks into one frame: permutations by weights or activations, and lines between them."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.symmetry.matching.activations import match_activations
    from lightning_bnn.symmetry.matching.align import Alignment, align, cycle_error
    from lightning_bnn.symmetry.matching.averaging import average
    from lightning_bnn.symmetry.matching.difference import Difference, Stage, difference
    from lightning_bnn.symmetry.matching.interpolation import Barrier, barrier, interpolate
    from lightning_bnn.symmetry.matching.learned import Learning, learn_match
    from lightning_bnn.symmetry.matching.match import MatchResult, match
    from lightning_bnn.symmetry.matching.match_all import match_all, match_mixings
    from lightning_bnn.symmetry.matching.matrices import FullMatch
    from lightning_bnn.symmetry.matching.repair import Repaired, repair
    from lightning_bnn.symmetry.matching.running_frame import RunningFrame

__all__ = [
    "Alignment",
    "Barrier",
    "Difference",
    "FullMatch",
    "Learning",
    "MatchResult",
    "Repaired",
    "RunningFrame",
    "Stage",
    "align",
    "average",
    "barrier",
    "cycle_error",
    "difference",
    "interpolate",
    "learn_match",
    "match",
    "match_activations",
    "match_all",
    "match_mixings",
    "repair",
]

lazy_package(__name__)
