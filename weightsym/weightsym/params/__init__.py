"""Functions on `Params`, the one currency of this package: a dict from state-dict names to tensors.

One network is a dict with the shapes of its module. A *stack* of N networks is the same dict with
one leading dimension N. Weights are the floating parameters; buffers (BatchNorm statistics) travel
with them.
"""

from typing import TYPE_CHECKING

from weightsym._lazy import lazy_package

if TYPE_CHECKING:
    from weightsym.params.networks import *
    from weightsym.params.populations import *
    from weightsym.params.prediction import *
    from weightsym.stacks.running import runs_at_once

lazy_package(__name__)
