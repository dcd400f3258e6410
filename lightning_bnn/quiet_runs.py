"""Settings for runs inside a command: without messages of Lightning, and on one thread."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quiet(warn: bool = False) -> Iterator[None]:
    """Suppress messages of Lightning below errors.

    Args:
        warn: whether to allow warnings.
    """
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            if not warn:
                warnings.simplefilter("ignore")
            yield
    except SystemExit as end:  # what Lightning makes of Ctrl-C
        raise KeyboardInterrupt from end
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: as fast for small networks, and much faster beside other jobs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
