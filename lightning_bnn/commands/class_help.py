"""What a model or a data set can be told, as its source files say: a screen or two, at once."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from lightning_bnn.commands.source_files import where_defined

__all__ = ["class_asked_for", "help_of_class", "rows"]

_KINDS = {"--model.help": "lightning_bnn.modules", "--data.help": "lightning_bnn.datamodules"}
_WIDTH = 100


class _Class(NamedTuple):
    """A class of this package, and the module that defines it."""

    module: str
    node: ast.ClassDef


class _Argument(NamedTuple):
    """What a constructor takes, and what it says about it."""

    name: str
    kind: str
    default: str
    text: str


def class_asked_for(args: Sequence[str]) -> tuple[str, str] | None:
    """The option and the class in a command line such as ``--model.help MFVI``.

    Args:
        args: what follows the command.

    Returns:
        None where no class of this package is asked about: Lightning answers then.
    """
    words = [part for arg in args for part in arg.split("=", 1)]
    for option, name in zip(words, words[1:], strict=False):
        if option in _KINDS and _class_of(option, name) is not None:
            return option, name
    return None


def help_of_class(option: str, name: str) -> str:
    """What a class is, and its arguments with their types, defaults and meaning.

    Args:
        option: ``--model.help`` or ``--data.help``.
        name: the class, with or without the path of a module.
    """
    cls = _class_of(option, name)
    assert cls is not None
    prefix = option.removesuffix("help") + "init_args."
    first = _plain(_said(cls).partition("\n\n")[0])
    groups = [("", _own(cls)), *_inherited(cls)]
    parts = [textwrap.fill(f"{cls.node.name}: {first}", _WIDTH)]
    for title, arguments in groups:
        texts = {f"{prefix}{a.name}": f"{a.text} ({a.kind}, {a.default})" for a in arguments}
        if texts:
            parts.append(f"{title}{rows(texts)}")
    return "\n\n".join(parts)


def rows(texts: dict[str, str]) -> str:
    """Options with what they mean, in two columns.

    Args:
        texts: the meaning of every option.
    """
    width = max(map(len, texts)) + 2
    room = {"initial_indent": "", "subsequent_indent": " " * (width + 2), "width": _WIDTH}
    filled = (
        textwrap.fill(f"  {option:<{width}}{text}", **room, break_on_hyphens=False)  # type: ignore[arg-type]  # of two kinds
        for option, text in texts.items()
    )
    return "\n".join(filled)


# ------------------------------------------------------------ classes
def _class_of(option: str, name: str) -> _Class | None:
    path, _, bare = name.rpartition(".")
    if path and not path.startswith("lightning_bnn"):
        return None
    return _found(path or _KINDS[option], bare)


def _found(module: str, name: str) -> _Class | None:
    place = where_defined(module, name)
    if place is None or not isinstance(place[1], ast.ClassDef):
        return None
    return _Class(place[0], place[1])


def _base(cls: _Class) -> _Class | None:
    """The first of its bases that is a class of this package."""
    bases = (_found(cls.module, b.id) for b in cls.node.bases if isinstance(b, ast.Name))
    return next((base for base in bases if base is not None), None)


def _constructor(cls: _Class) -> tuple[_Class, ast.FunctionDef] | None:
    """The constructor, and the class that it is written in."""
    at: _Class | None = cls
    while at is not None:
        for node in at.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return at, node
        at = _base(at)
    return None


def _said(cls: _Class) -> str:
    return ast.get_docstring(cls.node) or ""


# ------------------------------------------------------------ arguments
def _own(cls: _Class) -> list[_Argument]:
    """What its constructor takes by name."""
    found = _constructor(cls)
    if found is None:
        return []
    at, node = found
    args = [*node.args.args[1:], *node.args.kwonlyargs]
    behind = len(node.args.args) - 1 - len(node.args.defaults)
    defaults = [*[None] * behind, *node.args.defaults, *node.args.kw_defaults]
    told = {**_told(_said(at)), **_told(_said(cls))}
    return [
        _Argument(
            arg.arg,
            "any" if arg.annotation is None else _written(at.module, arg.annotation),
            "required" if default is None else f"default {_unparsed(default)}",
            told.get(arg.arg, ""),
        )
        for arg, default in zip(args, defaults, strict=True)
    ]


def _inherited(cls: _Class) -> list[tuple[str, list[_Argument]]]:
    """What its bases take that is passed on to them, base by base."""
    found = _constructor(cls)
    if found is None or found[1].args.kwarg is None:
        return []
    at, node = found
    base = _base(at)
    if base is None:
        return []
    given = {*_given(node), *(a.name for a in _own(cls))}
    left = [argument for argument in _own(base) if argument.name not in given]
    return [(f"what every {base.node.name} takes:\n", left), *_inherited(base)]


def _given(node: ast.FunctionDef) -> set[str]:
    """The arguments that a constructor gives to that of its base by name."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    named = [c for c in calls if ast.unparse(c.func) == "super().__init__"]
    return {keyword.arg for call in named for keyword in call.keywords if keyword.arg}


def _unparsed(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", '"')


def _written(module: str, annotation: ast.expr) -> str:
    """An annotation as a reader wants it: names of choices are the choices."""
    text = ast.unparse(annotation)
    for name in {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}:
        place = where_defined(module, name)
        if place is not None and isinstance(place[1], ast.Assign):
            text = re.sub(rf"\b{name}\b", _written(place[0], place[1].value), text)
    choices = re.compile(r"Literal\[([^\]]*)\]")
    return choices.sub(lambda found: found[1].replace(", ", " | "), text).replace("'", '"')


def _told(doc: str) -> dict[str, str]:
    """What the section of arguments of a docstring says about each."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", doc, re.MULTILINE)
    if section is None:
        return {}
    parts = re.split(r"^(\*{0,2}\w+): ", inspect.cleandoc(section[1]), flags=re.MULTILINE)[1:]
    return {name: _plain(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _plain(text: str) -> str:
    """Words of a docstring without marks of code."""
    text = re.sub(r":math:`([^`]*)`", r"\1", text)
    return " ".join(text.replace("``", "").replace("`", "").split()).rstrip(".")
