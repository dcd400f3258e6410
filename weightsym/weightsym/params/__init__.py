"""Functions on `Params`, the one currency of this package: a dict from state-dict names to tensors.

One network is a dict with the shapes of its module. A *stack* of N networks is the same dict with
one leading dimension N. Weights are the floating parameters; buffers (BatchNorm statistics) travel
with them.
"""

from weightsym.params.networks import (
    Networks,
    Params,
    RavelSpec,
    is_stacked,
    is_weight,
    of,
    ravel,
    shares,
    stack,
    stack_size,
    unravel,
    unstack,
    weight_names,
    weighted_mean,
)
from weightsym.params.populations import populate, stacked_copy
from weightsym.params.prediction import apply, apply_each, chunk_of
from weightsym.stacks.running import runs_at_once

__all__ = [
    "Networks",
    "Params",
    "RavelSpec",
    "apply",
    "apply_each",
    "chunk_of",
    "is_stacked",
    "is_weight",
    "of",
    "populate",
    "ravel",
    "runs_at_once",
    "shares",
    "stack",
    "stack_size",
    "stacked_copy",
    "unravel",
    "unstack",
    "weight_names",
    "weighted_mean",
]
