"""Axes without pyplot and its global state, and legends that cover nothing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT, TITLE = 10.5, 11.0
"""Points of letters."""
CARD = (4.0, 2.5)
"""Inches of a single panel: on a TensorBoard card, 340 pixels wide, letters have twelve pixels."""
WIDTH = 2.9
"""Inches of a panel beside others: two of them are legible on a phone."""
MARKERS = "osD^vPX<>*"
_MOST = 12
_LOOK: dict[str, Any] = {
    "frameon": False, "fontsize": TEXT, "handlelength": 2.2, "columnspacing": 1.4,
    "scatterpoints": 3,
}  # fmt: skip
"""Of legends."""
_ALONG, _UP = 2.3, 1.9
"""Inches of a panel's axes, which labels do not exceed."""
_ALONG_CARD, _UP_CARD = 3.4, 1.2
"""Height of a single panel, with a title and two rows of a legend."""
_LEADER, _LETTERS = 1.05, 0.17
"""Shares of axes: where names at the ends of lines begin, and their distance."""
_ROW = 0.22
"""Inches of a row of a legend."""
_HANDLE, _BESIDE = 0.5, 0.6
"""Inches that a legend needs besides its text, alone and beside other columns."""


def axes_of(size: tuple[float, float] = (4.5, 5.0)) -> tuple[Any, Axes]:
    """Create a figure of single axes."""
    figure, axes = _grid(1, 1, size)
    return figure, axes[0]


def panels_of(
    count: int, columns: int = 2, height: float = 2.4, width: float = WIDTH
) -> tuple[Any, list[Axes]]:
    """Create a figure of several axes. Single axes have the size of a card.

    Args:
        count: number of axes.
        columns: largest number of columns.
        height: of a row, in inches.
        width: of a column.
    """
    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    size = CARD if count <= 1 else (width * columns, height * rows)
    figure, axes = _grid(rows, columns, size)
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes[:count]


def _grid(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Axes]]:
    from lightning_bnn.plots.plain_figure import PlainFigure

    figure = PlainFigure(figsize=size, layout="constrained", dpi=150)
    axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=TEXT)
        for text, points in ((ax.title, TITLE), (ax.xaxis.label, TEXT), (ax.yaxis.label, TEXT)):
            text.set_fontsize(points)
    return figure, axes


def titled_panels(
    titles: Collection[str], columns: int = 2, height: float = 2.4
) -> tuple[Any, list[Axes]]:
    """Create a figure with one axes for each title.

    Args:
        titles: of the axes.
        columns: largest number of columns.
        height: of a row, in inches.
    """
    figure, axes = panels_of(len(titles), columns, height)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    return figure, axes


def label_edges(axes: Sequence[Axes], labels: tuple[str, str]) -> None:
    """Label the axes at the left and at the lower end of every column.

    An axis without a label is labelled with the title of its panel, which is removed.

    Args:
        axes: of one grid, row by row.
        labels: of the horizontal and of the vertical axes.
    """
    position: Any = axes[0].get_subplotspec()
    columns = position.get_gridspec().ncols
    room = (_ALONG, _UP) if columns > 1 else (_ALONG_CARD, _UP if len(axes) > 1 else _UP_CARD)
    for k, ax in enumerate(axes):
        at_edge = k + columns >= len(axes), k % columns == 0
        both = zip((ax.xaxis, ax.yaxis), labels, at_edge, room, strict=True)
        for axis, label, edge, inches in both:
            if edge or not label:
                axis.set_label_text(_wrapped(label or ax.get_title(), inches))
        if not all(labels):
            ax.set_title("")


