"""LightningModules that train posteriors over the weights of any network."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import *
    from lightning_bnn.modules.by_method import *
    from lightning_bnn.modules.prediction import *
    from lightning_bnn.tables import results_table as results_table

lazy_package(__name__)
