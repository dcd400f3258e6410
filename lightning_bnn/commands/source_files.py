"""Files of this package as they are written: what defines a name, without importing it."""

from __future__ import annotations

import ast
import functools
from importlib.util import resolve_name
from pathlib import Path

__all__ = ["definitions", "names_in", "origin", "source_file", "where_defined"]

_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[1]


def source_file(module: str) -> Path:
    """The file of a module of this package.

    Args:
        module: its name, with dots.
    """
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def definitions(module: str) -> dict[str, ast.AST]:
    """What defines the names at the top of a file: a function, a class, an assignment, an import.

    Args:
        module: its name, with dots.
    """
    found: dict[str, ast.AST] = {}
    top = ast.parse(source_file(module).read_text(encoding="utf-8")).body
    for node in [n for t in top for n in (t.body if isinstance(t, ast.If) else [t])]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update({alias.asname or alias.name: node for alias in node.names})
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def origin(module: str, name: str) -> tuple[str, str]:
    """The module that a file imports a name from, and what it is called there.

    Args:
        module: of the file.
        name: defined by a ``from ... import``.
    """
    node = definitions(module)[name]
    assert isinstance(node, ast.ImportFrom)
    there = next(a.name for a in node.names if (a.asname or a.name) == name)
    package = module if source_file(module).name == "__init__.py" else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package), there


def where_defined(module: str, name: str) -> tuple[str, ast.AST] | None:
    """The module of this package that defines a name, and how; None where another package does.

    Args:
        module: where the name is known.
        name: at the top of its file.
    """
    while module.partition(".")[0] == _PACKAGE and source_file(module).is_file():
        node = definitions(module).get(name)
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (module, node)
        module, name = origin(module, name)
    return None


def names_in(*nodes: ast.AST | None) -> set[str]:
    """The names in pieces of code, such as annotations and defaults."""
    walked = (n for node in nodes if node is not None for n in ast.walk(node))
    return {n.id for n in walked if isinstance(n, ast.Name)}
