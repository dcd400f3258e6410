"""Constants that biases and tables may gain: followed through graphs, solved for, and grouped."""

from lightning_bnn.symmetry.discovery.constants.following import follow_constants
from lightning_bnn.symmetry.discovery.constants.grouping import shift_groups
from lightning_bnn.symmetry.discovery.constants.operands import Followed

__all__ = ["Followed", "follow_constants", "shift_groups"]
