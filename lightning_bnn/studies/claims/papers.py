"""The claims of all papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_bnn.studies.claims import (
    p1_functions,
    p1_posteriors,
    p1_weights,
    p2_gaussians,
    p2_width,
    p3,
)
from lightning_bnn.studies.claims.claim import Claim

__all__ = ["CLAIMS"]

CLAIMS: Mapping[str, Sequence[Claim]] = {
    "p1": (*p1_posteriors.CLAIMS, *p1_functions.CLAIMS, *p1_weights.CLAIMS),
    "p2": (*p2_gaussians.CLAIMS, *p2_width.CLAIMS),
    "p3": p3.CLAIMS,
}
"""By paper, in the order of its page."""
