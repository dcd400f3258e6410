"""How complex numbers treat channels: real and imaginary part are two places of one channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Node

from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import Value, core, moving_dims, narrow_except, shape_of

__all__ = ["from_parts", "to_parts", "view_as_complex"]


def view_as_complex(system: Constraints, node: Node, x: Any) -> Value:
    """Pairs of the last dimension become one number."""
    labels = system.labels(x)
    return from_parts(system, node, Value(labels[..., 0]), Value(labels[..., 1]))


def from_parts(system: Constraints, node: Node, real: Any, imaginary: Any) -> Value:
    """Real and imaginary part move, scale and flip together; they do not change places."""
    parts = torch.broadcast_tensors(system.labels(real), system.labels(imaginary))
    small = [narrow_except(part, moving_dims(*parts)) for part in parts]
    system.tie(*small)
    system.seen.append(np.unique(small[0].clamp_min(0).numpy()))
    return Value(parts[0].expand(shape_of(node)))


def to_parts(system: Constraints, node: Node, x: Any) -> Value:
    """Two channels for every number, which move, scale and flip together."""
    small = core(system.labels(x))
    parts = system.fresh(*small.shape, 2)
    system.tie(parts, small[..., None])
    system.seen.append(parts[..., 0].reshape(-1).numpy())
    return Value(parts.expand(shape_of(node)))
