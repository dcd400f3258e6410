"""Curves by panel, with bands or error bars around them."""

from __future__ import annotations

import itertools
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
"""Numbers that are few enough to be all the ticks of a logarithmic axis."""
_WIDTH = 1.8
_APART, _PANEL = 3.5, 150.0
"""Points between the error bars of two curves, at most, and across a panel."""


class Line(NamedTuple):
    """A curve, perhaps with a band around it.

    Args:
        x: the horizontal axis.
        y: the curve.
        low: lower edge of the band; of a few points, lower ends of their error bars.
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
    """Curves with bands, one panel for each title.

    Curves that lie on others are striped, so that all of them can be seen; error bars of a few
    points stand beside each other.

    Args:
        panels: for every title, curves by name.
        labels: of both axes; if one is empty, the titles are.
        marks: positions on the horizontal axis that get a vertical line.
        columns: panels side by side.
        log: the axes that are logarithmic, as long as all numbers on them are positive.

    >>> x = torch.linspace(-1, 1, 50)
    >>> figure = lines_figure({"one": {"y": Line(x, x)}, "two": {"y": Line(x, 2 * x)}}, ("x", "y"))
    >>> [ax.get_title() for ax in figure.axes], figure.axes[0].get_ylabel()
    (['one', 'two'], 'y')
    """
    figure, axes = titled_panels(panels, columns)
    visible = _visible(panels, log)
    colour = colours(name for curves in panels.values() for name in curves)
    dashes = stripes(visible)
    apart = _beside(visible, len(colour))
    for ax, curves in zip(axes, panels.values(), strict=True):
        _scale(ax, curves.values(), log)
        if any(line.low is not None and len(line.x) <= FEW for line in curves.values()):
            ax.margins(x=0.06 + apart * (len(colour) - 1) / 2 / _PANEL)
        for name, line in curves.items():
            position = list(colour).index(name)
            style = {"color": colour[name], "linestyle": dashes.get(name, "-"), "label": name}
            style["marker"] = MARKERS[position % len(MARKERS)]
            _draw(ax, line, style, apart * (position - (len(colour) - 1) / 2))
        for mark in marks:
            ax.axvline(mark, color="0.6", linewidth=0.8, linestyle="--")
    label_edges(axes, labels)
    legend(axes)
    return figure


def _draw(ax: Axes, line: Line, style: dict[str, Any], shift: float) -> None:
    """One curve, with its band, or with its error bars so many points from its place."""
    from matplotlib.transforms import ScaledTranslation

    x, y = line.x.double().numpy(), line.y.double().numpy()
    few = len(x) <= FEW
    look = style | ({"markersize": 4.5, "mfc": "white"} if few else {"marker": None})
    drawn: list[Any] = ax.plot(x, y, linewidth=_WIDTH, **look)
    if style["linestyle"] != "-":  # below all, what leads from stripe to stripe
        drawn += ax.plot(x, y, color=style["color"], linewidth=0.8, alpha=0.5, zorder=1.5)
    if line.low is None or line.high is None:
        return
    floor = y.min() / 3 if ax.get_yscale() == "log" else -math.inf
    low, high = line.low.double().numpy().clip(floor), line.high.double().numpy()
    if not few:
        ax.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
        return
    drawn.append(ax.vlines(x, low, high, color=style["color"], linewidth=1.2))
    figure: Any = ax.figure
    move = ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
    for segment in drawn:
        segment.set_transform(ax.transData + move)


def _scale(ax: Axes, curves: Iterable[Line], log: Log) -> None:
    """Logarithmic axes, the horizontal one with a tick for each of a few numbers."""
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


def _visible(
    panels: Mapping[str, Mapping[str, Line]], log: Log
) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """The points of curves in their panels."""

    def position(values: Tensor, axis: str) -> Tensor:
        positive = axis in log and bool((values > 0).all())
        return values.double().log10() if positive else values.double()

    return {
        title: {
            name: (position(line.x, "x"), position(line.y, "y")) for name, line in curves.items()
        }
        for title, curves in panels.items()
    }


def _beside(visible: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]], count: int) -> float:
    """Points between the error bars of so many curves, which stay away from those of the next x."""
    x = _joined(x for curves in visible.values() for x, _ in curves.values()).unique()
    if len(x) < 2:
        return _APART
    nearest = float(x.diff().min() / (x[-1] - x[0]))
    return min(_APART, 0.7 * nearest * _PANEL / max(1, count - 1))


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.double() for t in tensors)])


_STRIPE = 2.4
"""Widths of a line that a stripe is long."""
_CLOSE, _LONG = 0.012, 0.08
"""Shares of a panel: how near curves are that cover each other, and how long they do."""
FEW = 13
"""Points of a curve that are marked one by one; such curves cover each other if all of them do."""
Points = tuple[Any, Any]
"""Both coordinates of a curve as arrays, from left to right."""


def stripes(panels: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, Any]:
    """Dashes of the curves that lie on others in some panel, by name.

    Of R curves that lie on each other, the first is whole, and what is above it leaves out more and
    more of every period, so that each of them is seen for an R-th of the way.

    Args:
        panels: for every title, both coordinates by name.
    """
    groups: list[set[str]] = []
    order = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for pair in _covering(panels):
        touched = [group for group in groups if group & pair]
        groups = [group for group in groups if not group & pair] + [pair.union(*touched)]
    dashes: dict[str, Any] = {}
    for group in groups:
        members = sorted(group, key=order.index)
        for rank, name in enumerate(members[1:], 1):
            visible_points = _STRIPE * (len(members) - rank)
            dashes[name] = (0, (visible_points, _STRIPE * len(members) - visible_points))
    return dashes


def _covering(panels: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]) -> list[set[str]]:
    """The pairs of names whose curves cover each other somewhere."""
    overlaps = []
    for curves in panels.values():
        visible = {name: _points(*curve) for name, curve in curves.items() if len(curve[0]) > 1}
        height = _height(visible)
        for (first, a), (second, b) in itertools.combinations(visible.items(), 2):
            if _cover(a, b, height):
                overlaps.append({first, second})
    return overlaps


def _points(x: Tensor, y: Tensor) -> Points:
    order = x.argsort()
    return x[order].double().numpy(), y[order].double().numpy()


def _height(curves: Mapping[str, Points]) -> float:
    """The height that all curves take up of the vertical axis."""
    import numpy as np

    joined = np.concatenate([np.zeros(0), *(y[np.isfinite(y)] for _, y in curves.values())])
    return float(np.ptp(joined)) if len(joined) else 0.0


def _cover(a: Points, b: Points, height: float) -> bool:
    """Tell whether one curve covers another over a stretch that both have."""
    import numpy as np

    low, high = max(a[0][0], b[0][0]), min(a[0][-1], b[0][-1])
    if not high > low:
        return False
    few = max(len(a[0]), len(b[0])) <= FEW
    x = a[0] if few else np.linspace(low, high, 200)
    close = np.abs(np.interp(x, *a) - np.interp(x, *b)) <= _CLOSE * height
    return bool(close.all() if few else close.mean() > _LONG)
