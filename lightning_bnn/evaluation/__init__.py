"""Evaluation of posteriors: predictions of draws, their scores, and comparison with a reference."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.evaluation.evaluators import (
        ClassificationEvaluator,
        DensityEvaluator,
        Evaluator,
        RegressionEvaluator,
        TestSet,
        class_numbers,
        make_evaluator,
        named_sets,
    )
    from lightning_bnn.evaluation.predictions import (
        ClassPredictions,
        GaussianPredictions,
        LogDensities,
        draw,
        predictions_of_mode,
        predictions_of_stack,
    )
    from lightning_bnn.evaluation.scores import (
        numbers_of,
        reference_predictions,
        regression_numbers,
    )

__all__ = [
    "ClassPredictions",
    "ClassificationEvaluator",
    "DensityEvaluator",
    "Evaluator",
    "LogDensities",
    "GaussianPredictions",
    "RegressionEvaluator",
    "TestSet",
    "predictions_of_mode",
    "predictions_of_stack",
    "class_numbers",
    "draw",
    "make_evaluator",
    "named_sets",
    "numbers_of",
    "reference_predictions",
    "regression_numbers",
]

lazy_package(__name__)
