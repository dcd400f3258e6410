"""Plots: pure functions from tensors to matplotlib figures."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.plots.dots import *
    from lightning_bnn.plots.lines import *
    from lightning_bnn.plots.panels import *

lazy_package(__name__)
