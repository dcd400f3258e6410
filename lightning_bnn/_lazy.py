"""Packages that import what they export on first use."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["lazy_package"]


def lazy_package(name: str) -> None:
    """Import the exports of a package when they are first asked for.

    The imports under ``if TYPE_CHECKING:`` of its ``__init__.py`` are the one list of what stands
    where: type checkers follow them, and here they are read from the source.
    """
    package = sys.modules[name]
    assert package.__file__
    vars(package)["_exports"] = _exports(Path(package.__file__))
    package.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    _exports: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(self._exports[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # the import of a submodule would hide a function of its name
        hides = (
            name in self._exports and getattr(value, "__name__", "") == f"{self.__name__}.{name}"
        )
        super().__setattr__(name, getattr(value, name) if hides else value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._exports})


def _exports(source: Path) -> dict[str, str]:
    """The module of every name that is imported for type checkers only."""
    return {
        alias.name: str(statement.module)
        for block in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
