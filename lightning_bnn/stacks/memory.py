"""Freed memory stays with the process, so that no step has to fetch it from the system again."""

from __future__ import annotations

import ctypes
import functools
import logging

__all__ = ["keep_freed_memory"]

_TRIM, _MMAP = -1, -3  # numbers of glibc's mallopt
_KEPT, _LARGEST = 2**29, 2**25
_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Ask the C library to keep up to half a gigabyte of freed memory; once for a process.

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
