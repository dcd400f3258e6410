"""Calibration of predictions after training: calibrators, and sets that hold the truth."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.calibration.calibrated import Calibrated, calibrated
    from lightning_bnn.calibration.calibrators import (
        Spread,
        Temperature,
        VectorScaling,
        fit_spread,
        fit_temperature,
        fit_vector,
        pooled,
    )
    from lightning_bnn.calibration.conformal import (
        ConformalSets,
        Intervals,
        conformal_intervals,
        conformal_sets,
        mean_band,
        quantile_band,
    )
    from lightning_bnn.calibration.cross_conformal import FoldScores

__all__ = [
    "Calibrated",
    "ConformalSets",
    "FoldScores",
    "Intervals",
    "Spread",
    "Temperature",
    "VectorScaling",
    "calibrated",
    "conformal_intervals",
    "conformal_sets",
    "fit_spread",
    "fit_temperature",
    "fit_vector",
    "mean_band",
    "pooled",
    "quantile_band",
]

lazy_package(__name__)
