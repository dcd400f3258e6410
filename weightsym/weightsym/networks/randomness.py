"""Random numbers determined by a key, such as (seed, step, rank), regardless of earlier draws.

A run that is resumed then draws what the uninterrupted one would have drawn, and processes that
train copies of one network can share a stream or have streams of their own, as their keys say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weightsym.networks.devices import elsewhere, random_numbers

__all__ = ["key_of", "keyed_generator", "keyed_randomness"]

Part = int | str


def key_of(*parts: Part) -> int:
    """Hash a key to a seed of 63 bits.

    >>> key_of(0, "train", 1) == key_of(0, "train", 1) != key_of(0, "train", 2)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(*parts: Part, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for a key.

    >>> torch.rand(2, generator=keyed_generator(1)).tolist() == torch.rand(
    ...     2, generator=keyed_generator(1)
    ... ).tolist()
    True
    """
    return torch.Generator(device).manual_seed(key_of(*parts))


@contextmanager
def keyed_randomness(*parts: Part, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators by a key in a context, and restore them afterwards.

    Args:
        *parts: the key.
        device: whose generator is meant, besides that of the CPU; any kind of device.

    >>> with keyed_randomness(0, "noise"):
    ...     first = torch.rand(3)
    >>> with keyed_randomness(0, "noise"):
    ...     again = torch.rand(3)
    >>> torch.equal(first, again)
    True
    """
    generators = elsewhere(
        [torch.empty(0, device=device)]
    )  # it has the index of the current device
    with random_numbers(generators, key_of(*parts)):
        yield
