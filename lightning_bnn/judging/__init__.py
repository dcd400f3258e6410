"""The one path from predictions of draws to numbers: validation, test, comparisons and demo."""

from lightning_bnn.judging.judges import ClassificationJudge, Judge, RegressionJudge, judge_of
from lightning_bnn.judging.results_table import results_table
from lightning_bnn.judging.test_sets import TestSet, named_sets

__all__ = [
    "ClassificationJudge",
    "Judge",
    "RegressionJudge",
    "TestSet",
    "judge_of",
    "named_sets",
    "results_table",
]
