"""Settings of the C library and of OpenMP in this process: freed memory, and waiting threads."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

__all__ = ["end_waiting_threads", "keep_freed_memory"]

_TRIM, _MMAP = -1, -3  # numbers of glibc's mallopt
_KEPT, _LARGEST = 2**29, 2**25
_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Ask the C library to keep up to half a gigabyte of freed memory. Once for a process.

    A step of training frees and takes the same memory again and again: the chunks of a stack, the
    weights that variational inference draws. By default glibc gives it back to the system each
    time, which then has to clear it: a third of a step of a population of small convolutional
    networks. Other C libraries are left as they are.

    Returns:
        Whether glibc has agreed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    is_kept = bool(mallopt(_MMAP, _LARGEST)) and bool(mallopt(_TRIM, _KEPT))
    _log.debug("Freed memory stays with the process: %s.", is_kept)
    return is_kept


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
