"""The layers of the package as stairs: squares are packages, dots are what they import."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from house import NAME, ROOT, File
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

INK, DOT, LINE, BAND = "#1d3557", "#c1440e", "#c9ced6", "#eef1f5"
CELL = 0.25
"""Inches."""
MARGIN = 0.85
"""Inches for the names of the uppermost packages."""


def layers() -> list[list[str]]:
    """The layers that `make check` enforces, the highest first."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if c.get("containers") == ["lightning_bnn"])
    rows = [re.findall(r"(\w+)[.\w]*", layer) for layer in contract["layers"]]
    lowest = {name: k for k, row in enumerate(rows) for name in row}
    return [
        layer
        for k, row in enumerate(rows)
        if (layer := list(dict.fromkeys(name for name in row if lowest[name] == k)))
    ]


def imports(files: Sequence[File], rooms: Sequence[str]) -> Counter[tuple[str, str]]:
    """How many files of one package import something of another."""
    pairs: Counter[tuple[str, str]] = Counter()
    for file in files:
        places = [name.split(".") for name in file.imported() if name.startswith(f"{NAME}.")]
        others = {place[1] for place in places} & {*rooms} - {file.room}
        pairs.update((file.room, other) for other in others if file.room)
    return pairs


def draw(files: Sequence[File], path: Path) -> None:
    """Write the picture.

    Args:
        files: whose imports are counted.
        path: of the picture; its suffix says which kind.
    """
    sizes = {
        name: sum(f.code_lines for f in files if f.room == name)
        for layer in layers()
        for name in layer
    }
    present, rooms = layers(), list(sizes)
    count = len(rooms)
    figure = Figure(figsize=(MARGIN + CELL * count, CELL * (count + 1)), dpi=160)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-MARGIN / CELL, count), ylim=(count + 0.5, -0.5))
    axes.axis("off")
    _bands(axes, present)
    _stairs(axes, sizes)
    _names(axes, rooms)
    _dots(axes, rooms, imports(files, rooms))
    _legend(axes, count)
    figure.savefig(path)


def _bands(axes: Axes, present: list[list[str]]) -> None:
    top = 0
    for k, layer in enumerate(present):
        if k % 2 == 0:
            left, right = axes.get_xlim()
            axes.add_patch(Rectangle((left, top), right - left, len(layer), color=BAND, lw=0))
        top += len(layer)


def _stairs(axes: Axes, sizes: dict[str, int]) -> None:
    """Squares on the diagonal, whose areas are code lines."""
    largest = max(sizes.values())
    for k, size in enumerate(sizes.values()):
        side = max(0.16, 0.86 * (size / largest) ** 0.5)
        corner = (k + 0.5 - side / 2, k + 0.5 - side / 2)
        axes.add_patch(Rectangle(corner, side, side, color=INK, lw=0, zorder=3))


def _names(axes: Axes, rooms: list[str]) -> None:
    """Before the squares; those of folders end with a slash."""
    style: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9, "color": INK}
    for k, name in enumerate(rooms):
        slash = "/" if (ROOT / NAME / name).is_dir() else ""
        axes.text(k - 0.1, k + 0.52, f"{name}{slash}", **style)


def _dots(axes: Axes, rooms: list[str], pairs: Counter[tuple[str, str]]) -> None:
    """One for every pair, on lines to the square of either; its area is the number of files."""
    place = {name: k for k, name in enumerate(rooms)}
    cells = {(place[a], place[b]): n for (a, b), n in pairs.items()}
    for k in range(len(rooms)):
        right = max((column for row, column in cells if row == k), default=k)
        top = min((row for row, column in cells if column == k), default=k)
        axes.plot([k + 0.5, right + 0.5], [k + 0.5] * 2, color=LINE, lw=0.7, zorder=1)
        axes.plot([k + 0.5] * 2, [top + 0.5, k + 0.5], color=LINE, lw=0.7, zorder=1)
    x = [column + 0.5 for _, column in cells]
    y = [row + 0.5 for row, _ in cells]
    axes.scatter(x, y, [_area(n) for n in cells.values()], color=DOT, lw=0, zorder=2)


def _area(files: int) -> float:
    """In square points, so that forty files fill a cell."""
    return 14 + 4.5 * min(files, 40)


def _legend(axes: Axes, count: int) -> None:
    """In the empty half below the stairs."""
    dots = [
        Line2D([], [], ls="", marker="o", color=DOT, mec="none", ms=_area(n) ** 0.5, label=text)
        for n, text in ((1, "imported by 1 file of the row"), (10, "by 10 files"), (40, "by 40"))
    ]
    square = Line2D([], [], ls="", marker="s", color=INK, ms=9, label="code lines of a package")
    legend = axes.legend(
        handles=[square, *dots],
        loc="lower left",
        bbox_to_anchor=(0.015, 0.04),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title="Whatever a package imports\nstands on a lower stair.",
        title_fontsize=9.5,
        alignment="left",
    )
    legend.get_title().set_color(INK)
