"""Some members of a stack, by their indices: taken out, and put back."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["Rows", "put", "some"]

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Indices of members, in ascending order, each once."""


def some(values: Tensor, rows: Rows) -> Tensor:
    """The rows of a tensor; itself if they are all."""
    return values if len(rows) == len(values) else values[torch.from_numpy(rows)]


def put(values: Tensor | None, rows: Rows, new: Tensor, members: int) -> Tensor:
    """A tensor with new rows, written into it unless they are all.

    Args:
        values: what is there, if anything is.
        rows: which to replace.
        new: what they become.
        members: how many rows there are.
    """
    if len(rows) == members:
        return new
    if values is None:
        values = new.new_zeros(members, *new.shape[1:])
    values[torch.from_numpy(rows)] = new
    return values
