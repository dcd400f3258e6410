"""The one path from predictions of draws to numbers: validation, test, comparisons and demo."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.judging.averages import Averages, averages_of_mode, averages_of_stack, draw
    from lightning_bnn.judging.densities import LogDensities, Mixtures
    from lightning_bnn.judging.evaluators import (
        ClassificationEvaluator,
        DensityEvaluator,
        Evaluator,
        RegressionEvaluator,
        class_numbers,
        make_evaluator,
    )
    from lightning_bnn.judging.fidelity import reference_of
    from lightning_bnn.judging.numbers import numbers_of, regression_numbers
    from lightning_bnn.judging.results_table import results_table
    from lightning_bnn.judging.test_sets import TestSet, named_sets

__all__ = [
    "Averages",
    "ClassificationEvaluator",
    "DensityEvaluator",
    "Evaluator",
    "LogDensities",
    "Mixtures",
    "RegressionEvaluator",
    "TestSet",
    "averages_of_mode",
    "averages_of_stack",
    "class_numbers",
    "draw",
    "make_evaluator",
    "named_sets",
    "numbers_of",
    "reference_of",
    "regression_numbers",
    "results_table",
]

lazy_package(__name__)
