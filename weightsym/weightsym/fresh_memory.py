"""Memory for many large tensors in turn: what one of them has left is given to the next.

The first pass over new memory is several times as slow as all later ones, since the system hands it
out page by page, and takes it back when a large tensor is freed. Where the C library keeps it
instead, in pieces that fit nothing later, `hand_back` returns it.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["copied", "fresh", "hand_back", "reused_memory"]

_SMALL, _SLAB, _ALIGNED = 2**16, 2**23, 64
Block = NDArray[np.uint8]


class _Memory:
    """Blocks that nobody uses, cut from slabs that are large enough for large pages."""

    def __init__(self) -> None:
        self.free: list[Block] = []
        self.rest: Block = np.empty(0, np.uint8)

    def take(self, size: int) -> Block:
        """The smallest block that fits, or a new one where that wastes more than it holds."""
        fitting = [k for k, b in enumerate(self.free) if size <= len(b) <= 2 * size]
        if fitting:
            return self.free.pop(min(fitting, key=lambda k: len(self.free[k])))
        whole = -(-size // _ALIGNED) * _ALIGNED
        if whole > len(self.rest):
            if whole > _SLAB // 2:
                return np.empty(whole, np.uint8)
            self.rest = np.empty(_SLAB, np.uint8)
        block, self.rest = self.rest[:whole], self.rest[whole:]
        return block

    def lend(self, size: int) -> Block:
        """A block that comes back when nobody looks at it any more."""
        block = self.take(size)
        loan = block[:size]
        weakref.finalize(loan, self.free.append, block).atexit = False
        return loan


_current: ContextVar[_Memory | None] = ContextVar("memory", default=None)


@contextmanager
def reused_memory() -> Iterator[None]:
    """Use memory that is freed inside again, and give all of it back at the end."""
    token = _current.set(_Memory())
    try:
        yield
    finally:
        _current.reset(token)
        hand_back()


def fresh(shape: torch.Size, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    """An empty contiguous tensor, in memory that an earlier one has left where there is any."""
    memory, size = _current.get(), shape.numel() * dtype.itemsize
    if memory is None or size < _SMALL or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(memory.lend(size)).view(dtype).view(shape)


def copied(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy in memory of its own, in another precision where one is given."""
    return fresh(tensor.shape, dtype or tensor.dtype, tensor.device).copy_(tensor)


def hand_back() -> None:
    """Return to the system what the C library keeps of freed memory, where it can be asked to."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # of glibc
    except (AttributeError, OSError, TypeError):
        return None
