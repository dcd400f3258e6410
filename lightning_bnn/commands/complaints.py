"""What jsonargparse says about a configuration: one sentence instead of a tree of types."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_bnn.commands.spelling import did_you_mean

__all__ = ["Complaint", "complaint", "written_in"]

_KNOWN = (
    "lightning_bnn.modules",
    "lightning_bnn.datamodules",
    "lightning_bnn.callbacks",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
)
"""Where the classes come from that are known by their bare names."""
_SPOKEN = {"NoneType": "null", "Sequence": "a list", "bool": "true, false"}
_LONG = 80


class Complaint(NamedTuple):
    """A mistake in a configuration.

    Attributes:
        sentence: what is wrong, without a full stop.
        culprit: the word that is.
    """

    sentence: str
    culprit: str


def complaint(text: str) -> Complaint:
    r"""The mistake that an error of a parser is about.

    >>> said = "Parser key \"seed\": Expected a <class 'int'>. Got value: many"
    >>> complaint(said).sentence
    '`seed` must be int, got many'

    Args:
        text: its message.
    """
    said = "\n".join(line for line in text.splitlines() if not _is_value(line))
    keys = list(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', said)))
    wanted = _wanted(said)
    if wanted and not _is_class(_given(text)):
        told = f"`{'.'.join(keys)}` must be {wanted}, got {_given(text)}"
        return Complaint(told, keys[-1].rpartition(".")[-1])
    place = f"`{'.'.join(keys)}`: " if keys else ""
    for pattern, tell in _SAYINGS:
        found = re.search(pattern, said)
        if found is not None:
            return Complaint(place + tell(found), found[1])
    flat = " ".join(line.strip().removeprefix("- ") for line in said.splitlines())
    return Complaint(flat, keys[-1] if keys else "")


def written_in(culprit: str, files: Iterable[str], typed: Sequence[str]) -> str | None:
    """The configuration in which a word stands, unless it was typed.

    Args:
        culprit: the word; of a dotted name the last one.
        files: configurations.
        typed: the command line.
    """
    word = re.compile(rf"(?<!\w){re.escape(culprit.rpartition('.')[-1])}(?!\w)")
    files = list(files)
    if not culprit or any(word.search(part) for part in typed if part not in files):
        return None
    return next((f for f in files if word.search(Path(f).read_text(encoding="utf-8"))), None)


# ------------------------------------------------------------ values
def _is_value(line: str) -> bool:
    """What the user wrote could read like a complaint."""
    return line.lstrip().startswith(("Given value", "Subtypes:"))


def _wanted(said: str) -> str:
    r"""What could have stood behind the innermost key, if not only classes.

    >>> lines = ["Parser key 'a':", "  - Expected a <class 'int'>", "- Expected a <class 'str'>"]
    >>> _wanted("\n".join(lines).replace("'a'", '"a"'))
    'int'
    """
    _, key, inner = said.rpartition('Parser key "')
    if not key:
        return ""
    start = said[: -len(inner)].rpartition("\n")[2]
    depth = len(start) - len(start.lstrip(" -"))
    first, *others = inner.splitlines()
    lines = [first, *itertools.takewhile(lambda line: _depth(line) > depth, others)]
    names = re.findall(
        r"Expected a ((?:<class|typing\.|list\b|dict\b|tuple\b).*)", "\n".join(lines)
    )
    spoken = list(dict.fromkeys(_spoken(name) for name in names))
    values = ", ".join(name for name in spoken if name != "null")
    several = "one of " if ", " in values else ""
    return f"{several}{values}{' or null' if 'null' in spoken else ''}" if values else ""


def _depth(line: str) -> int:
    """How far it is indented; an empty line belongs to what is around it."""
    return len(line) - len(line.lstrip(" ")) if line.strip() else 10**9


def _is_class(value: str) -> bool:
    """Whether it is written as the name of a class."""
    return re.fullmatch(r"(?:\w+\.)*[A-Z]\w*", value) is not None


def _spoken(name: str) -> str:
    """A type as a user would write a value of it.

    >>> _spoken("<class 'int'>. Got value: 3"), _spoken("typing.Literal['a', 'b']")
    ('int', "'a', 'b'")
    """
    name = name.partition(". Got value: ")[0]
    if literal := re.fullmatch(r"typing\.Literal\[(.*)\]", name):
        return literal[1]
    bare = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", name)
    return _SPOKEN.get(bare, bare)


def _given(text: str) -> str:
    """The innermost value that does not fit."""
    plain = re.findall(r"(?:Got|Given) value: ((?!Namespace|NestedArg).+)", text)
    nested = re.findall(r"NestedArg\(key='[^']*', val='?(.*?)'?\)$", text, re.MULTILINE)
    value = str([*plain, *nested, "something else"][0]).partition(". Got value: ")[0]
    return value if len(value) <= _LONG else value[:_LONG] + "..."


# ------------------------------------------------------------ names
def _no_class(found: re.Match[str]) -> str:
    meant = did_you_mean(found[1], _class_names())
    rule = (
        ": give its full path (package.module.Class); modules, data sets and callbacks of this "
        "package are known by their bare names"
    )
    return f"there is no class {found[1]!r}{meant or rule}"


def _no_member(found: re.Match[str]) -> str:
    known = [name for name in dir(importlib.import_module(found[2])) if not name.startswith("_")]
    return f"there is no {found[1]!r} in {found[2]}{did_you_mean(found[1], known)}"


def _class_names() -> Iterator[str]:
    for name in _KNOWN:
        yield from importlib.import_module(name).__all__


def _missing(found: re.Match[str]) -> str:
    names = re.sub(r"\b(?:fit|validate|test|predict)\.", "", found[1]).split(", ")
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(f'`{name}`' for name in names)} {verb} missing"


_SAYINGS: Sequence[tuple[str, Callable[[re.Match[str]], str]]] = (
    (r"(?:Option|does not accept option) '([^']+)'(?: is not accepted)?(; did you mean [^\n]*)?",
     lambda m: f"Option {m[1]!r} is not accepted{m[2] or ''}"),
    (r"Expected a dot import path string: (\S+)", _no_class),
    (r"(?=[^\n]*has no attribute '(\w+)')module '([\w.]+)'", _no_member),
    (r"No module named '([^']+)'", lambda m: f"there is no module {m[1]!r}"),
    (r"(?s)(?:a path but|class_path) '?([\w.]+).*does not correspond to a subclass of (\w+)",
     lambda m: f"{m[1]} is no {m[2]}"),
    (r"arguments are required: ([^\n]*)", _missing),
    (r"Not a valid subclass of (\w+)",
     lambda m: f"it must be a class ({m[1]}), or a group of `class_path` and `init_args`"),
    (r"Path is not a file: '?([^'\n]+)", lambda m: f"{m[1]} is no file"),
    (r"File does not exist: '?([^'\n]+)", lambda m: f"File does not exist: {m[1]}"),
)  # fmt: skip
"""What is looked for, in this order: the innermost reason stands first."""
