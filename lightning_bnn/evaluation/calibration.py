"""Posteriors on disk, calibrated on the validation data and evaluated on the test data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.calibration import Calibrated, Intervals, Temperature, calibrated
from lightning_bnn.calibration.calibrated import (
    CalibratedClasses,
    class_numbers,
    gaussian_numbers,
)
from lightning_bnn.calibration.calibrators import Predictions, method_of, read
from lightning_bnn.calibration.conformal import quantile_band
from lightning_bnn.evaluation.predictions import predictor_of
from lightning_bnn.evaluation.problem import Problem, StoredBatches
from lightning_bnn.evaluation.stored_posteriors import StoredPosterior
from weightsym.randomness import keyed_randomness

__all__ = ["CalibratedTest", "calibrate_posterior", "credible_sets", "predictions_of"]


@dataclass(frozen=True)
class CalibratedTest:
    """A calibration, and predictions of the test data before and after it.

    Attributes:
        calibration: fitted to the validation data.
        targets: of the test data.
        predictions: probabilities of classes, or means and standard deviations of networks.
        regions: sets of classes, or intervals: those that the predicted probabilities ask for
            before, and conformal ones after.
    """

    calibration: Calibrated
    targets: Tensor
    predictions: Mapping[str, Any]
    regions: Mapping[str, Any]

    def numbers(self) -> dict[str, dict[str, float]]:
        """Compute the numbers of the test data before and after."""
        return {name: self._numbers(name) for name in self.predictions}

    def _numbers(self, name: str) -> dict[str, float]:
        predicted, region = self.predictions[name], self.regions[name]
        if isinstance(self.calibration, CalibratedClasses):
            labels = self.targets.long()
            coverage = float(M.set_coverage(region, labels))
            size = {"size": float(M.set_size(region)), "coverage": coverage}
            return {**class_numbers(predicted, labels), **size}
        size = {
            "width": float(region.width.mean()),
            "coverage": float(region.contain(self.targets).double().mean()),
        }
        means, stds = predicted
        return {**gaussian_numbers(means, stds, self.targets, self.calibration.alpha), **size}


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
    validated = tuple(torch.cat(parts, 1) for parts in zip(*predictions[:-1], strict=True))
    targets = torch.cat([batches.targets() for batches in validation])
    fitted = calibrated(posterior.likelihood, validated, targets, method, seed=seed, **options)
    predicted = predictions[-1]
    after = fitted.calibrator(*predicted)
    if isinstance(fitted, CalibratedClasses):
        before: Any = Temperature(1.0)(*predicted)
        regions: list[Any] = [credible_sets(before, fitted.alpha), fitted.rule(after)]
    else:
        before = predicted
        means, stds = predicted
        low, high, _ = quantile_band(means, stds, fitted.alpha)
        regions = [Intervals(low, high), fitted.intervals_of_mixture(*after)]
    names = ("before", "after")
    pairs = (dict(zip(names, pair, strict=True)) for pair in ((before, after), regions))
    return CalibratedTest(fitted, test.targets(), *pairs)


@torch.no_grad()
def predictions_of(
    posterior: StoredPosterior,
    sets: Sequence[StoredBatches],
    method: str,
    samples: int = 100,
    seed: int = 0,
) -> list[Predictions]:
    """Predict every data set by all networks of a posterior, in the form of a calibrator.

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


def credible_sets(probs: Tensor, alpha: float) -> Tensor:
    """Take the likeliest classes until their probabilities add up to what is asked for.

    Args:
        probs: ``(batch, classes)``.
        alpha: the share that may be missed.

    >>> credible_sets(torch.tensor([[0.25, 0.5, 0.25]]), 0.5)
    tensor([[False,  True, False]])
    """
    values, order = probs.sort(stable=True, dim=-1, descending=True)
    needed = values.cumsum(-1) - values < 1 - alpha
    return torch.zeros_like(needed).scatter(-1, order, needed)
