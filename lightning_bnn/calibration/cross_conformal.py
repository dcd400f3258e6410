"""Thresholds for an ensemble from its members that have not seen the row: cross-conformal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bnn.calibration.conformal import conformal_quantiles


@dataclass(frozen=True)
class FoldScores:
    r"""Scores of the rows of a table, each by the members of an ensemble that left its fold out.

    Each of M = KG members leaves out one of K folds, so that a row is scored by an ensemble of G,
    which is less accurate than the M that predict new rows. Cross-conformal prediction (CV+)
    therefore covers more than asked. As the squared error due to single members falls with their
    number as 1/G, half of the G members lose against all of them what these lose against an
    ensemble twice as large. The threshold extrapolates conformal quantiles q to M members,

    .. math:: q_M = q_G - c\, (q_{G/2} - q_G), \quad
        c = \frac{1/G - 1/M}{2/G - 1/G} = 1 - 1/K

    and at least :math:`q_G / \sqrt{K}`: exact to first order in the members' share of the squared
    error, and too large beyond. The members that score a row must differ as all M do: if all G
    have left out the same rows, too much is covered. With a single fold (rows that no member was
    trained on) c = 0, and it is split conformal prediction, with its guarantee. With several there
    is no guarantee for every table; `docs/intervals.md` has what was measured.

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
    7.56
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
        lost = (halves.mean(0) - whole).clamp_min(0)
        return torch.maximum(whole - (1 - 1 / self.folds) * lost, whole / self.folds**0.5)
