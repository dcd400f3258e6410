"""Distributions over the weights of a network."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.posteriors.base import Posterior, Predictor
    from lightning_bnn.posteriors.dropout import Dropout
    from lightning_bnn.posteriors.empirical import Empirical, Mixture
    from lightning_bnn.posteriors.gaussian import DiagonalGaussian, LowRankGaussian
    from lightning_bnn.posteriors.laplace import CurvatureBlock, LaplaceGaussian
    from lightning_bnn.posteriors.streaming import StreamedPredictions, stream_predictions
    from lightning_bnn.posteriors.symmetrized import Symmetrized

__all__ = [
    "CurvatureBlock",
    "DiagonalGaussian",
    "Dropout",
    "Empirical",
    "LaplaceGaussian",
    "LowRankGaussian",
    "Mixture",
    "Posterior",
    "Predictor",
    "StreamedPredictions",
    "Symmetrized",
    "stream_predictions",
]

lazy_package(__name__)
