"""Fitting calibrators: one part of held-out predictions decides, the other one judges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.calibration.calibrated import CalibratedClasses, CalibratedGaussian
from lightning_bnn.calibration.held_out import split_rows
from lightning_bnn.calibration.methods import (
    CLASS_METHODS,
    GAUSSIAN_METHODS,
    Predictions,
    method_of,
)
from lightning_bnn.calibration.numbers import class_numbers, gaussian_numbers, levels_reached
from lightning_bnn.calibration.prediction_sets import conformal_sets
from lightning_bnn.calibration.temperature import Temperature
from lightning_bnn.metrics.reliability import reliability
from lightning_bnn.metrics.validation import check_choice, check_finite

__all__ = ["calibrated"]

Part = tuple[list[Tensor], Tensor]
"""Predictions of some examples, and their targets."""
_INTERVALS = ("split", "cqr")


def calibrated(
    likelihood: nn.Module,
    predictions: Predictions,
    targets: Tensor,
    method: str | None = None,
    alpha: int | float = 0.1,
    score: str | None = None,
    by_class: bool = False,
    held_out: int | float = 0.5,
    seed: int = 0,
    module: Any = None,
) -> Any:
    """Fit a calibrator to one part of held-out predictions; the other judges it and makes sets.

    Args:
        likelihood: ``Categorical``, ``Bernoulli`` or ``Gaussian``.
        predictions: of all networks, as `read` gives them for this method.
        targets: of the examples.
        method: of classes ``"temperature"`` (of the mean prediction), ``"network_temperature"``,
            ``"vector"`` or ``"isotonic"``; of numbers ``"spread"`` or ``"moments"``.
        alpha: the error rate of sets or intervals.
        score: of sets ``"thr"``, ``"aps"`` or ``"raps"``; of intervals ``"split"`` or ``"cqr"``.
        by_class: whether sets have that error rate for every class.
        held_out: the part of the examples that is not for the calibrator.
        seed: of the split and of randomised sets.
        module: what predicts, kept for new inputs.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> logits = torch.tensor([[[4.0, 0.0]]]).repeat(1, 400, 1)
    >>> labels = (torch.arange(400) % 4) // 3  # a quarter is of the other class
    >>> found = calibrated(Categorical(), (logits,), labels, held_out=0.25)
    >>> found.fitted_to, found.calibrator.value > 1  # the predictions were too sure
    (300, True)
    """
    method = method_of(likelihood, method)
    for values in predictions:
        check_finite(values, "predictions")
        if values.shape[1] != len(targets):
            raise ValueError(
                f"`targets` must be one for each of {values.shape[1]} predicted examples, got "
                f"{len(targets)}."
            )
    if method not in GAUSSIAN_METHODS and bool((targets != targets.long()).any()):
        raise ValueError("`targets` must be class indices, got numbers that are not whole.")
    rows, kept = split_rows(len(targets), held_out, seed)
    known = [p[:, rows] for p in predictions], targets[rows]
    others = [p[:, kept] for p in predictions], targets[kept]
    common = {"method": method, "alpha": float(alpha), "fitted_to": len(rows),
              "likelihood": likelihood, "module": module}  # fmt: skip
    if method in GAUSSIAN_METHODS:
        return _gaussian(known, others, common, check_choice("score", score or "split", _INTERVALS))
    rule = {"score": score or "thr", "by_class": by_class, "seed": seed}
    return _classes(known, others, common, rule)


def _classes(
    known: Part, others: Part, common: dict[str, Any], rule: dict[str, Any]
) -> CalibratedClasses:
    ((logits,), labels), ((other_logits,), other_labels) = known, others
    calibrator = CLASS_METHODS[common["method"]](logits, labels.long())
    logits, labels = other_logits, other_labels.long()
    each = Temperature(1.0)(logits), calibrator(logits)
    before, after = (class_numbers(probs, labels) for probs in each)
    diagrams = [torch.stack(list(_diagram(probs, labels))) for probs in each]
    sets = conformal_sets(each[1], labels, common["alpha"], **rule)
    return CalibratedClasses(
        calibrator=calibrator, before=before, after=after, rule=sets,
        diagrams=torch.stack(diagrams), **common,
    )  # fmt: skip


def _diagram(probs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    confidence, predicted = probs.max(-1)
    return tuple(t.double() for t in reliability(confidence, predicted == labels))


def _gaussian(known: Part, others: Part, common: dict[str, Any], kind: str) -> CalibratedGaussian:
    calibrator = GAUSSIAN_METHODS[common["method"]](*known[0], known[1])
    (means, stds), targets = others
    each = (means, stds), calibrator(means, stds)
    before, after = (gaussian_numbers(m, s, targets, common["alpha"]) for m, s in each)
    reached = torch.stack([levels_reached(m, s, targets) for m, s in each])
    return CalibratedGaussian(
        calibrator=calibrator, before=before, after=after, kind=kind, means=each[1][0],
        stds=each[1][1], targets=targets.double(), reached=reached, **common,
    )  # fmt: skip
