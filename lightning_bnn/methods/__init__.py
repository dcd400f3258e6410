"""Algorithms that make posteriors of networks. They know nothing of Lightning."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.methods.all_data import HMC, MILE
    from lightning_bnn.methods.chains import Keeping
    from lightning_bnn.methods.from_checkpoints import FromCheckpoints
    from lightning_bnn.methods.laplace import Laplace
    from lightning_bnn.methods.mc_dropout import MCDropout
    from lightning_bnn.methods.method import Fit, Method, Progress, Purpose, State
    from lightning_bnn.methods.mfvi import MFVI
    from lightning_bnn.methods.networks import DeepEnsemble
    from lightning_bnn.methods.run import Batch, Run
    from lightning_bnn.methods.sgmcmc import SGMCMC
    from lightning_bnn.methods.swag import SWAG
    from lightning_bnn.methods.symmetrized_vi import SymmetrizedVI

__all__ = [
    "HMC",
    "MFVI",
    "MILE",
    "SGMCMC",
    "SWAG",
    "Batch",
    "DeepEnsemble",
    "Fit",
    "FromCheckpoints",
    "Keeping",
    "Laplace",
    "MCDropout",
    "Method",
    "Progress",
    "Purpose",
    "Run",
    "State",
    "SymmetrizedVI",
]

lazy_package(__name__)
