"""Products of channels with a parameter: their scale is free on either side."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_bnn.symmetry.rules.broadcasting import align
from lightning_bnn.symmetry.rules.constraints import Constraints, Record
from lightning_bnn.symmetry.rules.labels import Unsupported, Value, Weight, core, moving_dims

__all__ = ["multiply_by_gain"]


def multiply_by_gain(system: Constraints, x: Value, weight: Weight) -> Value | None:
    """The product with a parameter that has one number for every channel; None where it has not."""
    labels, gain = align(x.labels, torch.zeros(()).expand(weight.shape))
    moving, small = moving_dims(labels), core(labels)
    if (
        not moving
        or any((n == 1) == (d in moving) for d, n in enumerate(gain.shape))
        or bool((small <= 0).any())
    ):
        return None
    dim = None
    if len(weight.full_shape) == 1:
        dim, weight = 0, replace(weight, coords=(core(weight.coords[0]).reshape(-1),))
    elif len(moving) == 1:
        dim = moving[0] - (labels.ndim - len(weight.shape))
    elif not _is_whole(weight):
        raise Unsupported("a view of a gain over several dimensions")
    out = system.fresh(*small.shape)
    system.tie(out, small, ("permutation",))
    system.consume(
        weight,
        Record(dim, out.reshape(-1), "gain"),
        Record(dim, small.reshape(-1), "gain in", -1),
    )
    return Value(out.expand(labels.shape))


def _is_whole(weight: Weight) -> bool:
    in_order = all(set(moving_dims(c)) <= {k} for k, c in enumerate(weight.coords))
    return weight.shape == weight.full_shape and in_order
