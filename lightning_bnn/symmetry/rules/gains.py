"""Products of channels with a parameter: their scale is free on either side."""

from __future__ import annotations

import torch

from lightning_bnn.symmetry.rules.broadcasting import align
from lightning_bnn.symmetry.rules.constraints import Constraints, Record
from lightning_bnn.symmetry.rules.labels import Unsupported, Value, Weight, core, varies

__all__ = ["gained"]


def gained(system: Constraints, x: Value, weight: Weight) -> Value | None:
    """The product with a parameter that has one number for every channel; None where it has not."""
    labels, *_ = align([x.labels, torch.zeros((1,) * len(weight.shape))])
    shape = (1,) * (labels.ndim - len(weight.shape)) + tuple(weight.shape)
    moving = [d for d, moves in enumerate(varies(labels)) if moves]
    uniform_elsewhere = all(n == 1 or d in moving for d, n in enumerate(shape))
    if (
        not moving
        or any(shape[d] == 1 for d in moving)
        or not uniform_elsewhere
        or bool((core(labels) <= 0).any())
    ):
        return None
    small = core(labels)
    out = system.fresh(*small.shape)
    system.tie(out, small, ("permutation",))
    dim = 0 if len(weight.full_shape) == 1 else None
    if len(moving) == 1 and len(weight.full_shape) > 1:
        dim = moving[0] - (labels.ndim - len(weight.shape))
    elif dim is None and not _is_whole(weight):
        raise Unsupported("a view of a gain over several dimensions")
    system.consume(
        weight if dim is None or len(weight.full_shape) > 1 else _flat(weight),
        Record(dim, out.reshape(-1).numpy(), "gain", 1, 1),
        Record(dim, small.reshape(-1).numpy(), "gain in", -1, 1),
    )
    return Value(out.expand(labels.shape))


def _is_whole(weight: Weight) -> bool:
    in_order = all(
        not any(m for d, m in enumerate(varies(c)) if d != k) for k, c in enumerate(weight.coords)
    )
    return weight.shape == weight.full_shape and in_order


def _flat(weight: Weight) -> Weight:
    return Weight(
        weight.name, (core(weight.coords[0]).reshape(-1),), weight.full_shape, weight.is_buffer
    )
