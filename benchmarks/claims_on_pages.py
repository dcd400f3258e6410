"""Bring the tables of claims on the papers' pages to what `lightning-bnn reproduce` has found.

    python benchmarks/claims_on_pages.py reproduce

A row keeps its numbers where nothing was tested, or where those on the page are of MNIST or of the
digits, too, and the new ones are not; such rows are named.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def updated(page: str, rows: dict[str, list[str]]) -> Iterator[str]:
    """The lines of a page, with new cells in the rows of claims."""
    for line in page.splitlines():
        cells = line.split("|")[1:-1] if line.startswith("| ") else []
        new = rows.get(cells[0].strip()) if len(cells) == 4 else None
        reason = "" if new is None else why_left(line, new)
        if reason:
            print(f"left: {cells[0].strip()}: {reason}")
        yield line if new is None or reason else f"| {' | '.join(new)} |"


def why_left(line: str, new: list[str]) -> str:
    """Why a row is not replaced; nothing if it is."""
    if new[3].startswith("not tested"):
        return new[3]
    old, cells = line.split("|", 2)[2], new[1] + new[2]
    for data, words in (("MNIST", ("MNIST", "OptuNet")), ("the digits", ("digits:", "digits,"))):
        if any(word in old for word in words) and not any(word in cells for word in words):
            return f"the page has {data}, too"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder that `reproduce` has written")
    folder = parser.parse_args().results
    tables = json.loads((folder / "results.json").read_text(encoding="utf-8"))["tables"]
    for paper in ("p1", "p2", "p3"):
        if paper in tables:
            path = DOCS / f"{paper}.md"
            rows = {row[0]: row for row in tables[paper]["rows"]}
            lines = updated(path.read_text(encoding="utf-8"), rows)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
