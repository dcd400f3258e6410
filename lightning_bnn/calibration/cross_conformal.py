"""Thresholds for an ensemble from its members that have not seen the row: cross-conformal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bnn.calibration.conformal import conformal_quantiles


@dataclass(frozen=True)
class FoldScores:
    r"""Scores of the rows of a table, each by the members of an ensemble that left its fold out.

    One of K folds is left out by G of M = KG members, so that a row is scored by an ensemble that
    is smaller, and less accurate, than the one that predicts new rows. Cross-conformal prediction
    (CV+) therefore covers more than asked. The part of a squared error that is due to single
    members falls with their number as 1/G: what half of the G members lose against all of them is
    what these lose against an ensemble twice as large. The threshold extrapolates to M members,

    .. math:: q_M^2 = q_G^2 - c\, (q_{G/2}^2 - q_G^2), \quad
        c = \frac{1/G - 1/M}{2/G - 1/G} = 1 - 1/K

    with conformal quantiles q, and :math:`q_G^2 / K \leq q_M^2 \leq q_G^2`. With a single fold
    (rows that no member was trained on) c = 0, and it is split conformal prediction, with its
    guarantee. With several there is no guarantee for every table; `docs/intervals.md` has what was
    measured.

    References:
        | Cross-Conformal Predictors (Vovk, 2015), https://arxiv.org/abs/1208.0806
        | Predictive Inference with the Jackknife+ (Barber, Candes, Ramdas and Tibshirani, 2021)
        | https://arxiv.org/abs/1905.02928

    Attributes:
        whole: errors by all members without the fold of the row, ``(rows, ...)``, in a unit that
            may depend on the row.
        halves: by the first and by the last half of these, in the same unit, ``(2, rows, ...)``.
        folds: how many there are.

    >>> errors = torch.arange(1.0, 10)
    >>> FoldScores(errors, errors.expand(2, -1), folds=5).threshold(0.1).item()
    9.0
    >>> round(FoldScores(errors, 1.2 * errors.expand(2, -1), folds=5).threshold(0.1).item(), 2)
    7.24
    """

    whole: Tensor
    halves: Tensor
    folds: int

    def threshold(self, alpha: int | float) -> Tensor:
        """The error that new rows exceed with this probability, in their units.

        Args:
            alpha: the probability; fewer than ``1 / alpha - 1`` rows give infinity and a warning.
        """
        whole = conformal_quantiles(self.whole, alpha)[0]
        if not bool(whole.isfinite().all()):
            return whole
        halves = torch.stack([conformal_quantiles(half, alpha)[0] for half in self.halves])
        lost = (halves.square().mean(0) - whole.square()).clamp_min(0)
        least = whole.square() - (1 - 1 / self.folds) * lost
        return torch.maximum(least, whole.square() / self.folds).sqrt()
