"""LightningModules that train posteriors over the weights of any network."""

from typing import TYPE_CHECKING

import lightning_bnn.strategies  # noqa: F401  # so that `Trainer(strategy="members")` is known
from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian
    from lightning_bnn.modules.by_method import (
        HMC,
        MFVI,
        MILE,
        SGHMC,
        SWAG,
        DeepEnsemble,
        FromCheckpoints,
        Laplace,
        MCDropout,
        SymmetrizedVI,
    )
    from lightning_bnn.modules.judging import Prediction
    from lightning_bnn.modules.predictive import Predictive
    from lightning_bnn.tables import results_table

__all__ = [
    "Bayesian",
    "DeepEnsemble",
    "FromCheckpoints",
    "HMC",
    "Laplace",
    "MCDropout",
    "MFVI",
    "MILE",
    "Prediction",
    "Predictive",
    "SGHMC",
    "SWAG",
    "SymmetrizedVI",
    "results_table",
]

lazy_package(__name__)
