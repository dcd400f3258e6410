"""What is asked of devices other than the CPU, whatever their kind: GPUs, MPS, XPU or NPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "current_stream",
    "elsewhere",
    "fastest",
    "free_memory",
    "random_numbers",
    "remember_randomness",
]


def elsewhere(tensors: Iterable[Any]) -> list[torch.device]:
    """The devices, other than the CPU, that hold tensors.

    Args:
        tensors: objects of other types are passed over.

    >>> elsewhere([torch.zeros(1), torch.zeros(1, device="meta"), "text"])
    []
    """
    devices = {t.device for t in tensors if isinstance(t, Tensor)}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)


def remember_randomness(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Remember the random numbers of the CPU and of devices: what is returned goes back to them.

    Args:
        devices: see `elsewhere`.

    >>> restore = remember_randomness([])
    >>> first = torch.rand(3)
    >>> restore()
    >>> torch.equal(torch.rand(3), first)
    True
    """
    here = torch.get_rng_state()
    states = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]

    def restore() -> None:
        torch.set_rng_state(here)
        for device, state in states:
            torch.get_device_module(device).set_rng_state(state, device)

    return restore


@contextmanager
def random_numbers(devices: Iterable[torch.device], seed: int | None = None) -> Iterator[None]:
    """Random numbers of the CPU and of devices that leave no mark: afterwards they go on as before.

    Args:
        devices: see `elsewhere`.
        seed: starts them anew.

    >>> with random_numbers([], seed=0):
    ...     first = torch.rand(3)
    >>> with random_numbers([], seed=0):
    ...     again = torch.rand(3)
    >>> torch.equal(first, again)
    True
    """
    devices = list(devices)
    restore = remember_randomness(devices)
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            for device in devices:
                state = torch.Generator(device).manual_seed(seed).get_state()
                torch.get_device_module(device).set_rng_state(state, device)
        yield
    finally:
        restore()


def fastest() -> torch.device:
    """The accelerator that torch uses, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def free_memory(device: torch.device) -> int:
    """Bytes that a device can still hold, 0 if it does not say."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return 0 if ask is None else int(ask(device)[0])


def current_stream(device: torch.device) -> Any:
    """The queue of what a device has been told to do, or None if it does everything at once."""
    if device.type == "cpu":
        return None
    ask = getattr(torch.get_device_module(device), "current_stream", None)
    return None if ask is None else ask(device)
