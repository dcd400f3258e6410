"""MMD between posteriors in function space: networks are compared by what they predict."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_bnn.metrics.distances import Blocks, distance_blocks
from lightning_bnn.metrics.kernels import KernelGrid, mmd2_by_kernel
from lightning_bnn.metrics.mmd import MMDTable, Reduction
from lightning_bnn.metrics.validation import check_finite

__all__ = ["function_space_mmd"]


# ------------------------------------------------------------ function
def function_space_mmd(
    x: Float[Tensor, " samples *shape"],
    y: Float[Tensor, " others *shape"],
    reduction: Reduction = "median",
    grid: KernelGrid | None = None,
) -> Float[Tensor, ""]:
    r"""Unbiased MMD^2 between two sets of networks, each network being its predictions.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}\, k(y, y') - 2\, \mathbb{E}\, k(x, y)

    Two posteriors that differ only by symmetries of the networks are equal here.

    Args:
        x: predictions of the reference's networks, ``(samples, batch, ...)``.
        y: those of the other networks for the same inputs; the number of networks may differ.
        reduction: over the twenty kernels.
        grid: the rule for bandwidths.

    >>> x, y = torch.eye(3)[:, None], torch.eye(3)[:2, None] / 2
    >>> function_space_mmd(x, y)
    tensor(-0.1430, dtype=torch.float64)
    """
    _check_predictions(x, y)
    if not x[0].numel():
        return torch.full((), torch.nan, dtype=torch.float64)
    return _reduce(_blocks(x, y), reduction, grid or KernelGrid())


def _blocks(x: Tensor, y: Tensor) -> Blocks:
    dtype = torch.promote_types(x.dtype, y.dtype)
    x, y = (t.detach().to(x.device, dtype).flatten(1) for t in (x, y))
    return distance_blocks([(x, y)], (len(x), len(y)), x.shape[1])


def _reduce(blocks: Blocks, reduction: Reduction, grid: KernelGrid) -> Tensor:
    values = mmd2_by_kernel(blocks, grid)
    return MMDTable(("predictions",), torch.ones(1), values[None].cpu()).reduce(reduction)


def _check_predictions(x: Tensor, y: Tensor) -> None:
    floating = x.is_floating_point() and y.is_floating_point()
    if not floating or x.ndim < 2 or y.ndim < 2 or x.shape[1:] != y.shape[1:]:
        raise ValueError(
            "`x` and `y` must be float predictions (samples, batch, ...) for the same inputs, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    if min(len(x), len(y)) < 2:
        raise ValueError(f"MMD needs at least 2 networks on each side, got {len(x)} and {len(y)}.")
    check_finite(x, "x")
    check_finite(y, "y")
