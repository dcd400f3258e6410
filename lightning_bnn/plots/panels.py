"""Panels side by side: histograms, lines, points and dots with error bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.plots.axes import WIDTH, legend, panels_of, span, titled_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Line",
    "dots_figure",
    "hexbin_figure",
    "histograms_figure",
    "lines_figure",
    "scatter_figure",
]

_FLOOR = "noise floor"


class Line(NamedTuple):
    """A curve, perhaps with a band around it.

    Args:
        x: the horizontal axis.
        y: the curve.
        low: lower edge of the band.
        high: upper edge of the band.

    >>> from lightning_bnn.plots import Line, lines_figure
    >>> x = torch.linspace(-1, 1, 20)
    >>> mean = Line(x, x**2, low=x**2 - 0.1, high=x**2 + 0.1)
    >>> figure = lines_figure({"fit": {"mean": mean}}, ("x", "y"))
    >>> len(figure.axes[0].lines), len(figure.axes[0].collections)  # the curve and its band
    (1, 1)
    """

    x: Tensor
    y: Tensor
    low: Tensor | None = None
    high: Tensor | None = None


def hexbin_figure(
    forms: Mapping[str, Tensor],
    labels: tuple[str, str],
    diagonal: bool = False,
    central: float = 1.0,
) -> Figure:
    """Density of two weights, one panel for each form (raw, scaled, sorted).

    Args:
        forms: ``(points, 2)`` by name.
        labels: names of the two weights.
        diagonal: whether to draw where both are equal.
        central: the central part of the points that is shown, in each coordinate.

    >>> points = torch.randn(500, 2)
    >>> figure = hexbin_figure({"raw": points, "sorted": points.sort(1).values}, ("w1", "w2"))
    >>> [ax.get_title() for ax in figure.axes[:2]], figure.axes[0].get_ylabel()
    (['raw', 'sorted'], 'w2')
    """
    import numpy as np

    figure, axes = panels_of(len(forms), (WIDTH * len(forms), WIDTH))
    for ax, (form, points) in zip(axes, forms.items(), strict=True):
        x, y = points.double().numpy().T
        levels = (0.5 - central / 2, 0.5 + central / 2)
        limits = [span(np.quantile(v, levels)) if len(v) else span(v) for v in (x, y)]
        cells = ax.hexbin(
            x, y, gridsize=30, mincnt=1, cmap="viridis", extent=(*limits[0], *limits[1])
        )
        bar = figure.colorbar(cells, ax=ax, shrink=0.8)
        if diagonal:
            ax.axline((0, 0), slope=1, color="0.5", linewidth=0.8, linestyle="--")
        ax.set(xlim=limits[0], ylim=limits[1], title=form, xlabel=labels[0])
    bar.set_label("networks")
    axes[0].set_ylabel(labels[1])
    return figure


def histograms_figure(
    panels: Mapping[str, Mapping[str, Tensor]],
    label: str = "weight",
    bins: int = 60,
    columns: int = 3,
) -> Figure:
    """Histograms by form, one panel for each title.

    Args:
        panels: for every title, values by form.
        label: of the horizontal axes.
        bins: of a histogram, at most; all forms of a panel have the same.
        columns: panels side by side.

    >>> weights = torch.randn(500)
    >>> figure = histograms_figure({"1.weight": {"raw": weights, "unit norms": weights / 2}})
    >>> figure.axes[0].get_title(), figure.axes[0].get_xlabel()
    ('1.weight', 'weight')
    """
    figure, axes, columns = titled_panels(panels, columns, 2.4)
    for ax, forms in zip(axes, panels.values(), strict=False):
        drawn = {form: v.double().flatten() for form, v in forms.items() if v.numel()}
        edges = span(_joined(drawn.values())) if drawn else (0.0, 1.0)
        most = max([v.numel() for v in drawn.values()], default=1)
        count = max(10, min(bins, round(2 * math.sqrt(most))))
        for form, values in drawn.items():
            ax.hist(
                values.numpy(), bins=count, range=edges, density=True, histtype="step", label=form
            )
    for ax in axes[::columns]:
        ax.set_ylabel("density")
    for ax in axes[max(0, len(panels) - columns) : len(panels)]:
        ax.set_xlabel(label)
    legend(axes[0], max(len(forms) for forms in panels.values()))
    return figure


def lines_figure(
    panels: Mapping[str, Mapping[str, Line]],
    labels: tuple[str, str],
    marks: Sequence[float] = (),
    columns: int = 3,
) -> Figure:
    """Curves with bands, one panel for each title.

    Args:
        panels: for every title, curves by name.
        labels: of both axes.
        marks: positions on the horizontal axis that get a vertical line.
        columns: panels side by side.

    >>> x = torch.linspace(-1, 1, 20)
    >>> figure = lines_figure({"one": {"y": Line(x, x)}, "two": {"y": Line(x, 2 * x)}}, ("x", "y"))
    >>> [ax.get_title() for ax in figure.axes], figure.axes[0].get_ylabel()
    (['one', 'two'], 'y')
    """
    height = 3.6 if len(panels) <= columns else 2.6
    figure, axes, columns = titled_panels(panels, columns, height, single=(6.0, 3.6))
    for ax, curves in zip(axes, panels.values(), strict=False):
        for k, (name, line) in enumerate(curves.items()):
            marker = "o" if len(line.x) <= 20 else None
            width = 1.2 + 0.7 * max(0, min(len(curves), 4) - 1 - k)  # what is below looks out
            (drawn,) = ax.plot(
                line.x.numpy(), line.y.numpy(), linewidth=width, marker=marker, ms=3, label=name
            )
            if line.low is not None and line.high is not None:
                band = (line.x.numpy(), line.low.numpy(), line.high.numpy())
                ax.fill_between(*band, color=drawn.get_color(), alpha=0.2, linewidth=0)
        for mark in marks:
            ax.axvline(mark, color="0.6", linewidth=0.8, linestyle="--")
        ax.set(xlabel=labels[0])
    for ax in axes[::columns]:
        ax.set_ylabel(labels[1])
    named: list[list[str]] = []
    for ax, curves in sorted(zip(axes, panels.values(), strict=False), key=lambda p: -len(p[1])):
        names = list(curves)
        if names not in [others[: len(names)] for others in named]:  # colours go by position
            legend(ax, len(curves))
            named.append(names)
    return figure


def scatter_figure(
    panels: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]],
    labels: tuple[str, str],
    diagonal: bool = False,
    columns: int = 3,
) -> Figure:
    """Points, one panel for each title.

    Args:
        panels: for every title, coordinates by name.
        labels: of both axes.
        diagonal: whether to draw where both coordinates are equal.
        columns: panels side by side.

    >>> points = {"networks": (torch.rand(10), torch.rand(10))}
    >>> figure = scatter_figure({"test": points, "shifted": points}, ("before", "after"))
    >>> [ax.get_title() for ax in figure.axes], figure.axes[0].get_xlabel()
    (['test', 'shifted'], 'before')
    """
    figure, axes, columns = titled_panels(panels, columns, 3.0, single=(5.0, 4.4))
    for ax, groups in zip(axes, panels.values(), strict=False):
        for name, (x, y) in groups.items():
            many = len(x) > 200
            ax.scatter(x.numpy(), y.numpy(), s=6 if many else 18, alpha=0.5 if many else 0.8,
                       linewidths=0, label=name)  # fmt: skip
        if diagonal:
            low, high = span(_joined(t for pair in groups.values() for t in pair))
            ax.plot([low, high], [low, high], color="0.5", linewidth=0.8, linestyle="--")
        ax.set(xlabel=labels[0])
    for ax in axes[::columns]:
        ax.set_ylabel(labels[1])
    legend(axes[0], max(len(groups) for groups in panels.values()))
    return figure


def dots_figure(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    names: Sequence[str],
    floors: Mapping[str, tuple[float, float]] | None = None,
    columns: int = 4,
) -> Figure:
    """Numbers with error bars, one panel for each number and one line for each name.

    Args:
        panels: for every title, by series, value and error of every name (NaN for none).
        names: of the lines, from the top.
        floors: for some titles, a band (mean and half its width) of values that cannot be told from
            zero.
        columns: panels side by side.

    >>> accuracy, nll = [(0.9, 0.01), (0.8, 0.02)], [(0.3, 0.1), (0.4, 0.1)]
    >>> panels = {"accuracy": {"test": accuracy}, "NLL": {"test": nll}}
    >>> figure = dots_figure(panels, ["ensemble", "MFVI"])
    >>> [ax.get_title() for ax in figure.axes if ax.get_visible()]
    ['accuracy', 'NLL']
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    height = (0.5 + 0.24 * len(names)) * rows + 0.5
    figure, axes = panels_of(len(panels), (1.2 + 2.3 * columns, height), columns)
    for k, (ax, (title, series)) in enumerate(zip(axes, panels.items(), strict=False)):
        if floors and title in floors:
            _floor(ax, *floors[title])
        for j, (label, values) in enumerate(series.items()):
            _dots(ax, values, 0.14 * (2 * j - len(series) + 1), label)
        ax.set_yticks(range(len(names)), list(names) if k % columns == 0 else [""] * len(names))
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.tick_params(labelsize=7)
        ax.grid(axis="y", color="0.93", linewidth=0.8)
        ax.set_title(title, fontsize=8)
        ax.locator_params(axis="x", nbins=5)
    marks: dict[str, Any] = {}
    for ax in axes:
        marks |= {name: mark for mark, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    if _FLOOR in marks:
        marks[_FLOOR] = marks.pop(_FLOOR)  # after the series
    figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=len(marks), frameon=False,
        fontsize=8,
    )  # fmt: skip
    return figure


def _floor(ax: Any, mean: float, half: float) -> None:
    """A band, and a line, since beside large numbers the band is narrower than a pixel."""
    if not math.isfinite(mean):
        return
    if math.isfinite(half):
        ax.axvspan(mean - half, mean + half, color="0.85", linewidth=0, zorder=0)
    ax.axvline(mean, color="0.5", linewidth=1.5, zorder=0.5, label=_FLOOR)


def _dots(ax: Any, values: Sequence[tuple[float, float]], shift: float, label: str) -> None:
    shown = [(k, v, e) for k, (v, e) in enumerate(values) if math.isfinite(v)]
    ax.errorbar(
        [v for _, v, _ in shown],
        [k + shift for k, _, _ in shown],
        xerr=[e if math.isfinite(e) else 0 for _, _, e in shown],
        fmt="o", ms=3.5, lw=1, label=label,
    )  # fmt: skip


def _joined(tensors: Iterable[Tensor]) -> Any:
    return torch.cat([values.flatten().double() for values in tensors]).numpy()
