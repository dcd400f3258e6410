"""Networks that a user names: import paths, arguments of classes, shapes of inputs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["code_of_the_user", "example_of", "imported", "network_of"]


# ------------------------------------------------------------ input
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


def example_of(text: str) -> tuple[Tensor, ...]:
    """Random inputs of the shapes and types that a user has written.

    Args:
        text: sizes such as 1,3,224,224, with a type after a colon, several separated by ;
    """
    if not text:
        raise ValueError(
            "`--input` is missing: give the shape of the input, e.g. --input 1,3,224,224"
        )
    return tuple(_tensor(part) for part in text.split(";"))


def _tensor(text: str) -> Tensor:
    shape, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        sizes = [int(n) for n in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or math.prod(sizes) > 2**31 or dtype not in _TYPES:
        raise ValueError(
            f"`--input` must be positive sizes with an optional type, like 1,3,224,224 or "
            f"2,16:int64, got {text!r}."
        )
    if dtype.is_floating_point:
        return torch.randn(sizes, dtype=dtype)
    return torch.randint(0, 2, sizes, dtype=dtype)


# ------------------------------------------------------------ network
def network_of(path: str, init: Mapping[str, Any]) -> nn.Module:
    """The network that a class or function returns.

    Args:
        path: where it is imported from.
        init: its arguments.
    """
    factory = imported(path)
    if not callable(factory):
        raise ValueError(
            f"`{path}` is a {type(factory).__name__}, not a class or function that returns a "
            "network."
        )
    if isinstance(factory, nn.Module):
        return factory
    try:
        if inspect.isclass(factory) or inspect.isfunction(factory):
            inspect.signature(factory).bind(**init)
    except TypeError as error:
        raise ValueError(
            f"`{path}` cannot be called with {dict(init)}: {error}. Pass its arguments by --init."
        ) from error
    with code_of_the_user(f"`{path}` raised"):
        model = factory(**init)
    if not isinstance(model, nn.Module):
        raise ValueError(f"`{path}` returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


@contextlib.contextmanager
def code_of_the_user(what: str) -> Iterator[None]:
    """Turn whatever the user's own code raises into one sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {type(error).__name__}: {error}") from error


def imported(path: str) -> Any:
    """What stands under an import path, which is refused in one sentence."""
    name_of_module, _, name = path.replace(".py:", ".").replace(":", ".").rpartition(".")
    if not name_of_module:
        raise ValueError(f"`{path}` is no import path: write package.module.Class.")
    with code_of_the_user(f"`{path}` cannot be imported:"):
        module = importlib.import_module(name_of_module)
    if not hasattr(module, name):
        raise ValueError(f"There is no {name!r} in `{name_of_module}`.")
    return getattr(module, name)
