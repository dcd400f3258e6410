r"""Sums of kernels over networks of several modes, and what they are without some of the modes.

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
from torch import Tensor

from lightning_bnn.metrics.distances import Blocks, Distances, square
from lightning_bnn.metrics.kernels import kernel_values

__all__ = ["KernelSums", "Modes", "ModesMMD", "kernel_sums", "mmd_of_modes"]

_CHUNK = 2**22
_PARTS = 20
"""The jackknife leaves out at most so many parts in turn."""


@dataclass(frozen=True)
class Modes:
    """Which networks belong together.

    Attributes:
        labels: the mode of every network, counted from zero.
        sizes: networks of every mode.
        parts: the part of every mode; one part at a time is left out for errors.
    """

    labels: Tensor
    sizes: Tensor
    parts: Tensor

    @classmethod
    def of(cls, names: Sequence[int] | Tensor | None, rows: int, argument: str = "modes") -> Modes:
        """From the mode of every network, by any numbers; None if each is a mode of its own.

        >>> Modes.of([7, 7, 3], 3).sizes
        tensor([1, 2])
        """
        given = torch.arange(rows) if names is None else _numbers(names, argument)
        whole = not (given.is_floating_point() or given.is_complex())
        if given.shape != (rows,) or not whole:
            raise ValueError(
                f"`{argument}` must be one whole number for each of {rows} networks, got "
                f"{given.dtype} of shape {tuple(given.shape)}."
            )
        _, labels, sizes = given.cpu().unique(return_inverse=True, return_counts=True)
        count = len(sizes)
        parts = torch.arange(count) * min(count, _PARTS) // count
        return cls(labels, sizes, parts)

    def __len__(self) -> int:
        return len(self.sizes)

    def per_part(self) -> Tensor:
        """How many modes every part has."""
        return self.parts.bincount().double()

    def in_parts(self) -> Tensor:
        """Networks by part, ``(networks, parts)``: all modes have the same weight."""
        return self.shares()[:, None] * _indicator(self.parts[self.labels])

    def shares(self) -> Tensor:
        """What every network counts in its mode."""
        return 1 / self.sizes.double()[self.labels]

    def moved(self, device: torch.device) -> Modes:
        """The same on another device."""
        return Modes(self.labels.to(device), self.sizes.to(device), self.parts.to(device))


class KernelSums(NamedTuple):
    """Sums of block means of every kernel: within the reference, across, and within the other.

    ``xx`` and ``yy`` are sums over pairs of different modes by the parts that they are in, ``xy``
    by the part of the reference and the mode of the other; ``within`` is the mean of every mode
    over its own pairs, one for a mode that is a single network.
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    within: Tensor


class ModesMMD(NamedTuple):
    """MMD^2 of one layer by kernel: of all modes, without each part of them, without chains.

    ``law``, ``mixture`` and ``floor`` are ``(left out, kernels)``, nothing being left out in the
    first row; ``single`` is each mode alone, ``(modes, kernels)``.
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
    """All sums that distances and bandwidths of one layer give.

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


def _pair_sums(packed: Distances, modes: Modes, bandwidths: Tensor) -> tuple[Tensor, Tensor]:
    """Between modes by part, ``(kernels, parts, parts)``, and the mean within each mode."""
    rows, count = len(modes.labels), len(bandwidths)
    full, labels, weights = packed.map(lambda d: square(d, rows)), modes.labels, modes.in_parts()
    between = weights.new_zeros(count, weights.shape[1], weights.shape[1])
    within = weights.new_zeros(count, len(modes))
    step = max(1, _CHUNK // (count * rows))
    for start in range(0, rows, step):
        some, others = slice(start, start + step), slice(start, rows)
        values = kernel_values(full.map(lambda d: d[some, others]), bandwidths)  # noqa: B023
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
    """By part of the reference and mode of the other, ``(kernels, parts, modes)``."""
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
    """Law, mixture, its floor and each mode alone, and the same without each part.

    Args:
        sums: of one layer.
        chains: of the reference.
        modes: of the other.
    """
    device = sums.xx.device
    kept_x, kept_y = (kept.to(device) for kept in _kept(chains, modes))
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
    """How many parts of the modes, and of the chains, can be left out; none of fewer than three."""
    of_modes, of_chains = (len(m.per_part()) for m in (modes, chains))
    return (of_modes if of_modes >= 3 else 0), (of_chains if of_chains >= 3 else 0)


def _kept(chains: Modes, modes: Modes) -> tuple[Tensor, Tensor]:
    """What stays of chains and of modes: all, then all but one part of modes, then of chains."""
    of_modes, of_chains = left_out_parts(chains, modes)
    kept_x = torch.ones(1 + of_modes + of_chains, len(chains.per_part()), dtype=torch.float64)
    kept_y = torch.ones(len(kept_x), len(modes.per_part()), dtype=torch.float64)
    kept_y[1 : 1 + of_modes] -= torch.eye(kept_y.shape[1])[:of_modes]
    kept_x[1 + of_modes :] -= torch.eye(kept_x.shape[1])[:of_chains]
    return kept_x, kept_y


def _kept_sum(left: Tensor, sums: Tensor, right: Tensor) -> Tensor:
    """Of every kernel over what stays, ``(left out, kernels)``."""
    return torch.einsum("rg,kgh,rh->rk", left, sums, right)


def _indicator(groups: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(groups).double()
