"""Freed memory that stays with the process, so that it is not fetched anew in every step."""

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
    """Ask the C library to hold back up to half a gigabyte of freed memory; once for a process.

    A stack that trains in chunks frees and takes the same few megabytes in every chunk. By default
    glibc gives them back to the system each time, which then has to clear them: a third of a step
    of a population of small convolutional networks. Other C libraries are left as they are.

    Returns:
        Whether it was done.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    done = bool(mallopt(_MMAP, _LARGEST)) and bool(mallopt(_TRIM, _KEPT))
    _log.debug("Freed memory stays with the process: %s.", done)
    return done
