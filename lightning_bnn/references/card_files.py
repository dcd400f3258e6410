"""Cards as JSON: what must be in such a file, and numbers that JSON does not know."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_bnn.references.diagnosis import SPACES

__all__ = ["read_card_file", "write_card_file"]

_MEASURED = {...: (float, float)}
_SPACES = dict.fromkeys(
    SPACES, dict.fromkeys(("rhat_max", "rhat_median", "ess_min", "ess_tail_min"), float)
)
_MADE = {
    "sampler": str, "settings": {...: object}, "transitions": int, "burn_in": int, "every": int,
    "seconds": int, "gradients": int, "acceptance": float, "versions": str, "machine": str,
}  # fmt: skip
_CARD = {
    "name": str,
    "about": str,
    "made": _MADE,
    "sha256": str,
    "diagnosis": {"chains": int, "draws": int, "spaces": _SPACES, "halves": _MEASURED},
    "again": [
        {"seed": int, "failures": [str], "spaces": _SPACES, "halves": _MEASURED,
         "distances": _MEASURED}
    ],
    "licence": str,
    "failures": [str],
}  # fmt: skip
"""Groups by name (`...`: any names), lists, pairs; a number may be null."""


def write_card_file(content: Mapping[str, Any], path: Path) -> None:
    """Write a card; numbers that are not finite are null, since JSON has no other word for them.

    Args:
        content: of the card, in plain types.
        path: of the file.
    """
    text = json.dumps(_finite(content), indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_card_file(path: Path) -> dict[str, Any]:
    """What such a file holds, numbers that are null being NaN.

    Args:
        path: of the file.
    """
    try:
        content = _shaped(json.loads(path.read_text(encoding="utf-8")), _CARD, "card")
    except ValueError as error:
        raise ValueError(f"{path} is no card of a reference, or it is damaged ({error}).") from None
    return dict(content)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


# ------------------------------------------------------------ the shape of what is read
def _shaped(content: Any, shape: Any, name: str) -> Any:
    """The content, refused if it has another shape; numbers become floats."""
    if isinstance(shape, dict):
        return _group(content, shape, name)
    if isinstance(shape, list):
        return [_shaped(item, shape[0], name) for item in _of_kind(content, list, name)]
    if isinstance(shape, tuple):
        if len(_of_kind(content, list, name)) != len(shape):
            raise ValueError(f"`{name}` must have {len(shape)} numbers, got {len(content)}")
        return tuple(_shaped(*pair, name) for pair in zip(content, shape, strict=True))
    if shape is float:
        return math.nan if content is None else float(_of_kind(content, (int, float), name))
    return _of_kind(content, shape, name)


def _group(content: Any, shape: Mapping[Any, Any], name: str) -> dict[str, Any]:
    given = _of_kind(content, dict, name)
    if ... in shape:
        return {key: _shaped(value, shape[...], key) for key, value in given.items()}
    for key in given.keys() ^ shape.keys():
        raise ValueError(f"`{key}` of `{name}` is {'missing' if key in shape else 'not known'}")
    return {key: _shaped(given[key], inner, key) for key, inner in shape.items()}


def _of_kind(content: Any, kind: Any, name: str) -> Any:
    if not isinstance(content, kind) or (isinstance(content, bool) and kind is not object):
        raise ValueError(f"`{name}` cannot be {content!r:.40}")
    return content
