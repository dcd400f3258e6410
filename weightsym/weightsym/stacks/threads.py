"""Chunks of members on several threads, each of which has a copy of the network."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from weightsym.stacks.process import end_waiting_threads

__all__ = ["in_threads", "pool", "threads_for", "copied", "known_of"]

_ALONE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_KNOWN: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def threads_for(model: nn.Module, device: torch.device) -> int:
    """Choose how many threads run chunks of members.

    Only one for networks that draw random numbers, since several threads would draw them in another
    order in every run, and for networks that cannot be copied.
    """
    if device.type != "cpu" or model in _ALONE or model not in _KNOWN:
        return 1
    return torch.get_num_threads()


def in_threads(
    work: Callable[[nn.Module, Any], Any], items: Sequence[Any], model: nn.Module, threads: int
) -> list[Any]:
    """``[work(model, item) for item in items]``, on several threads.

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
    """Threads in each of which torch uses one thread. Kept until another number is asked for."""
    return ThreadPoolExecutor(threads, "members", initializer=torch.set_num_threads, initargs=(1,))


_FINDINGS: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


def known_of(model: nn.Module) -> dict[Any, Any]:
    """Facts that were found out about a network, to read and to add to.

    Args:
        model: the network.
    """
    return _FINDINGS.setdefault(model, {})


def copied(model: nn.Module) -> nn.Module:
    """A copy of a network that knows what is known of the network, also later.

    Args:
        model: what to copy.
    """
    result = copy.deepcopy(model)
    _FINDINGS[result] = known_of(model)
    return result
