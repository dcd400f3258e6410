"""Chunks of members on several threads, each with a copy of the network."""

from __future__ import annotations

import copy
import ctypes
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

_TRIM, _MMAP = -1, -3  # numbers of glibc's mallopt
_KEPT, _LARGEST = 2**29, 2**25
_log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Ask the C library, once, to keep up to half a gigabyte of freed memory.

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
    """End idle OpenMP threads, and return whether this was possible.

    An operation of torch leaves its threads spinning for several milliseconds. The next one that
    needs them starts them anew, which takes a few hundredths of a millisecond.
    """
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Return the pause function of OpenMP 5.0, if a loaded library has it."""
    try:
        pause: Callable[[int], int] = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows a library has a name
        return None
    return pause


# ------------------------------------------------------------ chunks of members on threads
_ALONE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_KNOWN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def threads_for(model: nn.Module, device: torch.device) -> int:
    """Choose the number of threads for chunks of members.

    Only one for networks that draw random numbers, since several threads would draw them in another
    order in every run, and for networks that cannot be copied.
    """
    if device.type != "cpu" or model in _ALONE or model not in _KNOWN:
        return 1
    return torch.get_num_threads()


def in_threads(
    work: Callable[[nn.Module, Any], Any], items: Sequence[Any], model: nn.Module, threads: int
) -> list[Any]:
    """Compute ``[work(model, item) for item in items]`` on several threads.

    Torch's own threads end meanwhile. Gradients and mixed precision are on in the threads if they
    are on here; each thread has a copy of the network, since running it with other weights changes
    it. The state of the generator shows whether the network draws random numbers.

    Args:
        work: what to do with a network and an item.
        items: the threads take them in turn.
        model: the network.
        threads: how many.
    """
    before = torch.default_generator.get_state()
    try:
        if threads == 1:
            return [work(model, item) for item in items]
        return _shared_out(work, items, model, min(threads, len(items)))
    finally:
        _KNOWN.add(model)
        if not torch.equal(before, torch.default_generator.get_state()):
            _ALONE.add(model)


def _shared_out(
    work: Callable[[nn.Module, Any], Any], items: Sequence[Any], model: nn.Module, threads: int
) -> list[Any]:
    results: list[Any] = [None] * len(items)
    grad = torch.is_grad_enabled()
    is_mixed, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run(first: int, network: nn.Module) -> None:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, enabled=is_mixed):
            for k in range(first, len(items), threads):
                results[k] = work(network, items[k])

    try:
        copies = [copied(model) for _ in range(1, threads)]
    except (RuntimeError, TypeError, NotImplementedError):  # it keeps what cannot be copied
        _ALONE.add(model)
        return [work(model, item) for item in items]
    every = torch.get_num_threads()
    torch.set_num_threads(1)
    end_waiting_threads()
    try:
        others = [pool(threads - 1).submit(run, first, net) for first, net in enumerate(copies, 1)]
        try:
            run(0, model)
        finally:
            for future in others:
                future.result()
    finally:
        torch.set_num_threads(every)
    return results


@functools.lru_cache(maxsize=1)
def pool(threads: int) -> ThreadPoolExecutor:
    """Return a cached pool of threads in which torch uses one thread each."""
    return ThreadPoolExecutor(threads, "members", initializer=torch.set_num_threads, initargs=(1,))


_FINDINGS: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


def known_of(model: nn.Module) -> dict[Any, Any]:
    """Return the mutable table of facts about a network.

    Args:
        model: the network.
    """
    return _FINDINGS.setdefault(model, {})


def copied(model: nn.Module) -> nn.Module:
    """Copy a network, sharing its table of facts.

    Args:
        model: what to copy.
    """
    result = copy.deepcopy(model)
    _FINDINGS[result] = known_of(model)
    return result
