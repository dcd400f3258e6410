r"""Twenty kernels of distances, their unbiased MMD^2, and their sums over modes.

Laplace kernels :math:`\exp(-\|x-y\|_1/\lambda)` come first, then Gaussian kernels
:math:`\exp(-\|x-y\|_2^2/\lambda^2)`, each with a geometric grid of bandwidths.

With block means :math:`B_{kl}` between modes, :math:`W_k` within one, :math:`C_k` between a mode
and the reference, and :math:`A` within the reference, from pairs of different chains only,

.. math::
    \text{law} = A + \frac{\sum_{k \ne l} B_{kl}}{K (K - 1)} - \frac{2}{K} \sum_k C_k \qquad
    \text{mixture} = A + \frac{\sum_{k \ne l} B_{kl} + \sum_k W_k}{K^2} - \frac{2}{K} \sum_k C_k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_bnn.metrics.distances import Blocks, Distances

__all__ = ["KernelGrid"]

_CHUNK = 2**22
_PARTS = 20
"""Largest number of parts that the jackknife leaves out in turn."""


@dataclass(frozen=True)
class KernelGrid:
    r"""The rule of MMDAgg for bandwidths, from the distances between two sets.

    .. math:: \lambda_i = \frac{d_{min}}{2} \Big(\frac{4\, d_{max}}{d_{min}}\Big)^{i / (n - 1)},
        \quad i = 0, \dots, n - 1

    Args:
        n_bandwidths: number of bandwidths per norm.
        min_distance: lower limit of the smallest distance, below which the 5 % quantile and then
            this limit are used. ``None`` sets no absolute limit: multiplying weights by a constant
            then leaves the MMD unchanged.
        min_max_distance: lower limit of the largest distance; ``None`` as above.
        max_samples: number of rows of each set, from the first, that determine bandwidths.

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
        """Return the grid for one norm, from the distances ``(rows, rows)`` between the sets.

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
    return torch.where(values > 0, values, torch.inf).min().nan_to_num(posinf=1.0)


def kernel_bandwidths(cross: Distances, grid: KernelGrid) -> Tensor:
    """Return the bandwidths of all kernels, Laplace first."""
    return torch.cat([grid.bandwidths(cross.l1), grid.bandwidths(cross.l2.sqrt())])


def kernel_values(
    distances: Distances, bandwidths: Float[Tensor, " kernels"]
) -> Float[Tensor, " kernels *pairs"]:
    """Return the kernels of some pairs, ``(kernels, *pairs)``.

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
    """Return the unbiased MMD^2 of every kernel, with bandwidths from the distances."""
    return unbiased_mmd2(blocks, kernel_bandwidths(blocks.xy, grid))


def unbiased_mmd2(
    blocks: Blocks, bandwidths: Float[Tensor, " kernels"]
) -> Float[Tensor, " kernels"]:
    r"""The unbiased estimate of MMD^2 for every kernel. It may be negative.

    .. math::
        \frac{\sum_{i \ne j} k(x_i, x_j)}{m (m - 1)} + \frac{\sum_{i \ne j} k(y_i, y_j)}{n (n - 1)}
        - \frac{2}{m n} \sum_{i, j} k(x_i, y_j)
    """
    xx, yy = (_mean(block.map(_pairs), bandwidths) for block in (blocks.xx, blocks.yy))
    return xx + yy - 2 * _mean(blocks.xy, bandwidths)


def _pairs(matrix: Tensor) -> Tensor:
    """Return the entries of a symmetric matrix above its diagonal."""
    size = len(matrix)
    first, second = torch.triu_indices(size, size, 1, device=matrix.device)
    return matrix[first, second]


