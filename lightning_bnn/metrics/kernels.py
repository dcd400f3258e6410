r"""Twenty kernels out of distances, and the unbiased MMD^2 of each.

Laplace kernels :math:`\exp(-\|x-y\|_1/\lambda)` come first, then Gaussian kernels
:math:`\exp(-\|x-y\|_2^2/\lambda^2)`, each with a geometric grid of bandwidths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_bnn.metrics.distances import Blocks, Distances

__all__ = ["KernelGrid", "kernel_bandwidths", "kernel_values", "mmd2_by_kernel", "unbiased_mmd2"]

_CHUNK = 2**22


@dataclass(frozen=True)
class KernelGrid:
    r"""How bandwidths follow from the distances between two sets; the rule of MMDAgg.

    .. math:: \lambda_i = \frac{d_{min}}{2} \Big(\frac{4\, d_{max}}{d_{min}}\Big)^{i / (n - 1)},
        \quad i = 0, \dots, n - 1

    Args:
        n_bandwidths: per norm.
        min_distance: smallest distances below this are replaced by the 5 % quantile, and that by
            this. ``None`` for a rule without absolute numbers: weights multiplied by a constant
            then have the same MMD.
        min_max_distance: the largest distance counts as at least this; ``None`` as above.
        max_samples: rows of each set, from the first, that are looked at.

    References:
        | MMD Aggregated Two-Sample Test (Schrab et al., 2023)
        | https://www.jmlr.org/papers/v24/21-1289.html

    >>> KernelGrid(3).bandwidths(torch.tensor([[1.0, 4.0]]))  # from 1 / 2 to 4 * 2
    tensor([0.5000, 2.0000, 8.0000])
    """

    n_bandwidths: int = 10
    min_distance: float | None = 0.1
    min_max_distance: float | None = 0.3
    max_samples: int = 500

    def __post_init__(self) -> None:
        if self.n_bandwidths < 2:
            raise ValueError(f"`n_bandwidths` must be at least 2, got {self.n_bandwidths}.")
        if self.max_samples < 1:
            raise ValueError(f"`max_samples` must be at least 1, got {self.max_samples}.")

    def bandwidths(self, cross: Float[Tensor, "rows others"]) -> Float[Tensor, " bandwidths"]:
        """The grid for one norm, from the distances ``(rows, rows)`` between the sets.

        >>> KernelGrid(3).bandwidths(torch.tensor([[1.0, 4.0]]))
        tensor([0.5000, 2.0000, 8.0000])
        """
        cross = cross[: self.max_samples, : self.max_samples].flatten()
        low, high = cross.min(), cross.max()
        floor = self.min_distance or 0.0
        if low < floor or low == 0:
            low = cross.sort().values[int(len(cross) * 0.05)].clamp_min(floor)
        high = high.clamp_min(self.min_max_distance or 0.0)
        low, high = torch.where(low > 0, low, _smallest_positive(cross)) / 2, high * 2
        high = torch.where(high > 0, high, 4 * low)
        steps = torch.arange(self.n_bandwidths, dtype=cross.dtype, device=cross.device)
        return low * (high / low) ** (steps / (self.n_bandwidths - 1))


def _smallest_positive(values: Tensor) -> Tensor:
    positive = values[values > 0]
    return positive.min() if len(positive) else values.new_ones(())


def kernel_bandwidths(cross: Distances, grid: KernelGrid) -> Tensor:
    """Bandwidths of all kernels, Laplace first."""
    return torch.cat([grid.bandwidths(cross.l1), grid.bandwidths(cross.l2.sqrt())])


def kernel_values(
    distances: Distances, bandwidths: Float[Tensor, " kernels"]
) -> Float[Tensor, " kernels *pairs"]:
    """The kernels of some pairs, ``(kernels, *pairs)``.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> kernel_values(Distances(one, 4 * one), torch.tensor([1.0, 2.0]))
    tensor([[0.3679],
            [0.3679]], dtype=torch.float64)
    """
    laplace, gauss = bandwidths.chunk(2)
    lead = (-1, *(1,) * distances.l1.ndim)
    first = (-distances.l1 / laplace.reshape(lead)).exp_()
    return torch.cat([first, (-distances.l2 / gauss.square().reshape(lead)).exp_()])


def mmd2_by_kernel(blocks: Blocks, grid: KernelGrid) -> Tensor:
    """The unbiased MMD^2 of every kernel, whose bandwidths the distances between the sets give."""
    return unbiased_mmd2(blocks, kernel_bandwidths(blocks.xy, grid))


def unbiased_mmd2(
    blocks: Blocks, bandwidths: Float[Tensor, " kernels"]
) -> Float[Tensor, " kernels"]:
    r"""The unbiased estimate of MMD^2 for every kernel; it may be negative.

    .. math::
        \frac{\sum_{i \ne j} k(x_i, x_j)}{m (m - 1)} + \frac{\sum_{i \ne j} k(y_i, y_j)}{n (n - 1)}
        - \frac{2}{m n} \sum_{i, j} k(x_i, y_j)
    """
    xx, xy, yy = (_mean(block, bandwidths) for block in blocks)
    return xx + yy - 2 * xy


def _mean(distances: Distances, bandwidths: Tensor) -> Tensor:
    """Mean of every kernel over pairs, some at a time."""
    pairs = distances.map(Tensor.flatten)
    size = max(1, _CHUNK // len(bandwidths))
    parts = zip(pairs.l1.split(size), pairs.l2.split(size), strict=True)
    return sum(
        (kernel_values(Distances(*part), bandwidths).sum(1) for part in parts),
        torch.zeros_like(bandwidths),
    ) / len(pairs.l1)
