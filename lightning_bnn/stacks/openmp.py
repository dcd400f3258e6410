"""Torch's own threads, which wait awake for their next operation and hinder others meanwhile."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["end_waiting_threads"]

_SOFT = 1
"""OpenMP's ``omp_pause_soft``: threads end, settings stay."""


def end_waiting_threads() -> bool:
    """End the threads that OpenMP keeps for the next operation, and say whether there was a way.

    An operation of torch leaves its threads spinning for several milliseconds. The next one that
    needs them starts them anew, which takes a few hundredths of a millisecond.
    """
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """The function of OpenMP 5.0, if this process has loaded a library with it."""
    try:
        pause: Callable[[int], int] = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows a library has a name
        return None
    return pause
