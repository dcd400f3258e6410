"""The only loader of torch files in this package: tensors and plain data, no code."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def load(path: str | Path, mmap: bool = False) -> Any:
    """Load a torch file to the CPU, without executing any of its code.

    Args:
        path: a file that `torch.save` or a Trainer has written.
        mmap: leave tensors on the disk until they are used.

    Raises:
        ValueError: it is damaged, no such file, or holds other objects than tensors and plain data.
    """
    if zipfile.is_zipfile(path) and not _is_whole(path):
        raise ValueError(f"{path} is damaged: its content does not match its checksums.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} {describe_content(error)}; save `model.state_dict()`.") from error


def _is_whole(path: str | Path) -> bool:
    """Return whether an archive matches its CRCs, which torch writes but does not check."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # damage makes zipfile raise whatever the bytes suggest
        return False


def describe_content(error: Exception) -> str:
    """Explain in half a sentence why torch could not load a file."""
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    name = "" if foreign is None else foreign[1]
    is_name = re.fullmatch(r"[\w.]{1,200}", name)
    content = f"an object of {name}" if is_name else "no plain tensors that torch can read"
    return f"holds {content}, and is not loaded: only tensors and plain data are"


def read_json(path: Path, remedy: str = "it must be an object of JSON") -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: the file.
        remedy: what to do if it is damaged.
    """
    try:
        content = parse_json(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: {remedy}.")
    return content


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON. Excessive nesting is a `ValueError`, like any other damage.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_text(content: Any) -> str:
    """Write plain data as JSON, with null for numbers that are not finite.

    >>> print(json_text([1, float("nan")]))
    [
     1,
     null
    ]
    """
    return json.dumps(_finite(content), indent=1, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(name): _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
