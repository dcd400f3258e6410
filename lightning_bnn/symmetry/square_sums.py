"""Squares of weights, summed fast, over large dimensions first, and without losing small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.symmetry.placements import Axis

__all__ = ["matrix_squares", "square_sums"]

_FEW = 64
_FLUSHED = 1e-30  # smaller squares than this may be zero in float32


def square_sums(w: Tensor, keep: Sequence[int]) -> Tensor:
    """Squares summed over all dimensions but the first and those to keep, most in native type."""
    w = w.detach()
    if w.dtype in (torch.float16, torch.bfloat16):  # squares need more than these hold
        w = w.float()
    total = _summed(w.square(), keep)
    if w.dtype != torch.float64 and bool((total < _FLUSHED).any()):
        return _summed(w.double().square(), keep)
    return total


def matrix_squares(w: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """``(members, blocks, rows, columns)``: squares summed over kernel positions."""
    assert rows.dim is not None
    assert columns.dim is not None
    if columns.blocks > 1:
        w = w.unflatten(1, (columns.blocks, -1))
        return square_sums(w, (1, 2, columns.dim + 2))
    squares = square_sums(w, (rows.dim + 1, columns.dim + 1))
    return (squares if rows.dim < columns.dim else squares.mT)[:, None]


def _summed(squares: Tensor, keep: Sequence[int]) -> Tensor:
    dims = [d for d in range(1, squares.ndim) if d not in keep]
    if dims and dims[0] == 1:
        squares = squares.sum(1, keepdim=True)
    last = 1 + max((0, *keep))
    while math.prod(squares.shape[last:]) > _FEW:
        last += 1
    if last < squares.ndim:  # places of a kernel: a product is the faster sum
        squares = squares.flatten(last)
        squares = squares @ squares.new_ones(squares.shape[-1])
        dims = [d for d in dims if d < last]
    squares = squares.double()
    return squares.sum(dims) if dims else squares
