"""Axes to draw on, without pyplot and its global state."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["axes_of", "legend", "panels_of", "span", "titled_panels"]

WIDTH = 3.2
"""Inches of a panel beside others."""
_BELOW = 0.46
"""Inches from axes to their legend: ticks and a label are in between."""
_BESIDE = 0.6
"""Inches that a column of a legend needs beside its text."""


def axes_of(ax: Axes | None, size: tuple[float, float] = (4.5, 5.0)) -> tuple[Any, Axes]:
    """The figure of the given axes, and these; by default those of a new figure."""
    if ax is not None:
        return ax.figure, ax
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def panels_of(
    count: int, size: tuple[float, float], columns: int | None = None
) -> tuple[Any, list[Any]]:
    """A figure and its axes, by default side by side."""
    from matplotlib.figure import Figure

    columns = columns or count
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(-(-count // columns), columns, squeeze=False).ravel()
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, list(axes)


def titled_panels(
    titles: Collection[str], columns: int, height: float, single: tuple[float, float] | None = None
) -> tuple[Any, list[Any], int]:
    """A figure of several rows, with one axes for each title; and how many columns it has.

    Args:
        titles: of the axes.
        columns: side by side, at most.
        height: of a row.
        single: the size of a figure that has one axes only.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    size = single if single and len(titles) == 1 else (WIDTH * columns, height * rows)
    figure, axes = panels_of(len(titles), size, columns)
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title, fontsize=9)
    return figure, axes, columns


def legend(ax: Axes, entries: int) -> None:
    """A legend if there are several entries, where no curve is: below its axes, or the figure."""
    from matplotlib.transforms import ScaledTranslation

    handles, labels = ax.get_legend_handles_labels()
    if not 1 < len(labels) <= 12:
        return
    figure: Any = ax.figure
    width = figure.bbox_inches.width
    if entries <= 4:
        below = ax.transAxes + ScaledTranslation(0, -_BELOW, figure.dpi_scale_trans)
        ax.legend(
            loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, borderaxespad=0,
            ncols=_columns(labels, width * _share(ax), 4), frameon=False, fontsize=8,
        )  # fmt: skip
    else:
        columns = _columns(labels, width, 3)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )


def _share(ax: Axes) -> float:
    """Of the width of its figure, what is for axes and what is around them."""
    place = ax.get_subplotspec()
    return ax.get_position().width if place is None else 1 / place.get_gridspec().ncols


def _columns(labels: Collection[str], width: float, most: int) -> int:
    """As many columns of a legend as fit into so many inches, and `most` of them."""
    from matplotlib.textpath import TextPath

    widest = max(TextPath((0, 0), label, size=8).get_extents().width for label in labels) / 72
    return max(1, min(len(labels), most, int(width / (widest + _BESIDE))))


def span(values: Any) -> tuple[float, float]:
    """Limits that are not empty, even of weights that never move and of no weights at all."""
    if not len(values):
        return -1.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = 1e-3 * max(abs(low), abs(high), 1e-6) if high - low < 1e-9 else 0.0
    return low - margin, high + margin
