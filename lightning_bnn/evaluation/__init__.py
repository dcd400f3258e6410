"""Evaluation of posteriors: predictions of draws, their scores, and comparison with a reference."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.evaluation.evaluators import Evaluator, make_evaluator
    from lightning_bnn.evaluation.predictions import (
        ClassPredictions,
        GaussianPredictions,
        draw,
        predictions_of_mode,
        predictions_of_stack,
    )
    from lightning_bnn.evaluation.scores import numbers_of, reference_predictions

__all__ = [
    "ClassPredictions",
    "Evaluator",
    "GaussianPredictions",
    "predictions_of_mode",
    "predictions_of_stack",
    "draw",
    "make_evaluator",
    "numbers_of",
    "reference_predictions",
]

lazy_package(__name__)
