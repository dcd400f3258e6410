"""The module that parts belong to, as a type: they cannot import the file that imports them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian
else:
    from lightning.pytorch import LightningModule as Bayesian

__all__ = ["Bayesian"]
