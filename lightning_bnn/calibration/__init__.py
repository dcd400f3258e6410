"""What is done with predictions after training: calibrators, and sets that hold the truth."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.calibration.calibrated import (
        Calibrated,
        CalibratedClasses,
        CalibratedGaussian,
    )
    from lightning_bnn.calibration.finite_quantile import conformal_quantiles
    from lightning_bnn.calibration.fitting import calibrated
    from lightning_bnn.calibration.held_out import validation_loaders
    from lightning_bnn.calibration.isotonic import Isotonic, fit_isotonic
    from lightning_bnn.calibration.logits import class_logits, pooled
    from lightning_bnn.calibration.methods import CLASS_METHODS, GAUSSIAN_METHODS, method_of, read
    from lightning_bnn.calibration.prediction_intervals import (
        Band,
        ConformalIntervals,
        Intervals,
        conformal_intervals,
        mean_band,
        quantile_band,
    )
    from lightning_bnn.calibration.prediction_sets import ConformalSets, SetScore, conformal_sets
    from lightning_bnn.calibration.spread import Spread, fit_spread
    from lightning_bnn.calibration.temperature import Temperature, fit_temperature
    from lightning_bnn.calibration.vector import VectorScaling, fit_vector

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
