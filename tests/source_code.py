"""Python files read as syntax trees: lines of code, definitions, docstrings, imports."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
)  # fmt: skip


class Source:
    """One file.

    Args:
        path: where it lies.
        module: its dotted name.
    """

    def __init__(self, path: Path, module: str) -> None:
        self.path, self.module = path, module
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @property
    def package(self) -> str:
        """The dotted name of the folder."""
        return self.module if self.path.stem == "__init__" else self.module.rpartition(".")[0]

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def code_lines(self) -> int:
        """Lines that are neither blank, nor comment, nor a string that stands alone."""
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if _is_text(node):
                code.difference_update(range(node.lineno, node.end_lineno + 1))
        return len(code)

    @cached_property
    def imports(self) -> dict[str, str]:
        """What local names stand for: full dotted names, also of imports inside functions."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
                    names[alias.asname or alias.name] = alias.name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{self._origin(node)}.{alias.name}"
        return names

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        above = self.package.split(".")[: len(self.package.split(".")) + 1 - node.level]
        return ".".join([*above, *([node.module] if node.module else [])])

    @cached_property
    def exported(self) -> list[str]:
        """The names in ``__all__``."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        return []

    @cached_property
    def defined(self) -> set[str]:
        """Names of classes and functions of this file; those of methods have dots."""
        return {definition.name for definition in self.definitions()} - {""}

    def functions(self) -> Iterator[Function]:
        """All of them: also methods, and functions inside functions."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def definitions(self) -> Iterator[Definition]:
        """The module, its classes, functions and methods; nothing inside functions."""
        yield Definition(self, "", self.tree, None)
        yield from self._within(self.tree, "", None)

    def _within(self, node: ast.AST, prefix: str, owner: str | None) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                name = f"{prefix}{child.name}"
                yield Definition(self, name, child, owner)
                yield from self._within(child, f"{name}.", name)
            elif isinstance(child, Function):
                yield Definition(self, f"{prefix}{child.name}", child, owner)
            elif isinstance(child, ast.If | ast.Try):
                yield from self._within(child, prefix, owner)


@dataclass(frozen=True)
class Definition:
    """A module (its name is empty), class, function or method, and the class that it belongs to."""

    source: Source
    name: str
    node: Documented
    owner: str | None

    @property
    def place(self) -> str:
        line = getattr(self.node, "lineno", 1)
        return f"{self.source.path}:{line}: {self.name or self.source.module}"

    @property
    def docstring(self) -> str | None:
        return ast.get_docstring(self.node)

    @property
    def is_public(self) -> bool:
        """Whether no part of its name begins with an underscore, as those of dunder methods do."""
        names = [*self.source.module.split(".")[1:], *self.name.split(".")]
        return not any(name.startswith("_") for name in names)

    @property
    def is_exported(self) -> bool:
        """Whether it is public and the file, if it has an ``__all__``, lists it or its class."""
        first = self.name.partition(".")[0]
        listed = not first or not self.source.exported or first in self.source.exported
        return self.is_public and listed


def body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if _is_text(function.body[0]) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every place that names a variable, an attribute or a parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
