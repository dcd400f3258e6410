"""Makes the pages of docs/tutorials: a script is run, and shown with what it prints and draws.

    python examples/tutorials/build.py             # all of them
    python examples/tutorials/build.py 01 banks    # those whose names hold one of the words

A script consists of cells. A line `# %% [markdown]` begins prose, which is written in comments, and
a line `# %%` begins code. So editors open it as a notebook, and `python 01_callbacks.py` runs it in
any folder. Pictures that a cell writes into that folder are shown below it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent
PAGES = SCRIPTS.parents[1] / "docs" / "tutorials"
_MARK = re.compile(r"^# %%( \[markdown\])?$", re.MULTILINE)


class Cell(NamedTuple):
    """Prose, or code; `line` lines of the script come before its text."""

    is_prose: bool
    text: str
    line: int


class Result(NamedTuple):
    """What a cell has printed, and the pictures that it has written, by name."""

    printed: str = ""
    pictures: dict[str, bytes] = {}


def names(words: Sequence[str] = ()) -> list[str]:
    """The scripts whose names hold one of the words; all of them if there are none."""
    every = sorted(path.stem for path in SCRIPTS.glob("[0-9]*.py"))
    return [name for name in every if not words or any(word in name for word in words)]


def script(name: str) -> str:
    """The text of a script."""
    return (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")


def cells(text: str) -> list[Cell]:
    """The cells of a script; the docstring before the first of them is for its readers only."""
    marks = list(_MARK.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [_cell(text, mark, end) for mark, end in zip(marks, ends, strict=True)]


def _cell(text: str, mark: re.Match[str], end: int) -> Cell:
    line, body = text.count("\n", 0, mark.end()) + 1, text[mark.end() : end].strip("\n")
    if not mark[1]:
        return Cell(False, body, line)
    lines = body.splitlines()
    wrong = [k for k, one in enumerate(lines) if one != "#" and not one.startswith("# ")]
    if wrong:
        raise ValueError(f"Line {line + wrong[0] + 1} stands in prose, and is no comment.")
    return Cell(True, "\n".join(one[2:] for one in lines), line)


def run(name: str, folder: Path) -> tuple[list[Result], dict[str, Any]]:
    """Run a script in a folder; what its cells printed and drew, and the names that it leaves."""
    known: dict[str, Any] = {"__name__": "__main__"}
    results = []
    with _inside(folder):
        for cell in cells(script(name)):
            results.append(Result() if cell.is_prose else _run(cell, name, folder, known))
    return results, known


def _run(cell: Cell, name: str, folder: Path, known: dict[str, Any]) -> Result:
    before, printed = set(folder.glob("*.png")), io.StringIO()
    code = compile("\n" * cell.line + cell.text, str(SCRIPTS / f"{name}.py"), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, known)
    new = sorted(set(folder.glob("*.png")) - before, key=lambda path: path.stat().st_mtime_ns)
    lines = (line.rstrip() for line in printed.getvalue().splitlines())
    return Result("\n".join(lines).strip("\n"), {path.name: path.read_bytes() for path in new})


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


def page(name: str, results: Sequence[Result]) -> str:
    """The page of a script: prose, code, what it printed, and its pictures."""
    parts = []
    for cell, result in zip(cells(script(name)), results, strict=True):
        parts.append(cell.text if cell.is_prose else f"```python\n{cell.text}\n```")
        if result.printed:
            parts.append(f"```text\n{result.printed}\n```")
        parts += [
            f"![{Path(picture).stem.replace('_', ' ')}]({_file(name, picture)})"
            for picture in result.pictures
        ]
    parts.append(f"*Made by `python examples/tutorials/build.py {name[:2]}`.*")
    return "\n\n".join(parts) + "\n"


_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")


def notebook(name: str, install: str = "") -> str:
    """The notebook of a script, in JSON, without links to other pages.

    Args:
        name: of the script.
        install: a command that the first cell runs, if any.
    """
    every = cells(script(name))
    code = {"execution_count": None, "outputs": []}
    content = [
        {"cell_type": "markdown", "metadata": {}, "source": _LINK.sub(r"\1", cell.text)}
        if cell.is_prose
        else {"cell_type": "code", "metadata": {}, "source": cell.text, **code}
        for cell in every
    ]
    if install:
        content.insert(1, {"cell_type": "code", "metadata": {}, "source": install, **code})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps({"cells": content, **about}, indent=1) + "\n"


def _file(name: str, picture: str) -> str:
    return f"{name}_{picture}"


def write(name: str, results: Sequence[Result]) -> None:
    """Write a page and its pictures; pictures that it had before are removed."""
    PAGES.mkdir(parents=True, exist_ok=True)
    for old in PAGES.glob(f"{name}_*.png"):
        old.unlink()
    for result in results:
        for picture, content in result.pictures.items():
            (PAGES / _file(name, picture)).write_bytes(content)
    (PAGES / f"{name}.md").write_text(page(name, results), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run tutorials, and write their pages.")
    parser.add_argument("words", nargs="*", help="parts of names; by default all tutorials")
    words = parser.parse_args().words
    unknown = [word for word in words if not names([word])]
    if unknown:
        parser.error(f"`words`: no tutorial is called {unknown[0]!r}; there are {names()}.")
    for name in names(words):
        with tempfile.TemporaryDirectory() as folder:
            write(name, run(name, Path(folder))[0])
        print(f"wrote {(PAGES / name).with_suffix('.md')}")


if __name__ == "__main__":
    main()
