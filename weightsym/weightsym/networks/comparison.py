"""Comparison of outputs at two sets of weights, where the outputs depend on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsym.networks.devices import precise
from weightsym.networks.dicts import Params
from weightsym.networks.randomness import key_of

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
POOL = 65_521
_OUT_OF_SIGHT = 1e6  # times as large as what moves: its rounding would pass for an error
_CANCELLED = 1e-6  # of what wrong weights make: outputs so small may be rounding


def tolerance_of(params: Mapping[str, Tensor]) -> float:
    """Return the relative error of outputs that rounding can cause."""
    floating = (t.dtype for t in params.values() if t.is_floating_point())
    return tolerance_in(next(floating, torch.float32))


def tolerance_in(dtype: torch.dtype) -> float:
    """Return the tolerance for a precision."""
    return _TOLERANCE.get(dtype, 1e-2)


def perturbed(params: Params, names: Collection[str] = (), size: float = 0.3) -> Params:
    """Return another function's weights: some or all, times independent positive factors."""
    chosen = {n for n in params if n in names or not names}
    return {n: _perturbed_tensor(n, t, size) if n in chosen else t for n, t in params.items()}


def _perturbed_tensor(name: str, t: Tensor, size: float = 0.3) -> Tensor:
    """Return a copy of a tensor times positive factors that depend on its name."""
    return perturb_(name, t.clone(memory_format=torch.contiguous_format), size)


def perturb_(name: str, t: Tensor, size: float = 0.3, first: int = 0) -> Tensor:
    """Perturb a contiguous floating-point tensor in place; leave others unchanged.

    Args:
        name: of the tensor.
        t: its numbers, or some that follow each other.
        size: of the logarithms of the factors.
        first: the place of the first of these numbers in the tensor.
    """
    if not t.is_floating_point() or not t.numel():
        return t
    return tiled_(torch.mul, t, turned(_factors(size), (first - key_of(name)) % POOL, t.numel()))


@functools.cache
def _factors(size: float) -> Tensor:
    return (size * normal_pool(5)).exp()


def turned(row: Tensor, start: int, size: int) -> Tensor:
    """Return the first numbers of a cyclically shifted row."""
    return torch.cat([row[start : start + size], row[: max(0, min(start, start + size - POOL))]])


@functools.cache
def normal_pool(seed: int) -> Tensor:
    """Return normal numbers, prime in number, so that no tensor shape is a multiple of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(POOL, generator=generator, dtype=torch.float64)


def tiled_(
    operation: Callable[..., Tensor], t: Tensor, row: Tensor, out: Tensor | None = None
) -> Tensor:
    """Combine a contiguous tensor with a row that is tiled to its size.

    In place, or into another tensor.
    """
    out, row = t if out is None else out, row.to(t)
    whole = t.numel() // len(row) * len(row)
    parts = [(x[:whole].view(-1, len(row)), x[whole:]) for x in (t.view(-1), out.view(-1))]
    for tiles, result in zip(*parts, strict=True):
        operation(tiles, row[: tiles.shape[-1]], out=result)
    return out


@dataclass(frozen=True)
class OutputComparison:
    """Reference outputs, the mask of compared entries, and the scale of errors.

    Elements that wrong weights move give the size, which is their own, however far these move them.
    Elements that they leave alone are compared if they are not so large that their rounding would
    count (a logit masked with ``-1e12``).
    """

    old: list[Tensor]
    compared: list[Tensor]
    sizes: list[float]

    @classmethod
    def between(
        cls, old: Sequence[Tensor], wrong: Sequence[Tensor], tolerance: float,
        right: Sequence[Tensor] | None = None,
    ) -> OutputComparison:  # fmt: skip
        """Compare outputs with those of wrong weights, and with less precise right ones."""
        parts = [_visible(a, b, tolerance) for a, b in zip(right or old, wrong, strict=True)]
        return cls(list(old), [mask for mask, _ in parts], [size for _, size in parts])

    @property
    def sensitive(self) -> bool:
        """True if any output changes with the weights."""
        return any(size > 0 for size in self.sizes)

    def error(self, new: Sequence[Tensor]) -> float:
        """Return the largest difference relative to the changing outputs, NaN if none changes."""
        if not self.sensitive:
            return math.nan
        pairs = zip(self.old, new, self.compared, self.sizes, strict=True)
        return max(_error(a, b, mask, size) for a, b, mask, size in pairs if size > 0)


def agree(old: Sequence[Tensor], new: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether outputs are equal up to rounding, relative to their usual magnitude."""
    if [t.shape for t in old] != [t.shape for t in new]:
        return False
    return all(_agree(a, b, tolerance) for a, b in zip(old, new, strict=True))


def _agree(old: Tensor, new: Tensor, tolerance: float) -> bool:
    sizes = old.abs()[torch.isfinite(old) & (old != 0)]
    usual = float(sizes.median()) if sizes.numel() else 0.0
    old, new = precise(old), precise(new)
    return torch.allclose(old, new, rtol=tolerance, atol=tolerance * usual, equal_nan=True)


def _visible(old: Tensor, wrong: Tensor, tolerance: float) -> tuple[Tensor, float]:
    finite = torch.isfinite(old)
    moved = finite & ~((old - wrong).abs() <= max(tolerance, 1e-6) * old.abs())
    if not bool(moved.any()):
        return moved, 0.0
    size, move = (float(t.abs().nan_to_num(0, 0, 0)[moved].max()) for t in (old, old - wrong))
    size = size if size > _CANCELLED * move else move
    return finite & (moved | (old.abs() < _OUT_OF_SIGHT * size)), size


def _error(old: Tensor, new: Tensor, compared: Tensor, size: float) -> float:
    if bool((torch.isfinite(old) != torch.isfinite(new)).any()):
        return math.inf
    return float((old - new)[compared].abs().max()) / size
