"""Packages whose exports are imported on first use."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_package(name: str) -> None:
    """Import the exports of a package when they are first accessed.

    The imports under ``if TYPE_CHECKING:`` of its ``__init__.py`` are the single list of exports:
    type checkers follow them, and here they are read from the source. ``import *`` stands for the
    ``__all__`` of a file. The first of these blocks is public. Later blocks are for packages that
    build on this one, and are not in ``__all__``. Neither are imports of the package's own files
    and folders.
    """
    package = sys.modules[name]
    assert package.__file__
    blocks = _exports(Path(package.__file__))
    exports = {export: home for block in reversed(blocks) for export, home in block.items()}
    public = sorted(export for block in blocks[:1] for export in block if exports[export] != name)
    vars(package).setdefault("__all__", public)
    vars(package)["_exports"] = exports
    package.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    _exports: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home = self._exports[name]
        if home == self.__name__:
            return importlib.import_module(f"{home}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # the import of a submodule would hide a function of its name
        is_file = getattr(value, "__name__", "") == f"{self.__name__}.{name}"
        hides = is_file and self._exports.get(name, self.__name__) != self.__name__
        super().__setattr__(name, getattr(value, name) if hides else value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._exports})


def _exports(package: Path) -> list[dict[str, str]]:
    """Return the module of every name that is imported for type checkers only, block by block."""
    return [
        {
            name: str(statement.module)
            for statement in block.body
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
            for name in (_names(str(statement.module)) if alias.name == "*" else [alias.name])
        }
        for block in ast.parse(package.read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
    ]


def _names(module: str) -> list[str]:
    """Read the ``__all__`` of a file without parsing it completely, ten times as fast."""
    top, *path = module.split(".")
    file = Path(str(sys.modules[top].__file__)).parent.joinpath(*path).with_suffix(".py")
    stated = re.search(
        r"^__all__ = (\[.*?\])", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert stated
    return list(ast.literal_eval(stated[1]))
