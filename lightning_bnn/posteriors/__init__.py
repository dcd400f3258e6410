"""Distributions over the weights of a network."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.posteriors.base import *
    from lightning_bnn.posteriors.dropout import *
    from lightning_bnn.posteriors.empirical import *
    from lightning_bnn.posteriors.gaussian import *
    from lightning_bnn.posteriors.laplace import *
    from lightning_bnn.posteriors.merging import *
    from lightning_bnn.posteriors.scales import *
    from lightning_bnn.posteriors.streaming import *
    from lightning_bnn.posteriors.symmetrized import *

lazy_package(__name__)