def _wrapped(label: str, inches: float) -> str:
    """Break a label into lines no longer than its axis."""
    wide = _inches([label]) if label else 0.0
    return (
        label if wide <= inches else textwrap.fill(label, max(8, int(len(label) * inches / wide)))
    )


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, the same in all panels, or grey.

    >>> colours(["a", "", "b", "a"])
    {'a': 'C0', '': '0.35', 'b': 'C1'}
    """
    every = list(dict.fromkeys(names))
    named = [name for name in every if name]
    return {name: f"C{named.index(name) % 10}" if name else "0.35" for name in every}


def titled(figure: Any, answer: str, subject: str) -> Any:
    """Write a sentence with the main number above a figure, and its subject.

    The title of single axes becomes a part of the subject.

    Args:
        figure: with its axes.
        answer: for example "Rescaling could save 5.2 % of the penalty."
        subject: the network, and what is left out.
    """
    axes = [ax for ax in figure.axes if ax.get_title()]
    if len(axes) == 1:
        subject = f"{axes[0].get_title()}, {subject}"
        axes[0].set_title("")
    inches = figure.bbox_inches.width - 0.2
    lines = [_wrapped(line, inches) for line in (answer, subject)]
    figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize=TEXT)
    return figure


def label_ends(ax: Axes) -> None:
    """Write the names of lines at their ends, to the right of the axes and apart from each other.

    Args:
        ax: with finished lines.
    """
    lines: list[Any] = [
        line for line in ax.get_lines() if not str(line.get_label()).startswith("_")
    ]
    low, high = ax.get_ylim()
    ends = [_end(line, low) for line in lines]
    order = sorted(range(len(lines)), key=lambda k: ends[k][1])
    heights = _spread([(ends[k][1] - low) / (high - low) for k in order])
    for k, height in zip(order, heights, strict=True):
        colour = lines[k].get_color()
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "alpha": 0.6}
        ax.annotate(
            lines[k].get_label(), ends[k], (_LEADER, height), "data", "axes fraction",
            leader | {"relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 1},
            annotation_clip=False, color=colour, fontsize=TEXT, va="center",
        )  # fmt: skip


def _end(line: Any, otherwise: float) -> tuple[float, float]:
    """Return the last finite point of a line."""
    points = [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
    return next((p for p in points[::-1] if math.isfinite(p[1])), (points[-1][0], otherwise))


def _spread(aims: Sequence[float]) -> list[float]:
    """Spread ascending heights as near to their targets as the letters allow, within the axes."""
    gap = min(_LETTERS, 1 / max(1, len(aims)))
    heights: list[float] = []
    for aim in aims:
        heights.append(max(aim, heights[-1] + gap if heights else 0.0))
    tops = [1 - gap * k for k in range(len(aims))][::-1]
    return [min(height, top) for height, top in zip(heights, tops, strict=True)]


def short_names(names: Sequence[str], most: int = 16) -> dict[str, str]:
    """Shorten paths of tensors to their differences, and long ones to their ends.

    Args:
        names: paths such as "bert.encoder.layer.0.attention.self.query.weight"; text after a slash
            stays.
        most: number of letters up to which a name may stay whole.

    >>> short_names(["net.block.conv1.weight", "net.block.conv2.weight"])
    {'net.block.conv1.weight': 'conv1', 'net.block.conv2.weight': 'conv2'}
    >>> queries = [f"bert.encoder.layer.{k}.attention.self.query.weight" for k in range(12)]
    >>> short_names([*queries, "bert.pooler.dense.weight"])[queries[10]]
    'layer.10…query'
    """
    paths = {stem: stem.split(".") for stem in dict.fromkeys(n.partition("/")[0] for n in names)}
    while min(map(len, paths.values())) > 1 and len({p[-1] for p in paths.values()}) == 1:
        paths = {stem: path[:-1] for stem, path in paths.items()}
    while (
        min(map(len, paths.values())) > 1
        and len({p[0] for p in paths.values()}) == 1
        and not any(p[1].isdigit() for p in paths.values())  # a number alone is no name
    ):
        paths = {stem: path[1:] for stem, path in paths.items()}
    short: dict[str, str] = {}
    for stem, path in paths.items():
        shortest = 2 if path[-1].isdigit() else 1  # words at the end
        forms = [".".join(path), *(_cut(path, k) for k in range(len(path) - 1, shortest - 1, -1))]
        by_fit = sorted(forms, key=lambda form: max(0, len(form) - most))
        short[stem] = next((f for f in by_fit if f not in short.values()), forms[0])
    return {n: short[n.partition("/")[0]] + "".join(n.partition("/")[1:]) for n in names}


def _cut(path: Sequence[str], last: int) -> str:
    """Return the last words of a path, after its first number and the word before that."""
    number = next((k for k, word in enumerate(path[:-last]) if word.isdigit()), -1)
    head = ".".join(path[max(0, number - 1) : number + 1])
    return f"{head}…{'.'.join(path[-last:])}"


def legend(axes: Sequence[Axes], least: int = 2, last: str = "") -> None:
    """Add one legend for all axes, in a free cell of the grid, or below them.

    Args:
        axes: of a figure.
        least: smallest number of entries with a legend.
        last: name of the last entry.
    """
    marks: dict[str, Any] = {}
    for ax in axes:
        marks |= {name: mark for mark, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    if last in marks:
        marks[last] = marks.pop(last)
    if not least <= len(marks) <= _MOST:
        return
    figure: Any = axes[0].figure
    free = [ax for ax in figure.axes if not ax.axison]
    if free and _inches(marks) + _HANDLE < WIDTH and len(marks) < 10:
        free[0].legend(marks.values(), marks.keys(), loc="center", **_LOOK)
        return
    columns = _columns(marks, figure.bbox_inches.width, 4)
    if len(axes) > 1:  # one alone stays as large as a card
        figure.set_figheight(figure.get_figheight() + _ROW * -(-len(marks) // columns))
    grid: Any = axes[0].get_subplotspec()
    position = f"outside {'upper' if grid.get_gridspec().nrows > 2 else 'lower'} center"
    figure.legend(marks.values(), marks.keys(), loc=position, ncols=columns, **_LOOK)


def _columns(names: Collection[str] | Mapping[str, Any], width: float, most: int) -> int:
    """Return the number of legend columns that fit, at most `most`, in full rows."""
    fit = max(1, min(len(names), most, int(width / (_inches(names) + _BESIDE))))
    return -(-len(names) // -(-len(names) // fit))


def _inches(names: Collection[str] | Mapping[str, Any]) -> float:
    """Return the width of the longest name."""
    from matplotlib.textpath import TextPath

    plain = (name.replace("$", r"\$") for name in names)
    paths = (TextPath((0, 0), name, size=TEXT) for name in plain)
    return max(float(path.vertices[:, 0].max(initial=0)) for path in paths) / 72  # no curves solved


def span(values: Any) -> tuple[float, float]:
    """Return nonempty limits, even for constant weights and for none."""
    if not len(values):
        return -1.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = 1e-3 * max(abs(low), abs(high), 1e-6) if high - low < 1e-9 else 0.0
    return low - margin, high + margin
