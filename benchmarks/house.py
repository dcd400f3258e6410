"""The inside of the package in numbers, now and before, read from its source.

python benchmarks/house.py                      the working tree
python benchmarks/house.py --before REVISION    beside it that revision of git
python benchmarks/house.py --list long          where functions of more than 30 lines are

Nothing is imported or run. Code lines are those without blank lines, comments and docstrings; a
function is as long as its body without the docstring.
"""

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "lightning_bnn"
LONG = {"files": 300, "functions": 30}
DULL = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


class File:
    """One file of the package, as a syntax tree.

    Args:
        name: its path, from the root of the repository.
        text: what it holds.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text, self.tree = name, text, ast.parse(text)
        parts = name.removesuffix(".py").split("/")
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.room = [*self.module.split("."), ""][1]
        self.functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)]
        texts = [body(node)[0] for node in ast.walk(self.tree)]
        strings = {k for t in texts if t for k in range(t.lineno, t.end_lineno + 1)}
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in DULL:
                code.update(range(token.start[0], token.end[0] + 1))
        self.code_lines = len(code - strings)

    def imported(self) -> set[str]:
        """Full names of what is imported, at the top or inside functions."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                found |= {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Import):
                found |= {a.name for a in node.names}
        return found


def body(node: ast.AST) -> tuple[ast.Expr | None, list[ast.stmt]]:
    """The docstring of a definition if there is one, and the statements after it."""
    statements = getattr(node, "body", None)
    if not isinstance(statements, list) or not statements:
        return None, []
    first = statements[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (first, statements[1:]) if is_text else (None, statements)


def length(function: ast.FunctionDef) -> int:
    _, statements = body(function)
    return statements[-1].end_lineno - statements[0].lineno + 1 if statements else 0


def files_of(revision: str | None) -> list[File]:
    """The package as it is here, or as it was at a revision."""
    if revision is None:
        paths = sorted((ROOT / NAME).rglob("*.py"))
        return [File(p.relative_to(ROOT).as_posix(), p.read_text("utf-8")) for p in paths]
    command = ["git", "archive", revision, NAME]
    archive = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [m for m in tar if m.name.endswith(".py")]
        return [File(m.name, tar.extractfile(m).read().decode()) for m in members]


def importers(files: list[File]) -> Counter[str]:
    """How many files import each file, or something of it."""
    return Counter(name for file in files for name in file.imported())


def table_of(files: list[File]) -> dict[str, str]:
    """All rows, in the order in which they are printed."""
    lengths = sorted(n for f in files for n in map(length, f.functions) if n)
    sizes = sorted(f.text.count("\n") for f in files)
    counts = importers(files)
    own = [f for f in files if not f.name.endswith("__init__.py")]
    rooms: Counter[str] = Counter()
    for f in files:
        rooms[f.room] += f.code_lines
    return {
        "files": str(len(files)),
        f"  of more than {LONG['files']} lines": str(sum(n > LONG["files"] for n in sizes)),
        "  median, longest": f"{statistics.median(sizes):g}, {sizes[-1]}",
        "  imported by one other at most": str(sum(counts[f.module] <= 1 for f in own)),
        "functions": str(len(lengths)),
        "  median, 90th percentile": f"{statistics.median(lengths):g}, "
        f"{statistics.quantiles(lengths, n=10)[-1]:.0f}",
        f"  longer than {LONG['functions']}": str(sum(n > LONG["functions"] for n in lengths)),
        "code lines": str(sum(rooms.values())),
        **{f"  {room or NAME}": str(count) for room, count in sorted(rooms.items())},
    }


def show(columns: dict[str, dict[str, str]]) -> None:
    rows = list(dict.fromkeys(row for table in columns.values() for row in table))
    width, columns = max(map(len, rows)), {"": dict.fromkeys(rows, ""), **columns}
    for row in ["", *rows]:
        cells = [table.get(row, "-") if row else title for title, table in columns.items()]
        print(f"{row:{width}}", *(f"{cell:>24}" for cell in cells[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="REVISION", help="a revision of git to compare with")
    parser.add_argument("--list", choices=["long"], help="places, no table")
    options = parser.parse_args()
    files = files_of(None)
    if options.list:
        for f in files:
            long = [n for n in f.functions if length(n) > LONG["functions"]]
            print(*(f"{f.name}:{n.lineno}: {n.name}: {length(n)} lines\n" for n in long), end="")
    else:
        before = {options.before: table_of(files_of(options.before))} if options.before else {}
        show({**before, "now": table_of(files)})


if __name__ == "__main__":
    main()
