"""Callbacks for any Trainer run: watch symmetries, collect weights, draw the posterior.

>>> from lightning.pytorch import Trainer
>>> from lightning_bnn.callbacks import MassGap, PermutationTau
>>> trainer = Trainer(callbacks=[PermutationTau(), MassGap()], logger=False, accelerator="cpu")
"""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.callbacks.chain_diagnostics import *
    from lightning_bnn.callbacks.drawn_weights import *
    from lightning_bnn.callbacks.figures import *
    from lightning_bnn.callbacks.harvester import *
    from lightning_bnn.callbacks.learning_coefficient import *
    from lightning_bnn.callbacks.mass_gap import *
    from lightning_bnn.callbacks.orbit_drift import *
    from lightning_bnn.callbacks.permutation_tau import *
    from lightning_bnn.callbacks.posterior_doctor import *
    from lightning_bnn.callbacks.symmetric_average import *
    from lightning_bnn.callbacks.training_cost import *

lazy_package(__name__)
