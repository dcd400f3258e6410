"""LightningModules that train posteriors over the weights of any network."""

from typing import TYPE_CHECKING

import lightning_bnn.strategies  # noqa: F401  # so that `Trainer(strategy="members")` is known
from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian
    from lightning_bnn.modules.deep_ensemble import DeepEnsemble
    from lightning_bnn.modules.from_checkpoints import FromCheckpoints
    from lightning_bnn.modules.hmc import HMC
    from lightning_bnn.modules.judging import Prediction
    from lightning_bnn.modules.laplace import Laplace
    from lightning_bnn.modules.mc_dropout import MCDropout
    from lightning_bnn.modules.mfvi import MFVI
    from lightning_bnn.modules.mile import MILE
    from lightning_bnn.modules.predictive import Predictive
    from lightning_bnn.modules.sghmc import SGHMC
    from lightning_bnn.modules.swag import SWAG
    from lightning_bnn.modules.symmetrized_vi import SymmetrizedVI
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
