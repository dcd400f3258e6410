"""Whether a posterior was trained on the data that it is judged by, as configurations say it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_bnn import datamodules
from lightning_bnn.comparison.places import Place
from lightning_bnn.settings_files import read_settings

__all__ = ["has_other_data"]

_CHANGE_NOTHING = frozenset(
    ("root", "batch_size", "eval_batch_size", "orders", "num_workers", "augment")
)
"""Arguments of datamodules that leave the sets of examples as they are."""


def has_other_data(place: Place, config: Path) -> bool:
    """Whether the run of a posterior names other data, or another split, than a configuration.

    Its training examples may then be among those that are judged. Places without a configuration
    of their own say nothing.

    Args:
        place: where the posterior is.
        config: with the data that it is judged by.
    """
    own = place.config()
    if own is None or own.resolve() == config.resolve():
        return False
    try:
        data, other = (read_settings(path)["data"] for path in (own, config))
    except (OSError, KeyError, TypeError, ValueError):
        return False
    (name, arguments), (other_name, others) = _sets(data), _sets(other)
    both = arguments.keys() & others.keys()
    return name != other_name or any(arguments[key] != others[key] for key in both)


def _sets(data: Any) -> tuple[str, dict[str, Any]]:
    """The class, and the arguments that decide which examples are where, with their defaults."""
    if not isinstance(data, Mapping):
        data = {"class_path": data}
    name = str(data.get("class_path")).rpartition(".")[2]
    arguments = {**_defaults(name), **(data.get("init_args") or {})}
    return name, {k: v for k, v in arguments.items() if k not in _CHANGE_NOTHING}


def _defaults(name: str) -> dict[str, Any]:
    """What the arguments of a datamodule of this package are if they are not given."""
    parameters = inspect.signature(getattr(datamodules, name, object)).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
