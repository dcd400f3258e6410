"""The settings of a study by scale: small ones for a look, those of the paper, and one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def settings_of(scales: Mapping[str, T], scale: str, **changes: Any) -> T:
    """The settings of a scale, with those that were given in their place.

    Args:
        scales: settings by name.
        scale: which of them.
        **changes: fields to replace; None keeps the field.
    """
    if scale not in scales:
        raise ValueError(f"`scale` must be one of {', '.join(scales)}, got {scale!r}.")
    changed = {name: value for name, value in changes.items() if value is not None}
    for name, value in changed.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, (int, float)) and not v > 0 for v in values):
            raise ValueError(f"`{name}` must be positive, got {value}.")
    return dataclasses.replace(scales[scale], **changed)  # type: ignore[type-var]  # scales are dataclasses
