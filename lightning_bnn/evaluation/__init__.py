"""Evaluation of posteriors: predictions, their metrics, comparison with a reference."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.evaluation.draws import draw, predictions_of_mode
    from lightning_bnn.evaluation.evaluators import Evaluator, numbers_of
    from lightning_bnn.predictions import (
        ClassPredictions,
        DensityPredictions,
        GaussianPredictions,
        Predictions,
    )

__all__ = [
    "ClassPredictions",
    "DensityPredictions",
    "Evaluator",
    "GaussianPredictions",
    "Predictions",
    "draw",
    "numbers_of",
    "predictions_of_mode",
]

lazy_package(__name__)
