"""Shapes of predictions, labels and scores, by the names that signatures give them."""

from __future__ import annotations

from jaxtyping import Float, Float64, Integer, Real, Shaped
from torch import Tensor

__all__ = [
    "Draws", "IsOOD", "Labels", "Number", "PerExample", "Probs", "SampledProbs", "Scores",
]  # fmt: skip

Probs = Float[Tensor, "batch classes"]
SampledProbs = Float[Tensor, "samples batch classes"]
Labels = Integer[Tensor, " batch"]
PerExample = Float[Tensor, " batch"]
Scores = Real[Tensor, " ..."]
IsOOD = Shaped[Tensor, " ..."]
Draws = Float[Tensor, "chains samples *numbers"]
Number = Float64[Tensor, ""]
