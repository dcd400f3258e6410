"""The settings of a study by scale: small ones, those of the paper, and changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def settings_of(scales: Mapping[str, T], scale: str, **changes: Any) -> T:
    """Return the settings of a scale, with changes.

    Args:
        scales: settings by name.
        scale: name of the settings.
        **changes: new values of fields; None keeps the field.
    """
    if scale not in scales:
        raise ValueError(f"`scale` must be one of {', '.join(scales)}, got {scale!r}.")
    changed = {name: value for name, value in changes.items() if value is not None}
    for name, value in changed.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, (int, float)) and not v > 0 for v in values):
            raise ValueError(f"`{name}` must be positive, got {value}.")
    return dataclasses.replace(scales[scale], **changed)  # type: ignore[type-var]  # scales are dataclasses
