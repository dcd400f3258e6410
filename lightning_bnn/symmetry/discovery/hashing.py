"""Integers mixed into 64 bits, so that sets can be compared by their sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix"]


def mix(values: Any, salt: int) -> NDArray[np.uint64] | np.uint64:
    """Mix integers into 64 bits, so that sets can be compared by their sums."""
    x = np.asarray(values).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(salt + 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
