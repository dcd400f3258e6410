"""Why a value does not fit its setting, in the words of whoever writes configurations."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, Namespace

from lightning_bnn.commands.spelling import did_you_mean

__all__ = ["Refusal", "refusal_of"]

_NAMES = {NoneType: ["null"], bool: ["true", "false"]}
_LONGEST = 80
_FULL_PATH = (
    ": give its full path (package.module.Class); modules, data sets and callbacks of this "
    "package are known by their bare names"
)


class Refusal(ArgumentError, TypeError):  # jsonargparse handles both on the way out
    """What a parser does not accept.

    Args:
        reason: what is wrong, without a full stop.
        culprit: the word that is, to be looked for in configurations; by default the setting.
        meant: half a sentence that names a better word.
        key: the full name of the setting; empty if none is to blame.
    """

    def __init__(self, reason: str, culprit: str = "", meant: str = "", key: str = "") -> None:
        colon = "" if reason.startswith("must be") else ":"
        super().__init__(None, f"`{key}`{colon} {reason}" if key else reason)
        self.reason, self.meant, self.key = reason, meant, key
        self.culprit = culprit or key.rpartition(".")[-1]

    def under(self, key: str) -> Refusal:
        """The same, of a setting in the group of this name."""
        whole = f"{key}.{self.key}".rstrip(".")
        return Refusal(self.reason, self.culprit, self.meant, whole)


def refusal_of(hint: Any, value: Any) -> Refusal:
    """Why a value was refused.

    >>> print(refusal_of(int | None, "many"))
    must be int or null, got many

    Args:
        hint: the type that was asked for.
        value: as it was typed, or as it was read from a file.
    """
    classes = tuple(_classes(hint))
    others = {*_alternatives(hint)} - {*(kind.__name__ for kind in classes), "null"}
    for path in _class_paths(value):
        looks_like_one = "." in path or path[:1].isupper()
        if classes and (looks_like_one or not others) and (problem := _problem(path, classes)):
            return problem
    shown = str(value.as_dict() if isinstance(value, Namespace) else value)
    shown = shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "..."
    note = "" if others else " (a class, or a group of `class_path` and `init_args`)"
    return Refusal(f"must be {_choice(hint)}{note}, got {shown}")


# ------------------------------------------------------------ types
def _choice(hint: Any) -> str:
    """All that fits, null last.

    >>> _choice(Literal["a", "b"] | None), _choice(list[int])
    ("'a', 'b' or null", 'a list of int')
    """
    *names, last = sorted(dict.fromkeys(_alternatives(hint)), key=lambda name: name == "null")
    return f"{', '.join(names)} or {last}" if names else last


def _alternatives(hint: Any) -> list[str]:
    """What fits, as a user would write it; null for None."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [name for kind in args for name in _alternatives(kind)]
    if origin is Literal:
        return [repr(value) for value in args]
    if args and origin in (Callable, Annotated):
        return _alternatives(args[-1] if origin is Callable else args[0])
    if args and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return [f"a list of {_choice(args[0])}"]
    return _NAMES.get(hint) or [getattr(origin or hint, "__name__", str(hint))]


def _classes(hint: Any) -> Iterator[type]:
    """The classes of which a type accepts an instance, or a function that makes one."""
    for inner in get_args(hint):
        yield from _classes(inner)
    if inspect.isclass(hint) and hint.__module__.split(".")[0] not in sys.stdlib_module_names:
        yield hint


# ------------------------------------------------------------ classes
def _class_paths(value: Any) -> list[str]:
    """What may be meant as the name of a class."""
    if isinstance(value, list):
        return [path for item in value for path in _class_paths(item)]
    path = value.get("class_path") if isinstance(value, (dict, Namespace)) else value
    return [path.strip("[]")] if isinstance(path, str) else []


def _problem(path: str, wanted: tuple[type, ...]) -> Refusal | None:
    """Why there is no class of that name, or why it is none that is wanted."""
    module, _, name = path.rpartition(".")
    if not module:
        known = {kind.__name__ for kind in _subclasses(wanted)}
        meant = did_you_mean(path, known)
        missing = Refusal(f"there is no class {path!r}{'' if meant else _FULL_PATH}", path, meant)
        return None if path in known else missing
    try:
        kind = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        return Refusal(f"there is no module {error.name!r}", str(error.name))
    except AttributeError as error:
        meant = did_you_mean(name, (n for n in dir(error.obj) if not n.startswith("_")))
        return Refusal(f"there is no {name!r} in {module}", name, meant)
    if inspect.isclass(kind) and issubclass(kind, wanted):
        return None
    return Refusal(f"{path} is no {' or '.join(kind.__name__ for kind in wanted)}", name)


def _subclasses(classes: tuple[type, ...]) -> Iterator[type]:
    """All imported classes that count as one of these; configurations know their bare names."""
    for kind in classes:
        yield kind
        yield from _subclasses(tuple(kind.__subclasses__()))
