"""The tables of the pages, made from the files that benchmarks have written.

python benchmarks/tables.py

A page shows a table between `<!-- table: NAME -->` and `<!-- end -->`; what stands there is made
from `docs/benchmarks/NAME.json` by the function of that name in `layouts.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

from layouts import LAYOUTS

DOCS = Path(__file__).parents[1] / "docs"
FILES = DOCS / "benchmarks"
PAGES = ("benchmarks.md", "scale.md", "doctor.md", "modules.md", "intervals.md")
REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_pages() -> None:
    """Bring all tables of all pages to what is in the files, and name files that no page shows."""
    seen = []
    for page in PAGES:
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
        seen += shown(text)
    for path in sorted(FILES.glob("*.json")):
        if path.stem not in seen:
            print(f"no page has <!-- table: {path.stem} --> and <!-- end -->")


def filled(page: str, files: Path = FILES) -> str:
    """A page with the tables that its files give."""
    return REGION.sub(lambda found: f"{found[1]}{table(found[2], files)}{found[3]}", page)


def shown(page: str) -> list[str]:
    """The names of the tables on a page."""
    return [found[2] for found in REGION.finditer(page)]


def table(name: str, files: Path = FILES) -> str:
    """One table in Markdown, and below it how it was made."""
    content = json.loads((files / f"{name}.json").read_text(encoding="utf-8"))
    head, *body = LAYOUTS[name](content["rows"])
    lines = [head, ["---"] * len(head), *body]
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{rows}\n{origin(name, content)}\n"


def origin(name: str, content: dict[str, Any]) -> str:
    """Device, threads, command and day, and where the file is, which has the versions."""
    clocks = {row["clock"] for row in content["rows"] if "clock" in row}
    count = "one thread" if content["threads"] == 1 else f"up to {content['threads']} threads"
    how = {"cpu": "CPU time", "wall": "wall time"}
    device = [] if content["device"] == "cpu" else [content["device"]]
    clock = f"{count}, {' and '.join(how[c] for c in sorted(clocks)) or 'CPU time'}"
    parts = [
        *device,
        *([] if clock == "one thread, CPU time" else [clock]),
        content["date"],
        f"`{content['command']}`",
        f"[{name}.json](benchmarks/{name}.json)",
    ]
    return f"*{'; '.join(parts)}*"


if __name__ == "__main__":
    fill_pages()
