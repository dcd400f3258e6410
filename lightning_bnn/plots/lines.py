"""Curves in panels, with bands or error bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.plots.axes import MARKERS, colours, label_edges, legend, titled_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Line", "lines_figure"]

Log = Literal["", "x", "y", "xy"]
_TICKS = 6
"""Largest number of values that are all ticks of a logarithmic axis."""
_WIDTH = 1.8
_APART, _PANEL = 3.5, 150.0
"""Points between the error bars of two curves, at most, and across a panel."""


class Line(NamedTuple):
    """A curve, optionally with a band around it.

    Args:
        x: horizontal coordinates.
        y: the curve.
        low: lower edge of the band; for few points, lower ends of their error bars.
        high: upper edge of the band.

    >>> from lightning_bnn.plots import Line, lines_figure
    >>> x = torch.linspace(-1, 1, 50)
    >>> mean = Line(x, x**2, low=x**2 - 0.1, high=x**2 + 0.1)
    >>> figure = lines_figure({"fit": {"mean": mean}}, ("x", "y"))
    >>> len(figure.axes[0].lines), len(figure.axes[0].collections)  # the curve and its band
    (1, 1)
    """

    x: Tensor
    y: Tensor
    low: Tensor | None = None
    high: Tensor | None = None


def lines_figure(
    panels: Mapping[str, Mapping[str, Line]],
    labels: tuple[str, str],
    marks: Sequence[float] = (),
    columns: int = 2,
    log: Log = "",
) -> Figure:
    """Plot curves with bands, one panel for each title.

    Overlapping curves are striped, so that all of them are visible. Error bars of a few points
    stand beside each other.

    Args:
        panels: for every title, curves by name.
        labels: of both axes; the titles replace an empty one.
        marks: horizontal positions of vertical lines.
        columns: number of panels side by side.
        log: axes that are logarithmic if all their numbers are positive.

    >>> x = torch.linspace(-1, 1, 50)
    >>> figure = lines_figure({"one": {"y": Line(x, x)}, "two": {"y": Line(x, 2 * x)}}, ("x", "y"))
    >>> [ax.get_title() for ax in figure.axes], figure.axes[0].get_ylabel()
    (['one', 'two'], 'y')
    """
    figure, axes = titled_panels(panels, columns)
    colour = colours(name for curves in panels.values() for name in curves)
    order = list(colour)
    drawn: list[dict[str, list[Any]]] = []
    for ax, curves in zip(axes, panels.values(), strict=True):
        _scale(ax, curves.values(), log)
        if any(line.low is not None and len(line.x) <= FEW for line in curves.values()):
            ax.margins(x=0.06 + _APART * (len(colour) - 1) / 2 / _PANEL)
        drawn.append(
            {
                name: _draw(ax, line, name, colour[name], MARKERS[order.index(name) % len(MARKERS)])
                for name, line in curves.items()
            }
        )
        for mark in marks:
            ax.axvline(mark, color="0.6", linewidth=0.8, linestyle="--")
    _separate(figure, drawn, order)
    label_edges(axes, labels)
    legend(axes)
    return figure


def _draw(ax: Axes, line: Line, name: str, colour: str, marker: str) -> list[Any]:
    """Draw one curve, with its band or its error bars."""
    x, y = line.x.double().numpy(), line.y.double().numpy()
    few = len(x) <= FEW
    look: dict[str, Any] = {"marker": marker, "markersize": 4.5, "mfc": "white"} if few else {}
    drawn: list[Any] = ax.plot(x, y, color=colour, linewidth=_WIDTH, label=name, **look)
    if line.low is None or line.high is None:
        return drawn
    floor = y.min() / 3 if ax.get_yscale() == "log" else -math.inf
    low, high = line.low.double().numpy().clip(floor), line.high.double().numpy()
    if few:
        return [*drawn, ax.vlines(x, low, high, color=colour, linewidth=1.2)]
    ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    return drawn


def _scale(ax: Axes, curves: Iterable[Line], log: Log) -> None:
    """Set logarithmic axes, with a tick for each of a few horizontal values."""
    from matplotlib.ticker import LogLocator, NullFormatter

    curves = list(curves)
    x, y = _joined(line.x for line in curves), _joined(line.y for line in curves)
    if "y" in log and bool((y > 0).all()):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    if "x" in log and bool((x > 0).all()):
        ax.set_xscale("log")
        ticks = [float(v) for v in x.unique()]
        if len(ticks) <= _TICKS:
            ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
            ax.minorticks_off()


def _separate(figure: Any, drawn: Sequence[Mapping[str, list[Any]]], order: Sequence[str]) -> None:
    """Stripe overlapping curves, and set error bars beside each other."""
    from matplotlib.transforms import ScaledTranslation

    visible = [
        {name: _panel_points(curve) for name, (curve, *_) in curves.items()} for curves in drawn
    ]
    rank: dict[str, int] = {}
    for name in order:
        covered = [rank[lower] for lower in rank if any(_cover(p, name, lower) for p in visible)]
        rank[name] = 1 + max(covered, default=-1)
    apart = _beside(visible, len(order))
    for curves in drawn:
        for name, (curve, *bars) in curves.items():
            shift = apart * (order.index(name) - (len(order) - 1) / 2)
            move = ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
            leader = _stripe(curve, rank[name], max(rank.values()))
            for segment in [curve, *bars, *leader] if bars else []:
                segment.set_transform(curve.axes.transData + move)


def _panel_points(curve: Any) -> Any:
    """Return the points of a curve from left to right, as shares of its panel."""
    curve.axes.get_xlim()  # which sets the limits
    points = (curve.axes.transData - curve.axes.transAxes).transform(curve.get_xydata())
    return points[points[:, 0].argsort()].T


def _cover(curves: Mapping[str, Any], first: str, second: str) -> bool:
    """Check whether one curve of a panel covers another over a common stretch."""
    import numpy as np

    a, b = (curves.get(name, np.zeros((2, 0))) for name in (first, second))
    if min(a.shape[1], b.shape[1]) < 2:
        return False
    low, high = max(a[0, 0], b[0, 0]), min(a[0, -1], b[0, -1])
    if not high > low:
        return False
    few = max(len(a[0]), len(b[0])) <= FEW
    x = a[0] if few else np.linspace(low, high, 200)
    close = np.abs(np.interp(x, *a) - np.interp(x, *b)) <= _CLOSE
    return bool(close.all() if few else close.mean() > _LONG)


def _stripe(curve: Any, rank: int, highest: int) -> list[Any]:
    """Leave larger gaps in a curve the higher it lies, and connect the stripes below all curves."""
    if not rank:
        return []
    period, gaps = _STRIPE * (highest + 1), _STRIPE * rank
    curve.set_linestyle((0, (period - gaps, gaps)))
    look = {"color": curve.get_color(), "linewidth": 0.8, "alpha": 0.5, "zorder": 1.5}
    leader: list[Any] = curve.axes.plot(*curve.get_data(), **look)
    return leader


def _beside(visible: Sequence[Mapping[str, Any]], count: int) -> float:
    """Return the distance between error bars at the same x, which stay away from the next x."""
    import numpy as np

    x = np.unique([x for curves in visible for points in curves.values() for x in points[0]])
    gaps = [*np.diff(x.round(6)), 1.0]
    return min(_APART, 0.7 * min(g for g in gaps if g) * _PANEL / max(1, count - 1))


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.double() for t in tensors)])


_STRIPE = 2.4
"""Length of a stripe in line widths."""
_CLOSE, _LONG = 0.012, 0.08
"""Shares of a panel: distance and length at which curves cover each other."""
FEW = 13
"""Largest number of points with markers; such curves overlap if all points do."""
