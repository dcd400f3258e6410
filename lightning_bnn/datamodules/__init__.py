"""Data sets, with out-of-distribution and shifted test sets."""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.datamodules.base import *
    from lightning_bnn.datamodules.digits import *
    from lightning_bnn.datamodules.images import *
    from lightning_bnn.datamodules.toy import *
    from lightning_bnn.datamodules.uci import *

lazy_package(__name__)
