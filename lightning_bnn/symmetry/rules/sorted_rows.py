"""Rows that were sorted by what they are sent to, each times its own matrix of a stack."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.contraction import ndim_of, sum_of_products
from lightning_bnn.symmetry.rules.gathered import rows_at
from lightning_bnn.symmetry.rules.labels import (
    Chosen,
    Ends,
    Index,
    Unsupported,
    Weight,
    fixed,
    shape_of,
)

__all__ = ["grouped_mm"]


def grouped_mm(
    system: Constraints,
    node: Node,
    x: Any,
    matrices: Any,
    offsets: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Tokens times the matrices of their experts: as if these were gathered, token by token."""
    if not isinstance(matrices, Weight) or len(matrices.shape) != 3 or ndim_of(x) != 2:
        raise Unsupported("a grouped product that is not one of tokens and a stack of matrices")
    if bias is not None:
        raise Unsupported("a grouped product with a bias")
    rows, width = shape_of(node)
    shape = torch.Size([rows, matrices.shape[1], width])
    chosen = fixed([rows])
    if isinstance(offsets, Chosen):
        if not isinstance(offsets, Ends):
            raise Unsupported("a grouped product that does not end where counts say")
        chosen = Index(chosen.labels, offsets.channels)
    gathered = rows_at(system, matrices, chosen, node.args[2], shape)
    return sum_of_products(system, node, (x, gathered), ("si", "sio"), "so")
