"""Predictions beside those of a reference: how far apart are they, example by example?"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.judging.averages import Averages
from lightning_bnn.judging.densities import Mixtures
from lightning_bnn.metrics.agreement import kl_of_each
from lightning_bnn.metrics.density_scores import energy_distance_of_each, wasserstein_of_each
from lightning_bnn.metrics.gaussian_mixture import mean_difference, thinned

__all__ = ["ClassReference", "GaussianReference", "reference_of"]

_NETWORKS = 200
"""On each side, whose predictions are compared pair by pair."""


class ClassReference:
    """Agreement with a reference's mean probabilities, total variation and divergence from them.

    Args:
        averages: the reference's.
    """

    def __init__(self, averages: Averages) -> None:
        self.averages = averages

    def distances(self, averages: Averages) -> dict[str, Tensor]:
        """Of every example.

        Args:
            averages: what is compared.
        """
        _check_kind(averages, Averages)
        probs, others = averages.probs, self.averages.probs
        return {
            "agree": (probs.argmax(-1) == others.argmax(-1)).double(),
            "tv": (probs - others).abs().sum(-1) / 2,
            "kl": kl_of_each(probs, others),
        }


class GaussianReference:
    """Distances to what a reference's networks compute, and to its predictive densities.

    Args:
        mixtures: the reference's.
    """

    def __init__(self, mixtures: Mixtures) -> None:
        self.means, self.stds = thinned(*mixtures.components(), _NETWORKS)

    @cached_property
    def _differences(self) -> tuple[Tensor, Tensor]:
        """Mean differences of function values and of densities: the same for all comparisons."""
        points = torch.zeros_like(self.stds)
        return mean_difference(self.means, points), mean_difference(self.means, self.stds)

    def distances(self, mixtures: Mixtures) -> dict[str, Tensor]:
        """Of every example, a mean over its targets.

        Args:
            mixtures: what is compared.
        """
        _check_kind(mixtures, Mixtures)
        means, stds = thinned(*mixtures.components(), _NETWORKS)
        if not bool((means + stds).isfinite().all()):
            unknown = torch.full((means.shape[1],), torch.nan, dtype=torch.float64)
            return {"energy_f": unknown, "energy": unknown, "w2_f": unknown}
        pairs = ((torch.zeros_like(stds), torch.zeros_like(self.stds)), (stds, self.stds))
        functions, densities = (
            energy_distance_of_each(means, mine, self.means, theirs, known).mean(-1)
            for (mine, theirs), known in zip(pairs, self._differences, strict=True)
        )
        moved = wasserstein_of_each(means, self.means).mean(-1)
        return {"energy_f": functions, "energy": densities, "w2_f": moved}


def _check_kind(predictions: Any, kind: type) -> None:
    if not isinstance(predictions, kind):
        raise ValueError(
            f"Predictions of another kind than the reference's cannot be compared with them: "
            f"{type(predictions).__name__} and {kind.__name__}."
        )


def reference_of(predictions: Any) -> ClassReference | GaussianReference | None:
    """What compares with a reference's predictions; None of log-densities, which are no prediction.

    Args:
        predictions: `Averages`, `Mixtures` or `LogDensities`.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> outputs = torch.randn(5, 8, 3)
    >>> averages = Averages.of(Categorical(), outputs)
    >>> far = reference_of(averages).distances(averages)
    >>> far["agree"].mean().item(), far["tv"].mean().item()
    (1.0, 0.0)
    """
    if isinstance(predictions, Averages):
        return ClassReference(predictions)
    return GaussianReference(predictions) if isinstance(predictions, Mixtures) else None
