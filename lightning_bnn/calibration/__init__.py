"""Calibration of predictions after training: calibrators, and sets that hold the truth."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.calibration.calibrated import (
        Calibrated,
        CalibratedClasses,
        CalibratedGaussian,
        calibrated,
        validation_loaders,
    )
    from lightning_bnn.calibration.calibrators import (
        CLASS_METHODS,
        GAUSSIAN_METHODS,
        Isotonic,
        Spread,
        Temperature,
        VectorScaling,
        class_logits,
        fit_isotonic,
        fit_spread,
        fit_temperature,
        fit_vector,
        method_of,
        pooled,
        read,
    )
    from lightning_bnn.calibration.conformal import (
        Band,
        ConformalIntervals,
        ConformalSets,
        Intervals,
        SetScore,
        conformal_intervals,
        conformal_quantiles,
        conformal_sets,
        mean_band,
        quantile_band,
    )

__all__ = [
    "Band",
    "CLASS_METHODS",
    "Calibrated",
    "CalibratedClasses",
    "CalibratedGaussian",
    "ConformalIntervals",
    "ConformalSets",
    "GAUSSIAN_METHODS",
    "Intervals",
    "Isotonic",
    "SetScore",
    "Spread",
    "Temperature",
    "VectorScaling",
    "calibrated",
    "class_logits",
    "conformal_intervals",
    "conformal_quantiles",
    "conformal_sets",
    "fit_isotonic",
    "fit_spread",
    "fit_temperature",
    "fit_vector",
    "mean_band",
    "method_of",
    "pooled",
    "quantile_band",
    "read",
    "validation_loaders",
]

lazy_package(__name__)
