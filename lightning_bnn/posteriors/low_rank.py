r"""A Gaussian with a low-rank plus diagonal covariance, as SWAG collects it.

.. math:: \theta = \bar\theta + \sqrt{s} \Big(\tfrac{1}{\sqrt 2} \sigma \odot z_1
    + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2\Big)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.params import Params, is_weight, ravel, stack_size, unravel
from lightning_bnn.posteriors.alignment import Align, alignment
from lightning_bnn.posteriors.base import Posterior, check_count, standard_normal, with_constants
from lightning_bnn.symmetry import Symmetries

__all__ = ["LowRankGaussian"]


class LowRankGaussian(Posterior):
    r"""Half of the covariance is diagonal, half is that of the last networks of a trajectory.

    .. math:: w = \mu + \sqrt{s} \Big(\tfrac{1}{\sqrt 2} \sigma \odot z_1
        + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2\Big)

    One draw of the K low-rank numbers moves all tensors, so that correlations between layers are
    kept; K is the number of networks that are there.

    Args:
        mean: one network.
        std: standard deviations of its weights.
        deviations: a stack of K networks minus the mean.
        scale: multiplies the covariance.
        names: what counts as weights, by default all floating tensors but BatchNorm statistics.

    References:
        | A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
        | https://arxiv.org/abs/1902.02476

    >>> deviations = {"w": torch.tensor([[1.0, 2.0], [-1.0, -2.0]])}
    >>> posterior = LowRankGaussian({"w": torch.zeros(2)}, {"w": torch.zeros(2)}, deviations)
    >>> draws = posterior.sample(20_000, torch.Generator().manual_seed(0))["w"]
    >>> torch.allclose(draws[:, 1], 2 * draws[:, 0], atol=1e-5)  # both weights move together
    True
    >>> draws.std(0).round(decimals=1)
    tensor([1., 2.])
    """

    mean: Tensor
    std: Tensor
    deviations: Tensor

    def __init__(
        self,
        mean: Params,
        std: Params,
        deviations: Params,
        scale: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not scale >= 0:
            raise ValueError(f"`scale` must not be negative, got {scale}.")
        vector, self.spec = ravel(mean, names)
        weights = self.spec.names
        self.register_buffer("mean", vector.detach().clone())
        self.register_buffer("std", ravel(std, weights)[0].detach().clone())
        rows = ravel(deviations, weights, stacked=True)[0]
        if len(rows) < 2:
            raise ValueError(f"`deviations` must hold at least 2 networks, got {len(rows)}.")
        self.register_buffer("deviations", rows.detach().clone())
        self.scale, self.order = scale, tuple(mean)
        self.constants = NamedTensors({n: t for n, t in mean.items() if n not in weights})

    @classmethod
    def fit(
        cls,
        networks: Params,
        rank: int | None = None,
        scale: float = 1.0,
        align: Align | None = None,
        symmetries: Symmetries | None = None,
        model: nn.Module | None = None,
        batches: Iterable[Any] | None = None,
        **options: Any,
    ) -> LowRankGaussian:
        """From a stack of networks: moments of all, deviations of the last ones.

        Args:
            networks: a stack, in the order of the trajectory.
            rank: how many deviations are kept, by default 20 or all that there are.
            scale: multiplies the covariance.
            align: bring the networks into one frame first: ``"joint"``, or by ``"weights"`` or
                ``"activations"`` into that of the first.
            symmetries: what ``discover`` returned, for the alignment.
            model: gives the computation, for activations.
            batches: inputs, for activations.
            **options: of `lightning_bnn.symmetry.align`, for a joint frame.
        """
        size = stack_size(networks)
        if size < 2:
            raise ValueError(f"`networks` must hold at least 2 networks, got {size}.")
        if rank is not None and not 2 <= rank <= size:
            raise ValueError(f"`rank` must be between 2 and {size}, got {rank}.")
        if align is not None:
            move = alignment(networks, None, align, symmetries, model, batches, **options)
            networks = move(networks)
        elif options:
            raise ValueError(f"`{min(options)}` is used with `align`, which is None.")
        kept = min(rank or 20, size)
        weights = {n: t for n, t in networks.items() if is_weight(n, t)}
        mean = {n: t.mean(0) if n in weights else t[-1] for n, t in networks.items()}
        std = {n: t.std(0, correction=0) for n, t in weights.items()}
        deviations = {n: t[-kept:] - mean[n] for n, t in weights.items()}
        return cls(mean, std, deviations, scale)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """A stack of n networks."""
        check_count(n)
        rank, size = self.deviations.shape
        one, two = (standard_normal((n, k), self.mean, generator) for k in (size, rank))
        moved = self.std * one + two @ self.deviations / math.sqrt(rank - 1)
        weights = unravel(self.mean + math.sqrt(self.scale / 2) * moved, self.spec)
        return with_constants(weights, self.constants.tensors(), self.order)

    def log_prob(self, params: Params) -> Tensor:
        """Log-density of every network of a stack."""
        rows, _ = ravel(params, self.spec.names, stacked=True)
        factor = self.deviations.T * math.sqrt(self.scale / (2 * (len(self.deviations) - 1)))
        return torch.distributions.LowRankMultivariateNormal(
            self.mean, factor, self.scale / 2 * self.std.square()
        ).log_prob(rows)
