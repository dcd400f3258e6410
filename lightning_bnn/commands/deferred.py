"""Commands as their source files declare them, so that help and mistakes need no heavy import."""

from __future__ import annotations

import ast
import gc
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_bnn.commands.source_files import definitions, names_in, origin, source_file

__all__ = ["deferred", "imported"]

_PACKAGE = __name__.partition(".")[0]


def deferred(module: str, name: str) -> Callable[..., Any]:
    """A function with the signature and docstring of another, which is imported when it is called.

    Both are read from the source file. Names in annotations and defaults are followed through the
    files of this package; modules of the standard library are imported.

    Args:
        module: in which the function is defined.
        name: of the function.
    """
    node = definitions(module)[name]
    assert isinstance(node, ast.FunctionDef)
    doc = ast.get_docstring(node, clean=False)
    call = ast.parse(f"return __imported__({module!r}).{name}({_passed_on(node.args)})").body
    fields = {**dict(ast.iter_fields(node)), "body": call, "decorator_list": []}
    stub = ast.FunctionDef(**fields)
    known = {
        n: _value(module, n) for n in names_in(node.args, node.returns) if _is_known(module, n)
    }
    space = {**known, "__imported__": imported, "__name__": _PACKAGE}
    tree = ast.fix_missing_locations(ast.Module([stub], []))
    exec(compile(tree, str(source_file(module)), "exec", dont_inherit=True), space)
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


# ------------------------------------------------------------ names in annotations and defaults
def _is_known(module: str, name: str) -> bool:
    return name in definitions(module)


def _value(module: str, name: str) -> Any:
    """What a name at the top of a file stands for."""
    if not module.startswith(f"{_PACKAGE}.") or not _is_known(module, name):
        return getattr(imported(module), name)
    node = definitions(module)[name]
    if isinstance(node, ast.ImportFrom):
        return _value(*origin(module, name))
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        known = {n: _value(module, n) for n in names_in(node.value) if _is_known(module, n)}
        return eval(compile(ast.Expression(node.value), str(source_file(module)), "eval"), known)
    return getattr(imported(module), name)


# ------------------------------------------------------------ calls
def _passed_on(args: ast.arguments) -> str:
    """The arguments of a call that passes every parameter on."""
    by_place = [a.arg for a in (*args.posonlyargs, *args.args)]
    several = [] if args.vararg is None else [f"*{args.vararg.arg}"]
    by_name = [f"{a.arg}={a.arg}" for a in args.kwonlyargs]
    others = [] if args.kwarg is None else [f"**{args.kwarg.arg}"]
    return ", ".join([*by_place, *several, *by_name, *others])
