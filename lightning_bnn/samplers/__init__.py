"""Rules that move weights through a posterior, as torch optimizers."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.samplers.cyclical import *
    from lightning_bnn.samplers.energy_sampler import *
    from lightning_bnn.samplers.hmc import *
    from lightning_bnn.samplers.horizontal import *
    from lightning_bnn.samplers.ivon import *
    from lightning_bnn.samplers.langevin import *
    from lightning_bnn.samplers.mclmc import *
    from lightning_bnn.samplers.orbit_moves import *
    from lightning_bnn.samplers.sampler import *
    from lightning_bnn.samplers.sghmc import *
    from lightning_bnn.samplers.sgld import *
    from lightning_bnn.samplers.smile import *

lazy_package(__name__)
