"""Commands as their source files declare them, so that help and mistakes need no heavy import."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
from collections.abc import Callable
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["deferred", "imported"]

_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[1]


def deferred(module: str, name: str) -> Callable[..., Any]:
    """A function with the signature and docstring of another, which is imported when it is called.

    Both are read from the source file. Names in annotations and defaults are followed through the
    files of this package; modules of the standard library are imported.

    Args:
        module: in which the function is defined.
        name: of the function.
    """
    node = _definitions(module)[name]
    assert isinstance(node, ast.FunctionDef)
    doc = ast.get_docstring(node, clean=False)
    call = ast.parse(f"return __imported__({module!r}).{name}({_passed_on(node.args)})").body
    fields = {**dict(ast.iter_fields(node)), "body": call, "decorator_list": []}
    stub = ast.FunctionDef(**fields)
    known = {n: _value(module, n) for n in _names(node.args, node.returns) if _is_known(module, n)}
    space = {**known, "__imported__": imported, "__name__": _PACKAGE}
    tree = ast.fix_missing_locations(ast.Module([stub], []))
    exec(compile(tree, str(_file(module)), "exec", dont_inherit=True), space)
    function: Callable[..., Any] = space[name]
    function.__doc__ = doc
    return function


def imported(name: str) -> ModuleType:
    """Import a module without collecting garbage, which takes a second and finds nothing.

    Args:
        name: of the module, with dots.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collecting:
            gc.enable()


# ------------------------------------------------------------ source files
def _file(module: str) -> Path:
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _definitions(module: str) -> dict[str, ast.AST]:
    """What defines the names at the top of a file: a function, an assignment, an import."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(_file(module).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update({alias.asname or alias.name: node for alias in node.names})
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _is_known(module: str, name: str) -> bool:
    return name in _definitions(module)


def _value(module: str, name: str) -> Any:
    """What a name at the top of a file stands for."""
    if not module.startswith(f"{_PACKAGE}.") or not _is_known(module, name):
        return getattr(imported(module), name)
    node = _definitions(module)[name]
    if isinstance(node, ast.ImportFrom):
        origin = next(a.name for a in node.names if (a.asname or a.name) == name)
        return _value(_origin(module, node), origin)
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        known = {n: _value(module, n) for n in _names(node.value) if _is_known(module, n)}
        return eval(compile(ast.Expression(node.value), str(_file(module)), "eval"), known)
    return getattr(imported(module), name)


def _origin(module: str, node: ast.ImportFrom) -> str:
    """The module that names are imported from."""
    package = module if _file(module).name == "__init__.py" else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


def _names(*nodes: ast.AST | None) -> set[str]:
    """The names in annotations and defaults."""
    walked = (n for node in nodes if node is not None for n in ast.walk(node))
    return {n.id for n in walked if isinstance(n, ast.Name)}


# ------------------------------------------------------------ calls
def _passed_on(args: ast.arguments) -> str:
    """The arguments of a call that passes every parameter on."""
    by_place = [a.arg for a in (*args.posonlyargs, *args.args)]
    several = [] if args.vararg is None else [f"*{args.vararg.arg}"]
    by_name = [f"{a.arg}={a.arg}" for a in args.kwonlyargs]
    others = [] if args.kwarg is None else [f"**{args.kwarg.arg}"]
    return ", ".join([*by_place, *several, *by_name, *others])
