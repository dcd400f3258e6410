"""Sets and intervals from predictions of networks that have not seen the row: CV+."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bnn.calibration.conformal import (
    Band,
    Intervals,
    checked_band,
    conformal_quantiles,
    conformal_rank,
)
from lightning_bnn.metrics.validation import check_finite
from weightsym.params import check_between

_ENTRIES = 2_000_000
"""Ends of intervals that are sorted at a time."""


def cross_conformal_intervals(
    band: Band, targets: Tensor, folds: Tensor, alpha: int | float = 0.1
) -> Callable[[Band], Intervals]:
    r"""Intervals from a table that was predicted fold by fold, without rows for calibration alone.

    With the score :math:`R_i = \max(l_i - y_i, y_i - h_i) / s_i` of row i, which is in fold
    :math:`k_i` and predicted by networks that were not trained on this fold, the ends are the
    :math:`\lceil (n + 1)(1 - \alpha) \rceil`-th smallest of

    .. math:: h_{k_i}(x) + R_i\, s_{k_i}(x) \quad\text{and of}\quad
        -l_{k_i}(x) + R_i\, s_{k_i}(x)

    For K folds of n / K exchangeable rows, they hold a new target with probability at least
    :math:`1 - 2\alpha - \min\big(\tfrac{2 (1 - 1/K)}{n/K + 1}, \tfrac{1 - K/n}{K + 1}\big)`, and
    mostly :math:`1 - \alpha` or more. With all rows in fold 0 (rows that no network was trained on)
    it is split conformal prediction, `conformal_intervals`, and holds it with :math:`1 - \alpha`.
    Fewer than :math:`1/\alpha - 1` rows give infinite intervals, and one warning.

    References:
        | Predictive Inference with the Jackknife+ (Barber, Candes, Ramdas and Tibshirani, 2021)
        | https://arxiv.org/abs/1905.02928

    Args:
        band: of the rows, each by the networks that were trained without its fold.
        targets: theirs, ``(rows, ...)``.
        folds: the fold of each row, ``(rows,)``.
        alpha: the share of new targets that may lie outside.

    Returns:
        A function from the bands of new rows by every fold's networks, ``(folds, new rows, ...)``,
        to `Intervals`.

    >>> from lightning_bnn.calibration import mean_band
    >>> means, targets = torch.zeros(1, 10, 1), torch.arange(10.0)[:, None]
    >>> band, folds = mean_band(means, torch.ones(1, 10, 1)), torch.arange(10) % 2
    >>> rule = cross_conformal_intervals(band, targets, folds)
    >>> new = Band(*(t[None, :1].repeat(2, 1, 1) for t in band))  # both folds predict 0
    >>> rule(new).low.item(), rule(new).high.item()
    (-9.0, 9.0)
    """
    check_between("alpha", alpha)
    check_finite(targets, "targets")
    band, targets = checked_band(band), targets.double()
    if targets.shape != band.low.shape or folds.shape != targets.shape[:1]:
        raise ValueError(
            f"`targets` and `folds` must have shapes {tuple(band.low.shape)} and "
            f"{tuple(band.low.shape[:1])}, got {tuple(targets.shape)} and {tuple(folds.shape)}."
        )
    scores = torch.maximum(band.low - targets, targets - band.high) / band.scale

    def intervals(new: Band) -> Intervals:
        new = checked_band(new)
        step = max(1, _ENTRIES // max(1, scores.numel()))
        starts = range(0, new.low.shape[1], step)
        parts = [ends(Band(*(t[:, start : start + step] for t in new))) for start in starts]
        return Intervals(*map(torch.cat, zip(*parts, strict=True)))

    def ends(new: Band) -> tuple[Tensor, Tensor]:
        width = scores[:, None] * new.scale[folds]
        high = conformal_quantiles(new.high[folds] + width, alpha)[0]
        low = -conformal_quantiles(width - new.low[folds], alpha)[0]
        middle = (low + high) / 2
        return torch.where(low > high, middle, low), torch.where(low > high, middle, high)

    return intervals


def cross_conformal_sets(
    scores: Tensor, folds: Tensor, new: Tensor, alpha: int | float = 0.1
) -> Tensor:
    r"""Sets of classes from a table that was predicted fold by fold.

    .. math:: \big(c : \textstyle\sum_i [s_i < s_{k_i}(x, c)] < (n + 1)(1 - \alpha)\big)

    The guarantees are those of `cross_conformal_intervals`. Fewer than :math:`1/\alpha - 1` rows
    give sets of all classes.

    References:
        | Classification with Valid and Adaptive Coverage (Romano, Sesia and Candes, 2020)
        | https://arxiv.org/abs/2006.02544

    Args:
        scores: of the true class of each row, by networks trained without its fold, ``(rows,)``.
        folds: the fold of each row.
        new: scores of all classes of new rows by every fold's networks,
            ``(folds, new rows, classes)``, see `set_scores`.
        alpha: the share of new rows whose class may be missing from its set.

    >>> scores, folds = torch.arange(9.0), torch.arange(9) % 3
    >>> cross_conformal_sets(scores, folds, torch.tensor([[[8.0, 8.5]]]).repeat(3, 1, 1))
    tensor([[ True, False]])
    """
    check_between("alpha", alpha)
    smaller = torch.zeros(new.shape[1:], dtype=torch.long)
    for fold, values in enumerate(new):
        known = scores[folds == fold].sort().values
        smaller += torch.searchsorted(known, values.contiguous())
    return smaller < conformal_rank(len(scores), alpha)
