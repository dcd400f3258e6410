"""The functions of `weightsym.params` under the name of this package."""

from weightsym import params
from weightsym.params import *  # noqa: F403

__all__ = [*vars(params)["__all__"]]
