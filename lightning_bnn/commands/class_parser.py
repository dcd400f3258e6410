"""A parser of configurations with classes, which are known by their bare names if they are ours."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Container, Iterator
from typing import Any, get_args

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from weightsym.commands.parsers import Refusal, StrictParser, did_you_mean, refusal_of

__all__ = ["ClassParser", "import_exports"]

_CLASS = " (a class, or a group of `class_path` and `init_args`)"
_FULL_PATH = (
    ": give its full path (package.module.Class); modules, data sets and callbacks of this "
    "package are known by their bare names"
)


class ClassParser(StrictParser, LightningArgumentParser):
    """The parser of LightningCLI, without abbreviations, which explains why a class is refused."""

    def refusal_of(self, hint: Any, value: Any) -> Refusal:
        """Explain why a value was refused.

        Args:
            hint: the type that was asked for.
            value: as it was typed, or as it was read from a file.
        """
        classes = tuple(_classes(hint))
        others = {bool, int, float, str}.intersection(get_args(hint))
        for path in _class_paths(value) if classes else ():
            looks_like_one = "." in path or path[:1].isupper()
            if (looks_like_one or not others) and (problem := _problem(path, classes)):
                return problem
        return refusal_of(hint, value, "" if others or not classes else _CLASS)


def _classes(hint: Any) -> Iterator[type]:
    """List the classes of which a type accepts an instance, or a function that makes one."""
    for inner in get_args(hint):
        yield from _classes(inner)
    if inspect.isclass(hint) and hint.__module__.split(".")[0] not in sys.stdlib_module_names:
        yield hint


def _class_paths(value: Any) -> list[str]:
    """Find what may be meant as the name of a class."""
    if isinstance(value, list):
        return [path for item in value for path in _class_paths(item)]
    path = value.get("class_path") if isinstance(value, (dict, Namespace)) else value
    path = path.strip("[]") if isinstance(path, str) else ""
    return [path] if re.fullmatch(r"[A-Za-z_][\w.]*", path) else []


def _problem(path: str, wanted: tuple[type, ...]) -> Refusal | None:
    """Explain why there is no class of that name, or why it is none that is wanted."""
    module, _, name = path.rpartition(".")
    if not module:
        import_exports()
        names = {subclass.__name__ for subclass in _subclasses(wanted)}
        meant = did_you_mean(path, names)
        missing = Refusal(f"there is no class {path!r}{'' if meant else _FULL_PATH}", path, meant)
        return None if path in names else missing
    try:
        subclass = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        return Refusal(f"there is no module {error.name!r}", str(error.name))
    except AttributeError as error:
        meant = did_you_mean(name, (n for n in dir(error.obj) if not n.startswith("_")))
        return Refusal(f"there is no {name!r} in {module}", name, meant)
    if inspect.isclass(subclass) and issubclass(subclass, wanted):
        return None
    return Refusal(f"{path} is no {' or '.join(subclass.__name__ for subclass in wanted)}", name)


def _subclasses(classes: tuple[type, ...]) -> Iterator[type]:
    """List all imported classes that count as one of these, which bare names stand for."""
    for base in classes:
        yield base
        yield from _subclasses(tuple(base.__subclasses__()))


def import_exports(names: Container[str] | None = None) -> None:
    """Import classes of this package, which configurations then know by their bare names.

    Args:
        names: of the classes; all by default.
    """
    for package in ("callbacks", "datamodules", "modules"):
        exports = importlib.import_module(f"lightning_bnn.{package}")
        for name in exports.__all__:
            if names is None or name in names:
                getattr(exports, name)
