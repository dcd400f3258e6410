"""What every example says about a predicted density; all numbers of regression are means of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.judging.densities import Mixtures
from lightning_bnn.metrics.density_scores import crps_of_each
from lightning_bnn.metrics.gaussian_mixture import mixture_moments, mixture_nll
from lightning_bnn.metrics.intervals import inside, width_of_each

__all__ = ["INTERVAL", "DensityScores"]

INTERVAL = 0.9
"""Probability of the central intervals that are judged."""


@dataclass(frozen=True)
class DensityScores:
    """Scores of every example, by name; those of examples that cannot be judged are NaN.

    Attributes:
        of_each: ``(examples,)``, or ``(examples, targets)``.
    """

    of_each: Mapping[str, Tensor]

    @classmethod
    def of(cls, mixtures: Mixtures, targets: Tensor | None) -> DensityScores:
        """Of predictions, compared with targets if there are any.

        Args:
            mixtures: predictions.
            targets: ``(examples, targets)``; None of what is out of distribution.
        """
        means, stds = mixtures.components()
        judged = (means.isfinite() & stds.isfinite() & (stds > 0)).all(0).all(-1)
        if targets is not None:
            _check_targets(targets, means)
            targets = targets.detach().double()
            judged = judged & targets.isfinite().all(-1)
            targets = torch.where(judged[:, None], targets, 0.0)
        means = torch.where(judged[:, None], means, 0.0)
        stds = torch.where(judged[:, None], stds, 1.0)
        scores = _spread(means, stds)
        if targets is not None:
            scores |= _quality(means, stds, targets)
        unknown = ~judged
        return cls(
            {
                name: values.masked_fill(unknown.reshape(-1, *(1,) * (values.ndim - 1)), math.nan)
                for name, values in scores.items()
            }
        )

    def __getitem__(self, which: Any) -> DensityScores:
        return DensityScores({name: values[which] for name, values in self.of_each.items()})


def _spread(means: Tensor, stds: Tensor) -> dict[str, Tensor]:
    """What the predictions alone say, without targets."""
    return {
        "epistemic_var": (means - means.mean(0)).square().mean(0).sum(-1),
        "sharpness": mixture_moments(means, stds)[1].mean(-1),
    }


def _quality(means: Tensor, stds: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Of predictions and targets; log-densities are of all targets of an example together."""
    of_networks = mixture_nll_of_each(means, stds, targets).sum(-1)
    mean, std = mixture_moments(means, stds)
    error = mean - targets
    u = M.pit(means, stds, targets)
    return {
        "nll": math.log(len(means)) - (-of_networks).logsumexp(0),
        "nll_moments": mixture_nll(mean[None], std[None], targets).sum(-1),
        "squares": error.square(),
        "mae": error.abs().mean(-1),
        "crps": crps_of_each(means, stds, targets).mean(-1),
        "pit": u,
        "cover90": inside(u, INTERVAL).mean(-1),
        "width90": width_of_each(means, stds, INTERVAL).mean(-1),
    }


def mixture_nll_of_each(means: Tensor, stds: Tensor, targets: Tensor) -> Tensor:
    """Negative log-density of every target under every network, ``(networks, examples, targets)``.

    Args:
        means: of every network.
        stds: standard deviations.
        targets: ``(examples, targets)``.
    """
    z = (targets - means) / stds
    return z.square() / 2 + stds.log() + math.log(2 * math.pi) / 2


def _check_targets(targets: Tensor, means: Tensor) -> None:
    if targets.shape != means.shape[1:]:
        raise ValueError(
            f"`targets` must have shape {tuple(means.shape[1:])}, got {tuple(targets.shape)}"
            + (": add a dimension, `targets[:, None]`." if targets.ndim == 1 else ".")
        )
