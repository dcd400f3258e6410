"""Python files read as syntax trees: classes and their bases, functions, docstrings, imports."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Class:
    """A class of the package.

    Attributes:
        name: full and dotted.
        node: its syntax tree.
        bases: full names of those bases that belong to the package.
        foreign: full names of the others.
    """

    name: str
    node: ast.ClassDef
    bases: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @cached_property
    def methods(self) -> set[str]:
        return {node.name for node in self.node.body if isinstance(node, Function)}

    @cached_property
    def attributes(self) -> set[str]:
        """Names that its methods assign to ``self``, or register as parameters and buffers."""
        names: set[str] = set()
        for method in self.node.body:
            if isinstance(method, Function) and method.args.args:
                names |= _assigned(method, method.args.args[0].arg)
        return names


@dataclass
class Package:
    """All files below a folder.

    Args:
        folder: the package itself; its name is that of the folder.
    """

    folder: Path
    sources: dict[str, Source] = field(init=False)

    def __post_init__(self) -> None:
        found = (Source(p, self._module(p)) for p in sorted(self.folder.rglob("*.py")))
        self.sources = {source.module: source for source in found}

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.folder.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def room(self, module: str) -> str:
        """The file or folder directly below the package that a module belongs to."""
        return (module.split(".") + [""])[1]

    @property
    def rooms(self) -> list[str]:
        """All of them, in order; the package's own file is in one without a name."""
        return sorted({self.room(module) for module in self.sources})

    def in_rooms(self, *rooms: str) -> list[Source]:
        return [source for source in self.sources.values() if self.room(source.module) in rooms]

    def definitions(self) -> Iterator[Definition]:
        for source in self.sources.values():
            yield from source.definitions()

    # -------------------------------------------------------- names
    def defined(self, dotted: str) -> str:
        """Where a dotted name is defined, with re-exports followed; names of others are kept."""
        for _ in range(10):
            module, rest = self._longest_module(dotted)
            source, first = self.sources.get(module), rest.partition(".")[0]
            if source is None or first in source.defined or first not in source.imports:
                break
            dotted = ".".join([source.imports[first], *rest.split(".")[1:]])
        return dotted

    def _longest_module(self, dotted: str) -> tuple[str, str]:
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if module in self.sources:
                return module, ".".join(parts[count:])
        return "", dotted

    def imported_modules(self, source: Source) -> set[str]:
        """Modules of the package that a file imports."""
        dotted = {self.defined(name) for name in source.imports.values()}
        return {self._longest_module(name)[0] for name in dotted} - {"", source.module}

    # -------------------------------------------------------- classes
    @cached_property
    def classes(self) -> dict[str, Class]:
        """By full name."""
        nodes = {
            f"{d.source.module}.{d.name}": d
            for d in self.definitions()
            if isinstance(d.node, ast.ClassDef)
        }
        classes = {}
        for name, definition in nodes.items():
            bases = [self._base(definition, base) for base in definition.node.bases]
            ours = tuple(base for base in bases if base in nodes)
            foreign = tuple(base for base in bases if base not in nodes)
            classes[name] = Class(name, definition.node, ours, foreign)
        return classes

    def _base(self, definition: Definition, base: ast.expr) -> str:
        if isinstance(base, ast.Subscript):
            base = base.value
        first, _, rest = ast.unparse(base).partition(".")
        source = definition.source
        origin = f"{source.module}." if first in source.defined else "builtins."
        local = source.imports.get(first, f"{origin}{first}")
        return self.defined(f"{local}.{rest}" if rest else local)

    def ancestry(self, name: str) -> list[Class]:
        """A class and all its bases that belong to the package, each once, nearest first."""
        names: list[str] = [name]
        for one in names:
            names += [base for base in self.classes[one].bases if base not in names]
        return [self.classes[one] for one in names]

    def depth(self, name: str) -> int:
        """How many classes of the package stand on the longest way to the top."""
        return 1 + max((self.depth(base) for base in self.classes[name].bases), default=0)

    def foreign_bases(self, name: str) -> set[str]:
        return {base for one in self.ancestry(name) for base in one.foreign}

    def overrides(self, definition: Definition) -> bool:
        """Whether a method has the name of a method of a base that belongs to the package."""
        if definition.owner is None or not isinstance(definition.node, Function):
            return False
        above = self.ancestry(f"{definition.source.module}.{definition.owner}")[1:]
        return any(definition.node.name in one.methods for one in above)


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


def _assigned(method: Function, this: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(method):
        match node:
            case ast.Attribute(ast.Name(owner), name, ast.Store()) if owner == this:
                names.add(name)
            case ast.Subscript(
                ast.Attribute(ast.Name(owner), "__dict__"), ast.Constant(str(name)), ast.Store()
            ) if owner == this:
                names.add(name)
            case ast.Call(
                ast.Attribute(ast.Name(owner), "register_buffer" | "register_parameter"),
                [ast.Constant(str(name)), *_],
            ) if owner == this:
                names.add(name)
    return names
