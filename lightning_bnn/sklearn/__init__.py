"""Classifiers and regressors for tables, with the posterior of any module and calibrated sets."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.sklearn.classifier import BnnClassifier
    from lightning_bnn.sklearn.regressor import BnnRegressor

__all__ = ["BnnClassifier", "BnnRegressor"]

lazy_package(__name__)
