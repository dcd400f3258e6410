"""A package read without importing it: where names are from, and classes with their bases."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from source_code import Definition, Function, Source


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

    @property
    def lines(self) -> int:
        return self.node.end_lineno - self.node.lineno + 1

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
        sources = (Source(p, self._module(p)) for p in sorted(self.folder.rglob("*.py")))
        self.sources = {source.module: source for source in sources}

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
