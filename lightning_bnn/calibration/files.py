"""Calibrations in files: tensors, and what else they consist of as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import loading
from lightning_bnn.likelihoods import Gaussian

__all__ = ["load", "save"]

_FORMAT = "lightning_bnn calibration 1"


def save(content: Any, path: Path) -> None:
    """Write a dataclass of tensors, numbers, text, and other dataclasses of this kind.

    Args:
        content: what is written.
        path: of the file.
    """
    tensors: dict[str, Tensor] = {}
    plain = _plain(content, "", tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": _FORMAT, "plain": json.dumps(plain), "tensors": tensors}, path)


def load(path: Path, kinds: Sequence[Any]) -> Any:
    """Read what `save` has written; nothing in the file is executed.

    Args:
        path: of the file.
        kinds: the classes whose objects it may hold.
    """
    content = loading.load(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} holds no calibration of this package.")
    try:
        return _object(json.loads(content["plain"]), content["tensors"], kinds)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no calibration that can be read: {error}.") from error


def _plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON knows it; tensors are replaced by their names."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, nn.Module):
        fields = {"noise": value.noise, "least": value.least} if isinstance(value, Gaussian) else {}
        fields |= dict(value.state_dict())
    else:
        return {"mapping": dict(value)} if isinstance(value, Mapping) else value
    inner = {key: _plain(v, f"{name}.{key}".lstrip("."), tensors) for key, v in fields.items()}
    return {"kind": type(value).__name__, "fields": inner}


def _object(plain: Any, tensors: Mapping[str, Tensor], kinds: Sequence[Any]) -> Any:
    """The value that `_plain` has made JSON of."""
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        return tensors[plain["tensor"]]
    if "mapping" in plain:
        return {str(k): float(v) for k, v in plain["mapping"].items()}
    kind = {kind.__name__: kind for kind in kinds}[plain["kind"]]
    fields = {key: _object(v, tensors, kinds) for key, v in plain["fields"].items()}
    if not issubclass(kind, nn.Module):
        return kind(**fields)
    log_std = fields.pop("log_std", None)
    module = kind(**fields) if log_std is None else kind(**fields, targets=len(log_std))
    if log_std is not None:
        module.load_state_dict({"log_std": log_std})
    return module
