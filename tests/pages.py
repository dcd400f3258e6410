"""Pages of the documentation: what is pasted, which commands they name, where they link."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
READMES = ["README.md", "weightsym/README.md"]
PAGES = [*READMES, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
TUTORIALS = sorted(f"docs/tutorials/{path.name}" for path in (ROOT / "docs/tutorials").glob("*.md"))
"""Pages that are made by running scripts, see `test_tutorials.py`."""
SHELL = ("", "sh", "console")
LANGUAGES = ("python", "text", *SHELL)

_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^[ \t>]*(?:```|~~~)", re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def website(name: str) -> ModuleType:
    """A file of `website`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"website_{name}", ROOT / f"website/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def benchmark_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import scripts of `benchmarks` by name, and forget them after the test."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for path in (ROOT / "benchmarks").glob("*.py"):
        sys.modules.pop(path.stem, None)


class Block(NamedTuple):
    """What stands between two fences; ``line`` lines of the page come before it."""

    language: str
    text: str
    line: int


class Command(NamedTuple):
    """A line of a shell, and what the page shows as its output."""

    line: str
    shown: str = ""

    @property
    def words(self):
        return shlex.split(self.line, comments=True)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """All fenced blocks; fences that are not closed, or of a language that nobody runs, raise."""
    parsed = [
        Block(match[1].strip(), match[2], text.count("\n", 0, match.start(2)))
        for match in _BLOCK.finditer(text)
    ]
    if len(_FENCE.findall(text)) != 2 * len(parsed):
        raise ValueError("There is a fence that is not closed, or that does not begin its line.")
    for block in parsed:
        if block.language not in LANGUAGES:
            raise ValueError(
                f"Line {block.line}: {block.language!r} is none of {', '.join(LANGUAGES)}."
            )
    return parsed


def pasted(text: str, name: str) -> dict[str, Any]:
    """Run the Python of a page, block by block, as if pasted into one new interpreter."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, name, "exec"), names)
    return names


# ------------------------------------------------------------ shells
def commands(text: str) -> list[Command]:
    """The commands in the shell blocks of a page, in order."""
    return [c for block in blocks(text) if block.language in SHELL for c in _commands(block.text)]


def _commands(text: str) -> list[Command]:
    """Where some lines have a prompt, the others are output; else every line is a command."""
    lines = text.replace("\\\n", " ").splitlines()
    prompts = any(line.startswith("$ ") for line in lines)
    in_order: list[Command] = []
    for line in lines:
        if line.startswith("$ ") or not prompts:
            in_order.append(Command(line.removeprefix("$ ")))
        elif not in_order:
            raise ValueError(f"{line!r} is the output of no command.")
        else:
            last = in_order.pop()
            in_order.append(Command(last.line, f"{last.shown}{line}\n"))
    return [command for command in in_order if command.words]


def spans(text: str) -> list[str]:
    """The code between backticks in the prose of a page."""
    return [" ".join(span.split()) for span in _SPAN.findall(_BLOCK.sub("", text))]


def mentioned(text: str) -> list[Command]:
    """The commands in the prose of a page."""
    programs = ("lightning-bnn ", "weightsym ", "python ", "make ")
    return [Command(span) for span in spans(text) if span.startswith(programs)]


# ------------------------------------------------------------ links
def links(text: str) -> list[str]:
    """The targets of all links and pictures that are in this repository."""
    targets = _LINK.findall(_SPAN.sub("", _BLOCK.sub("", text)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = (title.lower().replace("`", "") for title in _HEADING.findall(_BLOCK.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in headings}


def dangling(text: str, folder: Path) -> list[str]:
    """Links to files or headings that do not exist."""
    return [target for target in links(text) if not _exists(target, text, folder)]


def _exists(target: str, text: str, folder: Path) -> bool:
    name, _, anchor = target.partition("#")
    if name and not (folder / name).exists():
        return False
    return not anchor or anchor in anchors((folder / name).read_text() if name else text)
