"""Pages of the documentation: what is pasted, which commands they name, where they link."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "weightsym/README.md"]
FOLDERS = "docs", "docs/results"
PAGES += sorted(f"{name}/{path.name}" for name in FOLDERS for path in (ROOT / name).glob("*.md"))
TUTORIALS = sorted(f"docs/tutorials/{path.name}" for path in (ROOT / "docs/tutorials").glob("*.md"))
"""Pages that are made by running scripts."""
SHELL = ("", "sh", "console")

_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def script(path: str) -> ModuleType:
    """A file of this repository that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def benchmark_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import scripts of `benchmarks` by name, and forget them after the test."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for path in (ROOT / "benchmarks").glob("*.py"):
        sys.modules.pop(path.stem, None)


class Block(NamedTuple):
    """The text between two fences; ``line`` lines of the page come before it."""

    language: str
    text: str
    line: int


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """All fenced blocks."""
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2))) for m in _BLOCK.finditer(text)]


def pasted(text: str, name: str) -> dict[str, Any]:
    """Run the Python of a page, block by block, as if pasted into one new interpreter."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, name, "exec"), names)
    return names


def commands(text: str) -> list[str]:
    """The commands in the shell blocks and in the prose of a page; outputs are left out."""
    shells = [b.text.replace("\\\n", " ") for b in blocks(text) if b.language in SHELL]
    lines = [line for shell in shells for line in shell.splitlines() if line.strip()]
    prompts = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    programs = ("lightning-bnn ", "bnn-research ", "weightsym ", "python ", "make ")
    spans = (" ".join(span.split()) for span in _SPAN.findall(_BLOCK.sub("", text)))
    return (prompts or lines) + [span for span in spans if span.startswith(programs)]


def dangling(text: str, folder: Path) -> list[str]:
    """Links to files or headings that do not exist."""
    targets = _LINK.findall(_SPAN.sub("", _BLOCK.sub("", text)))
    targets = [target for target in targets if not re.match(r"[a-z]+:", target)]
    return [target for target in targets if not _exists(target, text, folder)]


def _exists(target: str, text: str, folder: Path) -> bool:
    name, _, anchor = target.partition("#")
    if name and not (folder / name).exists():
        return False
    return not anchor or anchor in _anchors((folder / name).read_text() if name else text)


def _anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = (title.lower().replace("`", "") for title in _HEADING.findall(_BLOCK.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in headings}
