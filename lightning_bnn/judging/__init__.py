"""The one path from predictions of draws to numbers: validation, test, comparisons and demo."""

from lightning_bnn.judging.averages import Averages, averages_of_mode, averages_of_stack, draw
from lightning_bnn.judging.densities import LogDensities, Mixtures
from lightning_bnn.judging.fidelity import reference_of
from lightning_bnn.judging.judges import (
    ClassificationJudge,
    DensityJudge,
    Judge,
    RegressionJudge,
    class_numbers,
    judge_of,
)
from lightning_bnn.judging.numbers import numbers_of, regression_numbers
from lightning_bnn.judging.results_table import results_table
from lightning_bnn.judging.test_sets import TestSet, named_sets

__all__ = [
    "Averages",
    "ClassificationJudge",
    "DensityJudge",
    "Judge",
    "LogDensities",
    "Mixtures",
    "RegressionJudge",
    "TestSet",
    "averages_of_mode",
    "averages_of_stack",
    "class_numbers",
    "draw",
    "judge_of",
    "named_sets",
    "numbers_of",
    "reference_of",
    "regression_numbers",
    "results_table",
]
