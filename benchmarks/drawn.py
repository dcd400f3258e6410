"""Which code has drawn each picture of the pages, and whether it draws otherwise by now.

`website/drawn.yaml` names the functions that draw a picture, and keeps a digest of their code and
of what they call in `lightning_bnn.plots`, as it was when the picture was made. Comments,
docstrings and spaces do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "website/drawn.yaml"
FOLLOWED = "lightning_bnn.plots"
"""Only into these modules an import is followed."""
LATER = "to be made again"
"""In the place of a digest: the picture is of earlier code, and takes long."""
_HEAD = """# What draws every picture, and a digest of that code when it was drawn.
# `python benchmarks/pictures.py NAME` makes a picture and writes its digest; with `--looked`, for
# a change of code that changes no picture, it writes the digest only.
"""


class Source(NamedTuple):
    """A module: the text of what it defines, by name; and what it imports, by name."""

    definitions: dict[str, str]
    trees: dict[str, ast.stmt]
    imported: dict[str, tuple[str, str]]


def record() -> dict[str, dict[str, Any]]:
    """What is known of every picture: `by` and `code`, by its path in `docs`."""
    return dict(yaml.safe_load(RECORD.read_text(encoding="utf-8")))


def is_old(name: str) -> bool:
    """Whether other code has drawn a picture than there is today.

    Args:
        name: its path in `docs`.
    """
    about = record()[name]
    return about["code"] != digest(about["by"])


def remember(names: Iterable[str]) -> None:
    """Write that pictures are drawn by today's code.

    Args:
        names: of pictures, by their paths in `docs`.
    """
    known = record()
    for name in names:
        known[name]["code"] = digest(known[name]["by"])
    lines = [
        f"{name}: {{code: '{about['code']}', by: [{', '.join(about['by'])}]}}\n"
        for name, about in sorted(known.items())
    ]
    RECORD.write_text(_HEAD + "".join(lines), encoding="utf-8")


def digest(functions: Iterable[str], root: Path = ROOT) -> str:
    """Of the code of some functions, of what it calls in its module and of what it has of plots.

    Args:
        functions: as module.function; a module alone stands for all that it defines.
        root: of the repository.
    """
    found: dict[tuple[str, str], str] = {}
    todo = [place for function in functions for place in _places(function, root)]
    while todo:
        module, name = todo.pop()
        source = read(module, root)
        if (module, name) in found or name not in source.definitions:
            continue
        found[module, name] = source.definitions[name]
        todo += _needed(module, source, source.trees[name], root)
    text = "\n".join(f"{m}.{n} {code}" for (m, n), code in sorted(found.items()))
    if not found:
        raise ValueError(f"`functions`: there is nothing called {list(functions)}.")
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _places(function: str, root: Path) -> list[tuple[str, str]]:
    """Module and name; all names of a module that is named alone."""
    if _path(function, root) is not None:
        return [(function, name) for name in read(function, root).definitions]
    module, _, name = function.rpartition(".")
    return [_origin(module, name, root)]


def _origin(module: str, name: str, root: Path) -> tuple[str, str]:
    """Where a name is defined that packages only pass on."""
    source = read(module, root)
    if name in source.imported and name not in source.definitions:
        return _origin(*source.imported[name], root)
    return module, name


def _needed(module: str, source: Source, tree: ast.stmt, root: Path) -> Iterator[tuple[str, str]]:
    """What a definition uses of its own module, and of the modules that are followed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in source.definitions:
            yield module, node.id
        elif isinstance(node, ast.Name) and node.id in source.imported:
            origin, name = source.imported[node.id]
            if origin.startswith(FOLLOWED):
                yield _origin(origin, name, root)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            origin, name = source.imported.get(node.value.id, ("", ""))
            if f"{origin}.{name}" == FOLLOWED:
                yield _origin(FOLLOWED, node.attr, root)


def _path(module: str, root: Path) -> Path | None:
    """The file of a module; None if there is none."""
    place = root.joinpath(*module.split("."))
    every = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in every if path.is_file()), None)


@functools.cache
def read(module: str, root: Path = ROOT) -> Source:
    """A module.

    Args:
        module: its name, such as lightning_bnn.plots.axes or benchmarks.averages_picture.
        root: of the repository.
    """
    path = _path(module, root)
    if path is None:
        raise ValueError(f"`module`: there is no file for {module!r}.")
    text = path.read_text(encoding="utf-8")
    lines = _without_comments(text)
    definitions, trees, imported = {}, {}, {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {a.asname or a.name: (node.module, a.name) for a in node.names}
        for name in _defined(node):
            trees[name] = node
            definitions[name] = _code(node, lines)
    return Source(definitions, trees, imported)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _without_comments(text: str) -> list[str]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    return lines


def _code(node: ast.stmt, lines: list[str]) -> str:
    """The text of a definition without docstrings and spaces."""
    kept = dict(enumerate(lines, 1))
    for part in ast.walk(node):
        is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        if is_text and isinstance(part.value.value, str):
            for line in range(part.lineno, (part.end_lineno or part.lineno) + 1):
                kept[line] = ""
    own = [kept[k] for k in range(node.lineno, (node.end_lineno or node.lineno) + 1)]
    return "".join("".join(own).split())
