"""The inside of the package in numbers, now and before, read from its source.

python benchmarks/house.py                      the working tree
python benchmarks/house.py --before REVISION    beside it that revision of git
python benchmarks/house.py --list short         where docstrings of four words or fewer are
python benchmarks/house.py --picture FILE       the layers, and which package imports which

Nothing is imported or run. Code lines are those without blank lines, comments and docstrings; a
function is as long as its body without the docstring; a chain is a class with all its bases that
belong to the package.
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from source_code import Definition, body_lines, identifiers  # noqa: E402
from source_package import Class, Package  # noqa: E402

NAME = "lightning_bnn"
VAGUE = ("found", "own", "held", "told")
"""Names that say nothing of what they hold."""
FEW_WORDS = 4
LONG_FILE, LONG_FUNCTION = 300, 30
Table = dict[str, str]


@contextlib.contextmanager
def package_of(revision: str | None) -> Iterator[Package]:
    """The package as it is here, or as it was at a revision."""
    if revision is None:
        yield Package(ROOT / NAME)
        return
    archive = subprocess.run(
        ["git", "archive", revision, NAME], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Package(Path(folder) / NAME)


def table_of(package: Package) -> Table:
    """All rows, in the order in which they are printed."""
    return {
        **sizes(package),
        **functions(package),
        **docstrings(package),
        **public_names(package),
        **vague_names(package),
        **chains(package),
    }


# ------------------------------------------------------------ rows
def sizes(package: Package) -> Table:
    sources = list(package.sources.values())
    machinery = package.in_rooms("modules", "methods")
    rows = {
        "files": str(len(sources)),
        f"files of more than {LONG_FILE} lines": str(sum(s.lines > LONG_FILE for s in sources)),
        "lines of modules + methods": str(sum(s.lines for s in machinery)),
        "code lines": str(sum(s.code_lines for s in sources)),
    }
    rooms: Counter[str] = Counter()
    for source in sources:
        in_folder = source.module.count(".") > 1 or source.path.stem == "__init__"
        room = package.room(source.module) if in_folder else ""
        rooms[f"{room}/" if room else "files beside the folders"] += source.code_lines
    return rows | {f"  {room}": str(count) for room, count in sorted(rooms.items())}


def functions(package: Package) -> Table:
    lengths = {
        (source.module, node.name, node.lineno): body_lines(node)
        for source in package.sources.values()
        for node in source.functions()
    }
    counted = sorted(length for length in lengths.values() if length)
    longest = max(lengths, key=lambda key: lengths[key])
    name = f"{longest[0].rpartition('.')[2]}.{longest[1]}"
    return {
        "functions": str(len(lengths)),
        "  median lines": f"{statistics.median(counted):g}",
        "  90th percentile": f"{statistics.quantiles(counted, n=10)[-1]:.0f}",
        f"  longer than {LONG_FUNCTION} lines": str(sum(n > LONG_FUNCTION for n in counted)),
        "  longest": f"{lengths[longest]} {name}",
    }


def docstrings(package: Package) -> Table:
    documented = [d for d in package.definitions() if d.docstring]
    return {
        "docstrings": str(len(documented)),
        f"  of {FEW_WORDS} words or fewer": str(sum(map(is_short, documented))),
    }


def is_short(definition: Definition) -> bool:
    return 0 < len((definition.docstring or "").split()) <= FEW_WORDS


def public_names(package: Package) -> Table:
    sources = package.sources.values()
    packages = [s for s in sources if s.path.stem == "__init__"]
    files = [s for s in sources if s.path.stem != "__init__"]
    public = [d for d in package.definitions() if d.name and d.is_public]
    return {
        "names that packages export": str(sum(len(s.exported) for s in packages)),
        "names in __all__ of files": str(sum(len(s.exported) for s in files)),
        "public classes, functions, methods": str(len(public)),
    }


def vague_names(package: Package) -> Table:
    counts = Counter(n for s in package.sources.values() for n in identifiers(s.tree))
    rows = {"uses of vague names": str(sum(counts[name] for name in VAGUE))}
    return rows | {f"  {name}": str(counts[name]) for name in VAGUE}


def chains(package: Package) -> Table:
    """Depth of the class chains, and what a reader of one module or one method has to read."""
    deepest = max(package.classes, key=package.depth)
    rows = {
        "deepest chain of classes": f"{package.depth(deepest)} {deepest.rpartition('.')[2]}",
        "along a chain: classes, methods, overridden, attributes, lines": "",
    }
    for name in [*module_classes(package), *method_classes(package)]:
        ancestry = package.ancestry(name)
        numbers = (
            package.depth(name),
            len(set().union(*(one.methods for one in ancestry))),
            len(defined_twice(ancestry)),
            len(set().union(*(one.attributes for one in ancestry))),
            sum(one.lines for one in ancestry),
        )
        room, short_name = package.room(name), name.rpartition(".")[2]
        rows[f"  {room}: {short_name}"] = " ".join(f"{number:>4}" for number in numbers)
    return rows


def module_classes(package: Package) -> list[str]:
    """The LightningModules that ``modules`` exports."""
    exports = package.sources[f"{NAME}.modules"]
    names = [package.defined(f"{exports.module}.{name}") for name in exports.exported]
    return [
        name
        for name in names
        if name in package.classes
        and any("LightningModule" in base for base in package.foreign_bases(name))
    ]


def method_classes(package: Package) -> list[str]:
    """The algorithms below `Method`, where there are any."""
    root = f"{NAME}.methods.method.Method"
    return [
        name
        for name in sorted(package.classes)
        if name != root and any(one.name == root for one in package.ancestry(name))
    ]


def defined_twice(ancestry: list[Class]) -> set[str]:
    counts = Counter(method for one in ancestry for method in one.methods)
    return {method for method, count in counts.items() if count > 1}


# ------------------------------------------------------------ output
def show(columns: dict[str, Table]) -> None:
    rows = merged([list(table) for table in columns.values()])
    width = max(map(len, rows))
    widths = [max(len(t), *map(len, table.values())) for t, table in columns.items()]
    cells = zip(columns, widths, strict=True)
    print(f"{'':{width}}", *(f"{title:>{w}}" for title, w in cells), sep="  ")
    for row in rows:
        cells = zip((table.get(row, "-") for table in columns.values()), widths, strict=True)
        print(f"{row:{width}}", *(f"{cell:>{w}}" for cell, w in cells), sep="  ")


def merged(orders: list[list[str]]) -> list[str]:
    """All rows once; one that is new follows the row that it follows in its own table."""
    rows = orders[0][:]
    for order in orders[1:]:
        for before, row in zip(["", *order], order, strict=False):
            if row not in rows:
                rows.insert(rows.index(before) + 1 if before else 0, row)
    return rows


def listed(package: Package, what: str) -> Iterator[str]:
    """Where to look: places in the source."""
    if what == "short":
        for definition in filter(is_short, package.definitions()):
            yield f"{definition.place}: {definition.docstring}"
        return
    for source in package.sources.values():
        if what == "files" and source.lines > LONG_FILE:
            yield f"{source.path}: {source.lines} lines"
        for node in source.functions() if what == "long" else ():
            if body_lines(node) > LONG_FUNCTION:
                yield f"{source.path}:{node.lineno}: {node.name}: {body_lines(node)} lines"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="REVISION", help="a revision of git to compare with")
    parser.add_argument("--list", choices=["short", "long", "files"], help="places, no table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the packages, no table")
    options = parser.parse_args()
    with package_of(None) as package:
        if options.list:
            print(*listed(package, options.list), sep="\n")
            return
        if options.picture:
            from imports_picture import draw, layers

            draw(package, layers(), options.picture)
            return
        columns = {"now": table_of(package)}
    if options.before:
        with package_of(options.before) as package:
            columns = {options.before: table_of(package), **columns}
    show(columns)


if __name__ == "__main__":
    main()
