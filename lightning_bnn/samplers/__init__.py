"""Rules that move weights through a posterior, as torch optimizers."""

from lightning_bnn.samplers.cyclical import CyclicalSchedule
from lightning_bnn.samplers.energy_sampler import EnergySampler
from lightning_bnn.samplers.hmc import HMC
from lightning_bnn.samplers.langevin import Langevin
from lightning_bnn.samplers.mclmc import MCLMC
from lightning_bnn.samplers.sghmc import SGHMC
from lightning_bnn.samplers.sgld import SGLD, PreconditionedSGLD

__all__ = [
    "HMC",
    "MCLMC",
    "SGHMC",
    "SGLD",
    "CyclicalSchedule",
    "EnergySampler",
    "Langevin",
    "PreconditionedSGLD",
]
