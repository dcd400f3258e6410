"""Posteriors on disk, calibrated on the validation data and evaluated on the test data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.calibration import Calibrated, Intervals, Temperature, calibrated
from lightning_bnn.calibration.calibrated import (
    CalibratedClasses,
    CalibratedGaussian,
    class_numbers,
    gaussian_numbers,
)
from lightning_bnn.calibration.calibrators import Predictions, method_of, read
from lightning_bnn.calibration.conformal import quantile_band
from lightning_bnn.evaluation.predictions import predictor_of
from lightning_bnn.evaluation.problem import Problem, StoredBatches
from lightning_bnn.evaluation.stored_posteriors import StoredPosterior
from lightning_bnn.randomness import keyed_randomness

__all__ = [
    "CalibratedTest",
    "NumbersByName",
    "calibrate_posterior",
    "credible_sets",
    "intervals_of",
    "mixtures_of",
    "predictions_of",
    "probs_of",
    "sets_of",
    "numbers_of_test",
]

NumbersByName = dict[str, dict[str, float]]
"""Numbers before and after calibration."""


@dataclass(frozen=True)
class CalibratedTest:
    """A calibration, and what all networks predict for the test data.

    Attributes:
        calibration: fitted to the validation data.
        predictions: for the test data, as the calibrator takes them.
        targets: of the test data.
    """

    calibration: Calibrated
    predictions: Predictions
    targets: Tensor


def calibrate_posterior(
    posterior: StoredPosterior,
    problem: Problem,
    method: str | None = None,
    samples: int = 100,
    seed: int = 0,
    **options: Any,
) -> CalibratedTest:
    """Fit a calibrator to the validation data, and predict the test data.

    Args:
        posterior: what predicts.
        problem: has the data.
        method: name of the calibrator.
        samples: how many networks predict, of all modes together.
        seed: of all draws.
        **options: of `lightning_bnn.calibration.calibrated`.
    """
    method = method_of(posterior.likelihood, method)
    validation, test = problem.validation_sets(), problem.test_set()
    predictions = predictions_of(posterior, [*validation, test], method, samples, seed)
    known = tuple(torch.cat(parts, 1) for parts in zip(*predictions[:-1], strict=True))
    targets = torch.cat([batches.targets() for batches in validation])
    fitted = calibrated(posterior.likelihood, known, targets, method, seed=seed, **options)
    return CalibratedTest(fitted, predictions[-1], test.targets())


@torch.no_grad()
def predictions_of(
    posterior: StoredPosterior,
    sets: Sequence[StoredBatches],
    method: str,
    samples: int = 100,
    seed: int = 0,
) -> list[Predictions]:
    """Predict every data set by all networks of a posterior, as a calibrator takes it.

    Args:
        posterior: what predicts.
        sets: the data sets.
        method: name of the calibrator.
        samples: how many networks, of all modes together.
        seed: of all draws.
    """
    share = max(1, samples // len(posterior.predictors))
    model = posterior.network.eval()
    predict = [predictor_of(mode, share, seed, k) for k, mode in enumerate(posterior.predictors)]

    def outputs(number: int, index: int, inputs: Any) -> Tensor:
        with keyed_randomness(seed, "predict", number, index):
            return torch.cat([of_mode(model, inputs) for of_mode in predict])

    return [
        _joined(
            read(posterior.likelihood, method, outputs(number, index, inputs))
            for index, (inputs, _) in enumerate(batches)
        )
        for number, batches in enumerate(sets)
    ]


def _joined(parts: Iterable[Predictions]) -> Predictions:
    return tuple(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))


# ------------------------------------------------------------ before and after
def numbers_of_test(tested: CalibratedTest) -> NumbersByName:
    """Numbers of the test data before and after calibration, with those of sets or intervals.

    Args:
        tested: a calibration, and predictions of the test data.
    """
    targets, calibration = tested.targets, tested.calibration
    if isinstance(calibration, CalibratedClasses):
        labels, probs, sets = targets.long(), probs_of(tested), sets_of(tested)
        return {
            name: {
                **class_numbers(probs[name], labels),
                "size": float(M.set_size(sets[name])),
                "coverage": float(M.set_coverage(sets[name], labels)),
            }
            for name in probs
        }
    intervals = intervals_of(tested)
    return {
        name: {
            **gaussian_numbers(means, stds, targets, calibration.alpha),
            "width": float(intervals[name].width.mean()),
            "coverage": float(intervals[name].contain(targets).double().mean()),
        }
        for name, (means, stds) in mixtures_of(tested).items()
    }


def probs_of(tested: CalibratedTest) -> dict[str, Tensor]:
    """Probabilities of the classes of test examples, before and after."""
    (logits,) = tested.predictions
    return {"before": Temperature(1.0)(logits), "after": tested.calibration.calibrator(logits)}


def sets_of(tested: CalibratedTest) -> dict[str, Tensor]:
    """Sets that the probabilities ask for, and conformal ones."""
    calibration, probs = tested.calibration, probs_of(tested)
    assert isinstance(calibration, CalibratedClasses)
    before = credible_sets(probs["before"], calibration.alpha)
    return {"before": before, "after": calibration.rule(probs["after"])}


def credible_sets(probs: Tensor, alpha: float) -> Tensor:
    """The likeliest classes whose probabilities add up to what is asked for, as they claim.

    Args:
        probs: ``(batch, classes)``.
        alpha: the share that may be missed.

    >>> credible_sets(torch.tensor([[0.25, 0.5, 0.25]]), 0.5)
    tensor([[False,  True, False]])
    """
    values, order = probs.sort(stable=True, dim=-1, descending=True)
    needed = values.cumsum(-1) - values < 1 - alpha
    return torch.zeros_like(needed).scatter(-1, order, needed)


def mixtures_of(tested: CalibratedTest) -> dict[str, tuple[Tensor, Tensor]]:
    """Predicted mixtures of Gaussians, before and after."""
    means, stds = tested.predictions
    return {"before": (means, stds), "after": tested.calibration.calibrator(means, stds)}


def intervals_of(tested: CalibratedTest) -> dict[str, Intervals]:
    """Central intervals of the predicted mixtures, and conformal ones."""
    calibration, mixtures = tested.calibration, mixtures_of(tested)
    assert isinstance(calibration, CalibratedGaussian)
    low, high, _ = quantile_band(*mixtures["before"], calibration.alpha)
    after = calibration.intervals_of_mixture(*mixtures["after"])
    return {"before": Intervals(low, high), "after": after}