def _mean(distances: Distances, bandwidths: Tensor) -> Tensor:
    """Return the mean of every kernel over all pairs, some at a time."""
    pairs = distances.map(Tensor.flatten)
    size = max(1, _CHUNK // len(bandwidths))
    parts = zip(pairs.l1.split(size), pairs.l2.split(size), strict=True)
    return sum(
        (kernel_values(Distances(*chunk), bandwidths).sum(1) for chunk in parts),
        torch.zeros_like(bandwidths),
    ) / len(pairs.l1)


# ------------------------------------------------------------ modes


@dataclass(frozen=True)
class Modes:
    """The grouping of networks into modes.

    Attributes:
        labels: index of the mode of every network.
        sizes: number of networks per mode.
        parts: part of every mode, for errors from leaving out one part at a time.
    """

    labels: Tensor
    sizes: Tensor
    parts: Tensor

    @classmethod
    def of(cls, names: Sequence[int] | Tensor | None, rows: int, argument: str = "modes") -> Modes:
        """Group networks by the labels of their modes (None: each is a mode of its own).

        >>> Modes.of([7, 7, 3], 3).sizes
        tensor([1, 2])
        """
        labels_given = torch.arange(rows) if names is None else _numbers(names, argument)
        whole = not (labels_given.is_floating_point() or labels_given.is_complex())
        if labels_given.shape != (rows,) or not whole:
            raise ValueError(
                f"`{argument}` must be one whole number for each of {rows} networks, got "
                f"{labels_given.dtype} of shape {tuple(labels_given.shape)}."
            )
        _, labels, sizes = labels_given.cpu().unique(return_inverse=True, return_counts=True)
        count = len(sizes)
        parts = torch.arange(count) * min(count, _PARTS) // count
        return cls(labels, sizes, parts)

    def __len__(self) -> int:
        return len(self.sizes)

    def per_part(self) -> Tensor:
        """Number of modes per part."""
        return self.parts.bincount().double()

    def in_parts(self) -> Tensor:
        """Indicator of networks by part, ``(networks, parts)``, with equal weights of all modes."""
        return self.shares()[:, None] * _indicator(self.parts[self.labels])

    def shares(self) -> Tensor:
        """Weight of every network in its mode."""
        return 1 / self.sizes.double()[self.labels]

    def moved(self, device: torch.device) -> Modes:
        """Move to another device."""
        return Modes(self.labels.to(device), self.sizes.to(device), self.parts.to(device))


class KernelSums(NamedTuple):
    """Sums of block means for every kernel: within the reference, across, and within the other.

    ``xx`` and ``yy`` are sums over pairs of different modes by their parts, ``xy`` by the part of
    the reference and the mode of the other. ``within`` is the mean of every mode over its own
    pairs, one for a mode of a single network.
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    within: Tensor


class ModesMMD(NamedTuple):
    """MMD^2 of one layer by kernel: for all modes, and without each part of modes or chains.

    ``law``, ``mixture`` and ``floor`` are ``(left out, kernels)``, with nothing left out in the
    first row. ``single`` has each mode alone, ``(modes, kernels)``.
    """

    law: Tensor
    mixture: Tensor
    floor: Tensor
    single: Tensor


def _numbers(names: Any, argument: str) -> Tensor:
    try:
        return torch.as_tensor(names)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"`{argument}` must be whole numbers, got {names!r:.60}.") from None


def kernel_sums(blocks: Blocks, chains: Modes, modes: Modes, bandwidths: Tensor) -> KernelSums:
    """Compute all sums from the distances and bandwidths of one layer.

    Args:
        blocks: distances.
        chains: of the reference.
        modes: of the other.
        bandwidths: of every kernel.
    """
    device = bandwidths.device
    chains, modes = chains.moved(device), modes.moved(device)
    xx, _ = _pair_sums(blocks.xx, chains, bandwidths)
    yy, within = _pair_sums(blocks.yy, modes, bandwidths)
    return KernelSums(xx, _cross_sums(blocks.xy, chains, modes, bandwidths), yy, within)


def _pair_sums(within_set: Distances, modes: Modes, bandwidths: Tensor) -> tuple[Tensor, Tensor]:
    """Sum between modes by part, ``(kernels, parts, parts)``, and average within each mode."""
    rows, count = len(modes.labels), len(bandwidths)
    labels, weights = modes.labels, modes.in_parts()
    between = weights.new_zeros(count, weights.shape[1], weights.shape[1])
    within = weights.new_zeros(count, len(modes))
    step = max(1, _CHUNK // (count * rows))
    for start in range(0, rows, step):
        some, others = slice(start, start + step), slice(start, rows)
        values = kernel_values(within_set.map(lambda d: d[some, others]), bandwidths)  # noqa: B023
        values.triu_(1)
        same = labels[some, None] == labels[None, others]
        within.index_add_(1, labels[some], (values * same).sum(-1))
        values.masked_fill_(same, 0)
        between += weights[some].T @ (values @ weights[others])
    pairs = modes.sizes * (modes.sizes - 1) / 2
    alone = torch.ones_like(within)
    within = torch.where(pairs > 0, within / pairs.clamp_min(1), alone)
    return between + between.mT, within


def _cross_sums(across: Distances, chains: Modes, modes: Modes, bandwidths: Tensor) -> Tensor:
    """Sum by part of the reference and mode of the other, ``(kernels, parts, modes)``."""
    weights, shares, count = chains.in_parts(), modes.shares(), len(bandwidths)
    sums = weights.new_zeros(count, weights.shape[1], len(modes))
    step = max(1, _CHUNK // (count * len(shares)))
    for start in range(0, len(weights), step):
        some = slice(start, start + step)
        values = kernel_values(across.map(lambda d: d[some]), bandwidths) * shares  # noqa: B023
        by_mode = values.new_zeros(*values.shape[:2], len(modes))
        by_mode.index_add_(2, modes.labels, values)
        sums += weights[some].T @ by_mode
    return sums


# ------------------------------------------------------------ estimates
def mmd_of_modes(sums: KernelSums, chains: Modes, modes: Modes) -> ModesMMD:
    """Return law, mixture, its floor and each mode alone, also without each part.

    Args:
        sums: of one layer.
        chains: of the reference.
        modes: of the other.
    """
    device = sums.xx.device
    kept_x, kept_y = (mask.to(device) for mask in _masks(chains, modes))
    by_part = _indicator(modes.parts).to(device)
    k = (kept_y @ modes.per_part().to(device))[:, None]
    c = (kept_x @ chains.per_part().to(device))[:, None]
    a = _kept_sum(kept_x, sums.xx, kept_x) / (c * (c - 1))
    b = _kept_sum(kept_y, sums.yy, kept_y)
    cross = 2 * _kept_sum(kept_x, sums.xy @ by_part, kept_y) / (c * k)
    within = kept_y @ (sums.within @ by_part).T
    alone = 2 * sums.xy.sum(1).T / len(chains)
    return ModesMMD(
        law=a + b / (k * (k - 1)) - cross,
        mixture=a + (b + within) / k.square() - cross,
        floor=(1 - a) / k,
        single=a[0] + sums.within.T - alone,
    )


def left_out_parts(chains: Modes, modes: Modes) -> tuple[int, int]:
    """Return the numbers of parts of modes and of chains to leave out, 0 for fewer than three."""
    of_modes, of_chains = (len(m.per_part()) for m in (modes, chains))
    return (of_modes if of_modes >= 3 else 0), (of_chains if of_chains >= 3 else 0)


def _masks(chains: Modes, modes: Modes) -> tuple[Tensor, Tensor]:
    """Return masks of chains and modes: all, then all but one part of modes, then of chains."""
    of_modes, of_chains = left_out_parts(chains, modes)
    kept_x = torch.ones(1 + of_modes + of_chains, len(chains.per_part()), dtype=torch.float64)
    kept_y = torch.ones(len(kept_x), len(modes.per_part()), dtype=torch.float64)
    kept_y[1 : 1 + of_modes] -= torch.eye(kept_y.shape[1])[:of_modes]
    kept_x[1 + of_modes :] -= torch.eye(kept_x.shape[1])[:of_chains]
    return kept_x, kept_y


def _kept_sum(left: Tensor, sums: Tensor, right: Tensor) -> Tensor:
    """Sum every kernel over the remaining parts, ``(left out, kernels)``."""
    return torch.einsum("rg,kgh,rh->rk", left, sums, right)


def _indicator(groups: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(groups).double()
