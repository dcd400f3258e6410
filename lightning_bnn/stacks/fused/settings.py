"""What the computation of a network may depend on besides tensors, and whether it has changed."""

from __future__ import annotations

import types
from collections.abc import Iterable
from functools import partial, singledispatch
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks_of_all

__all__ = ["has_hooks", "settings_of"]

_DEEP = 4
"""Levels of containers and objects inside each other that are looked at."""
_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType)
    + (types.BuiltinFunctionType, types.ModuleType)
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def has_hooks(model: nn.Module) -> bool:
    """Whether functions are called when its modules run.

    Args:
        model: the network.
    """
    return hooks_of_all._has_any_global_hook() or any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )


def settings_of(model: nn.Module) -> tuple[Any, ...]:
    """Something that differs when attributes of the network have changed.

    Containers and other objects are looked into; what is global or belongs to classes is not seen.

    Args:
        model: the network.
    """
    found: list[Any] = []
    for name, module in model.named_modules():
        own = [n for n in vars(module) if n not in _OF_EVERY_MODULE]
        found += (name, type(module), *own, *_seen([vars(module)[n] for n in own], _DEEP))
    return tuple(found)


def _seen(values: Iterable[Any], deep: int) -> list[Any]:
    """What tells values from others."""
    return [
        v if type(v) in _PLAIN else (type(v), *_seen(_inside(v) if deep else (id(v),), deep - 1))
        for v in values
    ]


@singledispatch
def _inside(value: Any) -> Iterable[Any]:
    """What a value consists of."""
    attributes = getattr(value, "__dict__", {})
    return id(value), *attributes, *attributes.values()


@_inside.register(list | tuple | set | frozenset)
def _(value: Iterable[Any]) -> Iterable[Any]:
    return value


@_inside.register
def _(value: dict) -> Iterable[Any]:
    return *value, *value.values()


@_inside.register
def _(value: partial) -> Iterable[Any]:
    return value.func, value.args, value.keywords


@_inside.register
def _(value: types.MethodType) -> Iterable[Any]:
    return value.__func__, id(value.__self__)
