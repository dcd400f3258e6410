"""Scores of predictions for tables, beside those of a reference, and after calibration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import metrics as M
from lightning_bnn.calibration import calibrated
from lightning_bnn.calibration.calibrated import (
    CalibratedClasses,
    CalibratedGaussian,
)
from lightning_bnn.calibration.calibrators import Predictions
from lightning_bnn.evaluation.evaluators import (
    TABLE_SETS,
    DensityScores,
    RegressionEvaluator,
    Score,
    class_numbers,
)
from lightning_bnn.evaluation.predictions import (
    ClassPredictions,
    GaussianPredictions,
    LogDensities,
)
from lightning_bnn.metrics.classification import kl_of_each
from lightning_bnn.metrics.gaussian_mixture import mean_difference, thinned
from lightning_bnn.metrics.regression import energy_distance_of_each

_NETWORKS = 200
"""On each side, whose predictions are compared pair by pair."""


class ClassReference:
    """Agreement with a reference's mean probabilities, total variation and divergence from them.

    Args:
        averages: the reference's.
    """

    def __init__(self, averages: ClassPredictions) -> None:
        self.averages = averages

    def distances(self, averages: ClassPredictions) -> dict[str, Tensor]:
        """Of every example.

        Args:
            averages: what is compared.
        """
        _check_kind(averages, ClassPredictions)
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

    def __init__(self, mixtures: GaussianPredictions) -> None:
        self.means, self.stds = thinned(*mixtures.components(), _NETWORKS)

    @cached_property
    def _differences(self) -> tuple[Tensor, Tensor]:
        """Mean differences of function values and of densities: the same for all comparisons."""
        points = torch.zeros_like(self.stds)
        return mean_difference(self.means, points), mean_difference(self.means, self.stds)

    def distances(self, mixtures: GaussianPredictions) -> dict[str, Tensor]:
        """Of every example, a mean over its targets.

        Args:
            mixtures: what is compared.
        """
        _check_kind(mixtures, GaussianPredictions)
        means, stds = thinned(*mixtures.components(), _NETWORKS)
        if not bool((means + stds).isfinite().all()):
            unknown = torch.full((means.shape[1],), torch.nan, dtype=torch.float64)
            return {"energy_f": unknown, "energy": unknown}
        pairs = ((torch.zeros_like(stds), torch.zeros_like(self.stds)), (stds, self.stds))
        functions, densities = (
            energy_distance_of_each(means, mine, self.means, theirs, within).mean(-1)
            for (mine, theirs), within in zip(pairs, self._differences, strict=True)
        )
        return {"energy_f": functions, "energy": densities}


def _check_kind(predictions: Any, expected: type) -> None:
    if not isinstance(predictions, expected):
        raise ValueError(
            f"Predictions of another kind than the reference's cannot be compared with them: "
            f"{type(predictions).__name__} and {expected.__name__}."
        )


def reference_predictions(predictions: Any) -> ClassReference | GaussianReference | None:
    """Prepare comparisons with a reference's predictions, which log-densities are not.

    Args:
        predictions: `ClassPredictions`, `GaussianPredictions` or `LogDensities`.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> outputs = torch.randn(5, 8, 3)
    >>> averages = ClassPredictions.of(Categorical(), outputs)
    >>> far = reference_predictions(averages).distances(averages)
    >>> far["agree"].mean().item(), far["tv"].mean().item()
    (1.0, 0.0)
    """
    if isinstance(predictions, ClassPredictions):
        return ClassReference(predictions)
    return GaussianReference(predictions) if isinstance(predictions, GaussianPredictions) else None


NumbersOf = Callable[..., dict[str, float]]
"""Numbers, given indices of examples of every set; of all examples without any."""


def numbers_of(
    likelihood: nn.Module,
    sets: Sequence[Any],
    targets: Tensor,
    score: Score = "max_probability",
    reference: Any = None,
    target_std: Tensor | None = None,
) -> NumbersOf:
    """Return a function that gives the numbers of some examples from scores that are computed once.

    Args:
        likelihood: says what outputs mean.
        sets: predictions in distribution, and out of distribution if there are any.
        targets: of the former.
        score: what OOD examples are detected by, if these are classes.
        reference: of `reference_predictions`, to compare the former with.
        target_std: gives standardised errors the unit of the target, if that is known.

    >>> from lightning_bnn.evaluation import ClassPredictions
    >>> from lightning_bnn.likelihoods import Categorical
    >>> outputs = torch.tensor([[[2.0, 0.0], [2.0, 0.0]]])
    >>> averages = ClassPredictions.of(Categorical(), outputs)
    >>> numbers = numbers_of(Categorical(), [averages], torch.tensor([0, 1]))
    >>> numbers()["acc"], numbers(torch.tensor([0, 0]))["acc"]  # of all, and of a bootstrap sample
    (0.5, 1.0)
    """
    distances = {} if reference is None else reference.distances(sets[0])
    prepared = [
        _prepared(predicted, targets if k == 0 else None) for k, predicted in enumerate(sets)
    ]

    def numbers(*rows: Tensor) -> dict[str, float]:
        chosen = (
            [predicted[r] for predicted, r in zip(prepared, rows, strict=True)]
            if rows
            else prepared
        )
        labels = targets[rows[0]] if rows else targets
        far = {k: float((v[rows[0]] if rows else v).mean()) for k, v in distances.items()}
        return {**_numbers(likelihood, chosen, labels, score, target_std), **far}

    return numbers


def _prepared(predictions: Any, targets: Tensor | None) -> Any:
    """Scores do not depend on which other examples there are."""
    return (
        DensityScores.of(predictions, targets)
        if isinstance(predictions, GaussianPredictions)
        else predictions
    )


def _numbers(
    likelihood: Any, sets: Sequence[Any], targets: Tensor, score: Score, std: Tensor | None
) -> dict[str, float]:
    if isinstance(sets[0], LogDensities):
        return {"nll": -float(sets[0].values.mean())}
    if isinstance(sets[0], DensityScores):
        return _of_scores(likelihood, sets, std)
    return class_numbers(likelihood, sets, targets, score)


def _of_scores(
    likelihood: Any, sets: Sequence[DensityScores], std: Tensor | None
) -> dict[str, float]:
    evaluator = RegressionEvaluator(likelihood, TABLE_SETS[: len(sets)])
    numbers = evaluator.table_numbers(sets, None)
    if std is not None:
        squares = sets[0].of_each["squares"] * torch.as_tensor(std).double().square()
        numbers["rmse_unit"] = float(squares.mean().sqrt())
    return numbers


def calibrated_numbers(
    likelihood: Any,
    validation: Any,
    test: Any,
    validation_targets: Tensor,
    targets: Tensor,
    seed: int = 0,
) -> Callable[..., dict[str, float]]:
    """A function that gives numbers of some test examples, or of all without indices.

    Args:
        likelihood: says what outputs mean.
        validation: predictions of validation data, `ClassPredictions` or `GaussianPredictions`.
        test: those for the test data.
        validation_targets: of the validation data.
        targets: of the test data.
        seed: of the halves of the validation data.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # tables say what is calibrated, row by row
        fitted = calibrated(
            likelihood, calibrator_inputs(validation), validation_targets, seed=seed
        )
        if isinstance(fitted, CalibratedClasses):
            return _of_classes(fitted, test, targets.long())
        return _of_intervals(fitted, test, targets)


def calibrator_inputs(predictions: Any) -> Predictions:
    """Predictions as calibrators take them."""
    if isinstance(predictions, ClassPredictions):
        return (predictions.probs.clamp_min(torch.finfo(torch.float64).tiny).log()[None],)
    if isinstance(predictions, LogDensities):
        raise ValueError("Classes at several positions are not calibrated.")
    means, stds = predictions.components()
    return means, stds


def _of_classes(
    fitted: CalibratedClasses, test: ClassPredictions, labels: Tensor
) -> Callable[..., dict[str, float]]:
    probs = fitted.calibrator(*calibrator_inputs(test))
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
    intervals = fitted.intervals_of_mixture(*fitted.calibrator(*calibrator_inputs(test)))
    inside, width = intervals.contain(targets).double(), intervals.width

    def numbers(rows: Any = slice(None)) -> dict[str, float]:
        return {"interval90": float(width[rows].mean()), "held90": float(inside[rows].mean())}

    return numbers
