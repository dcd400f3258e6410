"""Held-out predictions: where they are from, and how one part fits what the other one judges."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.arguments import is_number
from lightning_bnn.randomness import keyed_generator

__all__ = ["split_rows", "validation_loaders"]


def validation_loaders(datamodule: Any) -> list[Any]:
    """The loaders of validation data; refused if there are none, with what would give some.

    Args:
        datamodule: anything with a ``val_dataloader``, after ``setup("fit")``.

    >>> from lightning_bnn.datamodules import Yacht
    >>> (loader,) = validation_loaders(Yacht(val_size=50))
    >>> len(loader.targets)
    50
    """
    make = getattr(datamodule, "val_dataloader", None)
    if not callable(make):
        raise ValueError(
            f"`datamodule` must have a `val_dataloader`, got a {type(datamodule).__name__}."
        )
    setup = getattr(datamodule, "setup", None)
    if callable(setup):
        getattr(datamodule, "prepare_data", lambda: None)()
        setup("fit")
    found = _made(make)
    if isinstance(found, dict):
        found = list(found.values())
    loaders = list(found) if isinstance(found, (list, tuple)) else [found]
    loaders = [loader for loader in loaders if loader is not None]
    if not loaders:
        raise ValueError(f"{type(datamodule).__name__} has no validation data{_hint(datamodule)}.")
    return loaders


def _made(make: Any) -> Any:
    """The loaders; a datamodule of Lightning that has none raises an exception of its own."""
    try:
        return make()
    except NotImplementedError:
        return None
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":  # Lightning is not known here
            raise
        return None


def split_rows(n: int, share: int | float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows to fit a calibrator to, and rows for all else: prediction sets, and numbers.

    What is fitted to an example knows its label, and prediction sets must not: they hold the truth
    as often as they say only if their examples were kept apart.

    Args:
        n: how many examples there are.
        share: of them that is kept apart.
        seed: of the split.
    """
    if not (is_number(share) and 0 < share < 1):
        raise ValueError(f"`held_out` must be between 0 and 1, such as 0.5, got {share!r}.")
    if n < 2:
        raise ValueError(
            f"Calibration takes at least 2 validation examples, got {n}: one to fit, one to judge."
        )
    kept = min(n - 1, max(1, round(n * share)))
    order = torch.randperm(n, generator=keyed_generator(seed, "calibration"))
    return order[kept:].sort().values, order[:kept].sort().values


def _hint(datamodule: Any) -> str:
    """The arguments of its constructor that say how much is held out for validation."""
    names = [n for n in inspect.signature(type(datamodule)).parameters if n.startswith("val")]
    if not names:
        return ": calibration needs examples that were not trained on, from its `val_dataloader`"
    current = ", ".join(f"`{name}` is {getattr(datamodule, name, '?')}" for name in names)
    return f" ({current}): give it some by `{names[0]}`, and train again"
