"""Operations on any device besides the CPU: GPUs, MPS, XPU or NPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "at_least_single",
    "check_memory",
    "current_stream",
    "elsewhere",
    "fastest",
    "free_memory",
    "has_float64",
    "kept_on",
    "pieces",
    "precise",
    "random_numbers",
    "remember_randomness",
    "where_precise",
    "widest",
]


def elsewhere(tensors: Iterable[Any]) -> list[torch.device]:
    """List the devices of tensors, except the CPU; other objects are ignored."""
    devices = {t.device for t in tensors if isinstance(t, Tensor)}
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)


def remember_randomness(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Save the random states of the CPU and of devices. Return a function that restores them.

    Args:
        devices: see `elsewhere`.
    """
    of_cpu = torch.get_rng_state()
    states = [(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]

    def restore() -> None:
        torch.set_rng_state(of_cpu)
        for device, state in states:
            torch.get_device_module(device).set_rng_state(state, device)

    return restore


@contextmanager
def random_numbers(devices: Iterable[torch.device], seed: int | None = None) -> Iterator[None]:
    """Seed the CPU and devices in a context, and restore their random states afterwards.

    Args:
        devices: see `elsewhere`.
        seed: starts them anew.
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
    """Return the accelerator of torch, or the CPU if there is none with float64."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if device is None or not has_float64(device) else device


def has_float64(device: torch.device | str) -> bool:
    """Return whether a device computes in float64, as MPS and some XPU do not."""
    return _has_float64(torch.device(device).type)


@functools.cache
def _has_float64(device_type: str) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device_type)
    except (TypeError, RuntimeError):
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype for sums and energies in training: float64 if the device has it.

    Where it has not, that is float32, and what measures (metrics, callbacks that look at weights,
    comparisons) computes on the CPU, see `where_precise`.
    """
    return torch.float64 if has_float64(device) else torch.float32


_AT_ONCE = 2**22


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a large tensor in parts, which are converted with little memory.

    Args:
        tensor: of any shape; one that does not lie in order is returned whole.
    """
    if tensor.numel() <= _AT_ONCE or not tensor.is_contiguous():
        return (tensor,)
    return tensor.flatten().split(_AT_ONCE)


def where_precise(tensor: Tensor) -> Tensor:
    """Move a tensor to the CPU unless its device has float64."""
    return tensor if has_float64(tensor.device) else tensor.cpu()


def precise(tensor: Tensor) -> Tensor:
    """Convert a tensor to the `widest` dtype of its device."""
    return tensor.to(widest(tensor.device))


def kept_on(table: Tensor, device: torch.device) -> Tensor:
    """Copy a constant table to a device, once.

    Args:
        table: is not written to.
        device: where it is needed.
    """
    if table.device == device:
        return table
    copies = _COPIES.setdefault(table, {})
    if device not in copies:
        wide = table.dtype == torch.float64
        copies[device] = table.to(device, widest(device) if wide else table.dtype)
    return copies[device]


_COPIES: Any = WeakIdKeyDictionary()


def at_least_single(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 at least: half precision is too coarse for long sums."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes, or 0 if unknown."""
    return _free_and_whole_memory(device)[0]


def check_memory(size: int | float, device: torch.device, title: str, instead: str) -> None:
    """Refuse sizes that exceed a device's memory, in a sentence that suggests an alternative.

    Args:
        size: bytes that it takes at least.
        device: which is to hold it.
        title: the name of what takes them.
        instead: advice.

    >>> check_memory(1e18, torch.device("cpu"), "A matrix", "take a smaller one")
    Traceback (most recent call last):
    ValueError: A matrix takes 1000000 TB of memory, and cpu has ... GB: take a smaller one.
    """
    memory = _whole_memory(device)
    if 0 < memory < size:
        takes = f"{size / 1e9:.0f} GB" if size < 1e13 else f"{size / 1e12:.0f} TB"
        has = f"{memory / 1e9:.0f} GB"
        raise ValueError(f"{title} takes {takes} of memory, and {device} has {has}: {instead}.")


def _whole_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes, or 0 if unknown."""
    if device.type == "meta":
        return 0
    if device.type != "cpu":
        return _free_and_whole_memory(device)[1]
    is_available = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(getattr(os, "sysconf_names", ()))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if is_available else 0


def _free_and_whole_memory(device: torch.device) -> tuple[int, int]:
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return (0, 0) if ask is None else ask(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device, or None if it executes synchronously."""
    if device.type == "cpu":
        return None
    ask = getattr(torch.get_device_module(device), "current_stream", None)
    return None if ask is None else ask(device)
