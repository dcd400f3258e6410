"""Operations that are short for others, and that PyTorch does not write out itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["IN_OTHERS"]

aten: Any = torch.ops.aten


def _addbmm(
    bias: Tensor, x: Tensor, y: Tensor, *, beta: float | int = 1, alpha: float | int = 1
) -> Tensor:
    return beta * bias + alpha * torch.bmm(x, y).sum(0)


def _addmm(
    bias: Tensor, x: Tensor, y: Tensor, *, beta: float | int = 1, alpha: float | int = 1
) -> Tensor:
    product = x @ y if alpha == 1 else alpha * (x @ y)
    return product + (bias if beta == 1 else beta * bias)


def _softmax_of_some(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A softmax of rows that hold one number at least that is not minus infinity."""
    return torch.softmax(x, dim, dtype=dtype)


def _trilinear(
    x: Tensor, y: Tensor, z: Tensor, expand_x: Sequence[int], expand_y: Sequence[int],
    expand_z: Sequence[int], summed: Sequence[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """The product of three tensors, each with new dimensions, summed over some of them."""
    operands = zip((x, y, z), (expand_x, expand_y, expand_z), strict=True)
    wide = []
    for tensor, dims in operands:
        for d in sorted(dims):
            tensor = tensor.unsqueeze(d)
        wide.append(tensor)
    return (wide[0] * wide[2] * wide[1]).sum(list(summed))


def _distances(x: Tensor, y: Tensor, p: float | int, mode: int | None) -> Tensor:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


def _batch_norm(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, training: bool, momentum: float, eps: float, cudnn: bool,
) -> Any:  # fmt: skip
    """A batch norm that says what it writes."""
    if not training:
        statistics = (mean, variance, momentum, eps)
        return aten._native_batch_norm_legit_no_training(x, gain, bias, *statistics)[0]
    if mean is None or variance is None:
        return aten._native_batch_norm_legit.no_stats(x, gain, bias, True, momentum, eps)[0]
    new = aten._native_batch_norm_legit_functional(
        x, gain, bias, mean, variance, True, momentum, eps
    )
    mean.copy_(new[3])
    variance.copy_(new[4])
    return new[0]


IN_OTHERS: dict[Any, Callable[..., Any]] = {
    aten.addbmm.default: _addbmm,
    aten.batch_norm.default: _batch_norm,
    aten.addmm.default: _addmm,
    aten._safe_softmax.default: _softmax_of_some,
    aten._trilinear.default: _trilinear,
    aten._cdist_forward.default: _distances,
}
"""The function that computes the same, by operation."""
