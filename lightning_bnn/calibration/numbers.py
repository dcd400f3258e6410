"""Numbers of predictions before and after calibration, and their table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.calibration.prediction_intervals import quantile_band
from lightning_bnn.calibration.spread import joint_log_prob
from lightning_bnn.metrics.gaussian_mixture import mixture_cdf

__all__ = ["LEVELS", "class_numbers", "gaussian_numbers", "levels_reached", "numbers_text"]

LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))
"""Levels of the quantiles that predictions of numbers are judged at."""


def class_numbers(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """NLL, ECE, Brier score, accuracy and AURC of predictions of classes.

    Args:
        probs: ``(batch, classes)``.
        labels: ``(batch,)``.
    """
    return {
        "nll": float(M.nll(probs, labels)),
        "ece": float(M.ece(probs, labels)),
        "brier": float(M.brier_score(probs, labels)),
        "acc": float((probs.argmax(-1) == labels).double().mean()),
        "aurc": float(M.aurc(probs, labels)),
    }


def gaussian_numbers(
    means: Tensor, stds: Tensor, targets: Tensor, alpha: int | float = 0.1
) -> dict[str, float]:
    """NLL, calibration error of quantiles, coverage and mean width of the central interval.

    Args:
        means: of all networks, ``(samples, batch, ...)``.
        stds: in the same shape.
        targets: ``(batch, ...)``.
        alpha: what lies outside of the central interval.
    """
    low, high, _ = quantile_band(means, stds, alpha)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    inside = (low <= targets) & (targets <= high)
    return {
        "nll": -float(joint_log_prob(means.double(), stds.double(), targets.double()).mean()),
        "qce": float((levels_reached(means, stds, targets).cpu() - levels).abs().mean()),
        "coverage": float(inside.double().mean()),
        "width": float((high - low).mean()),
    }


def levels_reached(means: Tensor, stds: Tensor, targets: Tensor) -> Tensor:
    """Shares of the targets below the predicted quantiles of some levels.

    Args:
        means: of all networks, ``(samples, batch, ...)``.
        stds: in the same shape.
        targets: ``(batch, ...)``.
    """
    reached = mixture_cdf(means, stds, targets.double()).flatten()
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=reached.device)
    return (reached[:, None] <= levels).double().mean(0)


def numbers_text(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Numbers with names as a table for people, a line for each row.

    Args:
        rows: numbers by name, by the name of the row.

    >>> print(numbers_text({"before": {"nll": 0.5}, "after": {"nll": 0.25}}))
               nll
    before  0.5000
    after   0.2500
    """
    names = list(next(iter(rows.values())))
    width = max(len(row) for row in rows)
    columns = [max(8, len(name) + 2) for name in names]
    head = "".join(name.rjust(n) for name, n in zip(names, columns, strict=True))
    lines = [" " * width + head]
    for row, numbers in rows.items():
        cells = (f"{numbers[k]:.4f}".rjust(n) for k, n in zip(names, columns, strict=True))
        lines.append(row.ljust(width) + "".join(cells))
    return "\n".join(lines)
