"""Outputs at two sets of weights, compared where weights can move them at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bnn.params import Params

__all__ = ["Comparison", "perturbed", "tolerance_of"]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_OUT_OF_SIGHT = 1e6  # times as large as what moves: its rounding would pass for an error


def tolerance_of(params: Params) -> float:
    """The relative error of outputs that rounding explains."""
    floating = (t.dtype for t in params.values() if t.is_floating_point())
    return _TOLERANCE.get(next(floating, torch.float32), 1e-2)


def perturbed(params: Params, names: Collection[str] = (), size: float = 0.3) -> Params:
    """Another function: some parameters (else all) times independent positive factors."""
    generator = torch.Generator().manual_seed(5)

    def moved(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return t * (size * noise).exp().to(t)

    chosen = {n for n, t in params.items() if t.is_floating_point() and (n in names or not names)}
    return {n: moved(t) if n in chosen else t for n, t in params.items()}


@dataclass(frozen=True)
class Comparison:
    """Right outputs, the elements of them that are compared, and the size of an error of 100 %.

    Elements that wrong weights move give the size. Elements that they leave alone are compared if
    they are not so large that their rounding would count (a logit masked with ``-1e12``).
    """

    old: list[Tensor]
    compared: list[Tensor]
    sizes: list[float]

    @classmethod
    def between(
        cls, old: Sequence[Tensor], wrong: Sequence[Tensor], tolerance: float
    ) -> Comparison:
        """From the outputs themselves and those of wrong weights."""
        parts = [_visible(a, b, tolerance) for a, b in zip(old, wrong, strict=True)]
        return cls(list(old), [mask for mask, _ in parts], [size for _, size in parts])

    @property
    def sensitive(self) -> bool:
        """Whether any output moves with the weights."""
        return any(size > 0 for size in self.sizes)

    def error(self, new: Sequence[Tensor]) -> float:
        """Largest difference relative to the outputs that move; NaN where nothing does."""
        if not self.sensitive:
            return math.nan
        pairs = zip(self.old, new, self.compared, self.sizes, strict=True)
        return max(_error(a, b, mask, size) for a, b, mask, size in pairs if size > 0)


def _visible(old: Tensor, wrong: Tensor, tolerance: float) -> tuple[Tensor, float]:
    finite = torch.isfinite(old)
    moved = finite & ~((old - wrong).abs() <= max(tolerance, 1e-6) * old.abs())
    if not bool(moved.any()):
        return moved, 0.0
    size = float(torch.maximum(old.abs(), (old - wrong).abs().nan_to_num(0, 0, 0))[moved].max())
    return finite & (moved | (old.abs() < _OUT_OF_SIGHT * size)), size


def _error(old: Tensor, new: Tensor, compared: Tensor, size: float) -> float:
    if bool((torch.isfinite(old) != torch.isfinite(new)).any()):
        return math.inf
    return float((old - new)[compared].abs().max()) / size
