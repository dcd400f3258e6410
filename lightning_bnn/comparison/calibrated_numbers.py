"""Columns of tables about predictions that were calibrated on the validation data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.calibration import CalibratedClasses, CalibratedGaussian, calibrated
from lightning_bnn.judging.averages import Averages

__all__ = ["calibrated_numbers"]


def calibrated_numbers(
    likelihood: Any, known: Any, test: Any, known_targets: Tensor, targets: Tensor, seed: int = 0
) -> Callable[..., dict[str, float]]:
    """A function that gives numbers of some test examples, or of all without indices.

    Args:
        likelihood: says what outputs mean.
        known: predictions for the validation data, `Averages` or `Mixtures`.
        test: those for the test data.
        known_targets: of the validation data.
        targets: of the test data.
        seed: of the halves of the validation data.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # tables say what is calibrated, row by row
        fitted = calibrated(likelihood, _read(known), known_targets, seed=seed)
        if isinstance(fitted, CalibratedClasses):
            return _of_classes(fitted, test, targets.long())
        return _of_intervals(fitted, test, targets)


def _read(part: Any) -> tuple[Tensor, ...]:
    """Predictions as calibrators take them."""
    if isinstance(part, Averages):
        return (part.probs.clamp_min(torch.finfo(torch.float64).tiny).log()[None],)
    means, stds = part.components()
    return means, stds


def _of_classes(
    fitted: CalibratedClasses, test: Averages, labels: Tensor
) -> Callable[..., dict[str, float]]:
    probs = fitted.calibrator(*_read(test))
    sets = fitted.rule(probs)

    def numbers(rows: Any = slice(None)) -> dict[str, float]:
        return {
            "nll_t": float(M.nll(probs[rows], labels[rows])),
            "ece_t": float(M.ece(probs[rows], labels[rows])),
            "aurc": float(M.aurc(test.probs[rows], labels[rows])),
            "set90": float(M.set_size(sets[rows])),
            "held90": float(M.set_coverage(sets[rows], labels[rows])),
        }

    return numbers


def _of_intervals(
    fitted: CalibratedGaussian, test: Any, targets: Tensor
) -> Callable[..., dict[str, float]]:
    intervals = fitted.intervals_of_mixture(*fitted.calibrator(*_read(test)))
    inside, width = intervals.contain(targets).double(), intervals.width

    def numbers(rows: Any = slice(None)) -> dict[str, float]:
        return {"interval90": float(width[rows].mean()), "held90": float(inside[rows].mean())}

    return numbers
