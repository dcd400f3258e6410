"""Predicted densities of numbers, mixed over networks: what `Averages` are for classes.

Mixtures can be mixed again, over modes or over all modes but one; so every number of one mode, of
all, and of the jackknife comes from one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["LogDensities", "Mixtures"]


@dataclass(frozen=True)
class Mixtures:
    r"""Equally weighted mixtures of the Gaussians that networks predict.

    .. math:: p(y) = \tfrac1S \textstyle\sum_s N(y;\; \mu_s, \sigma_s^2)

    Attributes:
        means: ``(..., examples, targets, networks)``, in float64.
        stds: standard deviations of the same shape.

    >>> from lightning_bnn.likelihoods import Gaussian
    >>> mixture = Mixtures.of_each(Gaussian(), torch.zeros(4, 10, 1)).mean()  # of four networks
    >>> mixture.examples, mixture.means.shape, mixture.components()[0].shape
    (10, torch.Size([10, 1, 4]), torch.Size([4, 10, 1]))
    """

    means: Tensor
    stds: Tensor

    @classmethod
    def of_each(cls, likelihood: Any, outputs: Tensor) -> Mixtures:
        """The prediction of every single network, ``(networks, examples, targets, 1)``."""
        means, stds = likelihood.moments(outputs.detach().double())
        return cls(means[..., None], stds.detach().double()[..., None])

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return self.means.shape[-3]

    def components(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations as metrics take them, ``(networks, examples, targets)``."""
        return self.means.movedim(-1, 0), self.stds.movedim(-1, 0)

    def __getitem__(self, which: Any) -> Mixtures:
        return Mixtures(self.means[which], self.stds[which])

    def mean(self) -> Mixtures:
        """The mixture over the first dimension: all of its networks with equal weights."""
        return Mixtures(*(t.movedim(0, -2).flatten(-2) for t in (self.means, self.stds)))

    @classmethod
    def stacked(cls, parts: Sequence[Mixtures]) -> Mixtures:
        """Several modes along a new first dimension, with equally many networks: the first ones."""
        count = min(part.means.shape[-1] for part in parts)
        return cls(
            torch.stack([part.means[..., :count] for part in parts]),
            torch.stack([part.stds[..., :count] for part in parts]),
        )

    @classmethod
    def joined(cls, parts: Sequence[Mixtures]) -> Mixtures:
        """Several batches as one set of examples."""
        return cls(torch.cat([p.means for p in parts]), torch.cat([p.stds for p in parts]))


@dataclass(frozen=True)
class LogDensities:
    r"""Log-densities of targets, for likelihoods of which nothing else is known.

    .. math:: \log \tfrac1S \textstyle\sum_s p_s(y)

    Attributes:
        values: ``(..., examples)``, in float64.

    >>> networks = LogDensities(torch.tensor([[0.2], [0.4]]).log())  # of two networks
    >>> networks.mean().values.exp()  # the density of their mixture
    tensor([0.3000])
    """

    values: Tensor

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return self.values.shape[-1]

    def __getitem__(self, which: Any) -> LogDensities:
        return LogDensities(self.values[which])

    def mean(self) -> LogDensities:
        """The density of the mixture over the first dimension."""
        return LogDensities(self.values.logsumexp(0) - math.log(len(self.values)))

    @classmethod
    def stacked(cls, parts: Sequence[LogDensities]) -> LogDensities:
        """Several modes along a new first dimension."""
        return cls(torch.stack([part.values for part in parts]))

    @classmethod
    def joined(cls, parts: Sequence[LogDensities]) -> LogDensities:
        """Several batches as one set of examples."""
        return cls(torch.cat([part.values for part in parts]))
