"""Functions on `Params`, the representation of networks: a dict from state-dict names to tensors.

One network is a dict with the shapes of its module. A *stack* of N networks is the same dict with
one leading dimension N. Weights are the floating parameters; buffers (BatchNorm statistics) travel
with them.
"""

from typing import TYPE_CHECKING

from weightsym._lazy import lazy_package

if TYPE_CHECKING:
    from weightsym.networks.dicts import *
    from weightsym.networks.populations import *
    from weightsym.networks.prediction import *
    from weightsym.networks.randomness import *
    from weightsym.networks.running import runs_at_once
if TYPE_CHECKING:  # for packages that build on this one
    from weightsym.arguments import *
    from weightsym.networks.batch_norms import batch_norms, has_statistics, refreshed
    from weightsym.networks.devices import *
    from weightsym.networks.engines import (
        Energies,
        Field,
        Formula,
        Loss,
        Losses,
        Memory,
        compute,
        engine_for,
    )
    from weightsym.networks.forward import (
        Inputs,
        first_line,
        in_precision,
        in_runnable_precision,
        structural_copy,
    )
    from weightsym.networks.prediction import apply_each_in_place, apply_in_place
    from weightsym.networks.threads import in_threads, keep_freed_memory, threads_for

lazy_package(__name__)
