"""Algorithms that make posteriors of networks. They know nothing of Lightning."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.methods.all_data import *
    from lightning_bnn.methods.chains import *
    from lightning_bnn.methods.distillation import *
    from lightning_bnn.methods.from_checkpoints import *
    from lightning_bnn.methods.ivon import *
    from lightning_bnn.methods.laplace import *
    from lightning_bnn.methods.learning_coefficient import *
    from lightning_bnn.methods.mc_dropout import *
    from lightning_bnn.methods.method import *
    from lightning_bnn.methods.mfvi import *
    from lightning_bnn.methods.networks import *
    from lightning_bnn.methods.run import *
    from lightning_bnn.methods.scalabl import *
    from lightning_bnn.methods.sgmcmc import *
    from lightning_bnn.methods.swag import *
    from lightning_bnn.methods.symmetrized_vi import *
    from lightning_bnn.methods.tfb import *

lazy_package(__name__)
