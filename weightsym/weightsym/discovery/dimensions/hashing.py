"""Hashes of 64 bits, so that sets can be compared by the sums of their hashes."""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Hashes: TypeAlias = NDArray[np.uint64]


def mix(*columns: Any) -> Hashes:
    """Hash the rows of several columns."""
    h: Any = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for column in columns:
            x = np.asarray(column).astype(np.uint64)
            h = (h ^ x) * np.uint64(0xBF58476D1CE4E5B9)
            h = (h ^ (h >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            h = h ^ (h >> np.uint64(32))
    return np.asarray(h)


def code_of(x: object) -> int:
    """Hash the `repr` of an object."""
    return int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=8).digest(), "little")
