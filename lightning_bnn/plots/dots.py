"""Numbers with error bars, with one panel for each number and one line for each name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_bnn.plots.axes import MARKERS, TEXT, colours, legend, panels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["dots_figure"]

_FLOOR = "noise floor"
_LINE = 0.34
"""Inches of a name's line."""
Numbers = Sequence[tuple[float, float]]
"""Value and error of every name."""


def dots_figure(
    panels: Mapping[str, Mapping[str, Numbers]],
    names: Sequence[str],
    floors: Mapping[str, Numbers | tuple[float, float]] | None = None,
    columns: int = 2,
    label: str | Mapping[str, str] = "",
) -> Figure:
    """Plot numbers with error bars, one panel for each number and one line for each name.

    Args:
        panels: for every title, value and error of every name (NaN for none), by series.
        names: of the lines, from the top.
        floors: for some titles, a band (mean and half its width) of values that are
            indistinguishable from zero; or one for every name, NaN for none.
        columns: number of panels side by side.
        label: of the horizontal axes, for all or for each title.

    >>> accuracy, nll = [(0.9, 0.01), (0.8, 0.02)], [(0.3, 0.1), (0.4, 0.1)]
    >>> panels = {"accuracy": {"test": accuracy}, "NLL": {"test": nll}}
    >>> figure = dots_figure(panels, ["ensemble", "MFVI"])
    >>> [ax.get_title() for ax in figure.axes]
    ['accuracy', 'NLL']
    """
    height = 0.75 + _LINE * len(names)
    figure, axes = panels_of(len(panels), columns, height)
    colour = colours(name for series in panels.values() for name in series)
    for k, (ax, (title, series)) in enumerate(zip(axes, panels.items(), strict=True)):
        for row in range(len(names)):
            ax.axhline(row, color="0.92", linewidth=0.8, zorder=0)
        if floors and title in floors:
            _floors(ax, floors[title], len(names))
        for j, (name, values) in enumerate(series.items()):
            shift = (j - (len(series) - 1) / 2) * min(0.28, 0.7 / len(series))
            _dots(ax, values, shift, {"label": name, "color": colour[name], "fmt": MARKERS[j]})
        visible = list(names) if k % min(columns, len(panels)) == 0 else [""] * len(names)
        ax.set_yticks(range(len(names)), visible)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_title(title)
        ax.locator_params(axis="x", nbins=4)
        ax.set_xlabel(label if isinstance(label, str) else label.get(title, ""), fontsize=TEXT)
    legend(axes, 1, _FLOOR)
    return figure


def _floors(ax: Any, floors: Numbers | tuple[float, float], lines: int) -> None:
    """Draw bands and lines, since beside large numbers a band is narrower than a pixel."""
    everywhere = isinstance(floors[0], (int, float))
    pairs: Any = [floors] * lines if everywhere else floors
    label: str | None = _FLOOR
    for row, (mean, half) in enumerate(pairs):
        if not math.isfinite(mean):
            continue
        ends = [row - 0.5, row + 0.5]
        if math.isfinite(half):
            band = ([mean - half] * 2, [mean + half] * 2)
            ax.fill_betweenx(ends, *band, color="0.82", linewidth=0, zorder=0.3)
        ax.plot([mean, mean], ends, color="0.45", linewidth=1.6, zorder=0.5, label=label,
                solid_capstyle="butt")  # fmt: skip
        label = None


def _dots(ax: Any, values: Numbers, shift: float, style: Mapping[str, Any]) -> None:
    visible = [(k, v, e) for k, (v, e) in enumerate(values) if math.isfinite(v)]
    ax.errorbar(
        [v for _, v, _ in visible],
        [k + shift for k, _, _ in visible],
        xerr=[e if math.isfinite(e) else 0 for _, _, e in visible],
        ms=4.5, lw=1.2, mfc="white", mew=1.3, **style,
    )  # fmt: skip
