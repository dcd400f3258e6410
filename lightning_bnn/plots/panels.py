"""Panels side by side: histograms, points, and densities of points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bnn.plots.axes import (
    MARKERS,
    TEXT,
    colours,
    label_edges,
    legend,
    panels_of,
    span,
    titled_panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["hexbin_figure", "histograms_figure", "scatter_figure"]

_MANY = 200
"""Number of points above which markers are too dense."""


def hexbin_figure(
    forms: Mapping[str, Tensor],
    labels: tuple[str, str],
    diagonal: bool = False,
    central: float = 1.0,
    mirror: str = "",
) -> Figure:
    """Plot the density of two weights, one panel for each form (raw, scaled, sorted).

    All panels have the same limits and colours.

    Args:
        forms: ``(points, 2)`` by name.
        labels: names of the two weights.
        diagonal: whether to draw the diagonal, with the same limits in both directions.
        central: central fraction of all coordinates; panels extend a third farther.
        mirror: label of the diagonal, by default both names.

    >>> points = torch.randn(500, 2)
    >>> figure = hexbin_figure({"raw": points, "sorted": points.sort(1).values}, ("w1", "w2"))
    >>> [ax.get_title() for ax in figure.axes[:2]], figure.axes[0].get_ylabel()
    (['raw', 'sorted'], 'w2')
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = panels_of(len(forms), len(forms), 4.1, 2.5)
    every = torch.cat([points.double() for points in forms.values()])
    ends = [_limits(every if diagonal else every[:, k], central) for k in range(2)]
    drawn = []
    for ax, (form, points) in zip(axes, forms.items(), strict=True):
        x, y = points.double().numpy().T
        drawn.append(
            ax.hexbin(x, y, gridsize=45, mincnt=1, cmap=_shades(), extent=(*ends[0], *ends[1]))
        )
        if diagonal:
            name = mirror or f"{labels[0]} = {labels[1]}"
            ax.axline((0, 0), slope=1, color="tab:red", linewidth=1.2, linestyle="--", label=name)
        aspect = "equal" if diagonal else "auto"
        ax.set(xlim=ends[0], ylim=ends[1], aspect=aspect, title=form)
        ax.locator_params(nbins=5)
        ax.tick_params(labelleft=ax is axes[0])
    label_edges(axes, labels)
    counts: list[Any] = [cells.get_array() for cells in drawn]
    norm = LogNorm(1, max([2.0, *(float(count.max()) for count in counts if len(count))]))
    for cells in drawn:
        cells.set_norm(norm)
    where: dict[str, Any] = {"location": "bottom", "shrink": 0.6, "aspect": 40, "pad": 0.02}
    bar = figure.colorbar(drawn[0], ax=axes, **(where if len(axes) > 1 else {}))
    bar.set_label(f"networks in a cell{_outside(every, ends)}", fontsize=TEXT)
    bar.locator, bar.formatter = LogLocator(subs=(1, 2, 5), numticks=5), "{x:g}"
    bar.minorformatter = NullFormatter()
    bar.ax.tick_params(labelsize=TEXT)
    legend(axes, 1)
    return figure


def _limits(points: Tensor, central: float) -> tuple[float, float]:
    """Return limits a little wider than the central part of coordinates."""
    import numpy as np

    every = points.flatten().numpy()
    levels = (0.5 - central / 2, 0.5 + central / 2)
    low, high = span(np.quantile(every, levels) if len(every) else every)
    more = (0.03 if central == 1 else 1 / 6) * (high - low)
    return low - more, high + more


def _outside(points: Tensor, ends: Sequence[tuple[float, float]]) -> str:
    """Describe the share of points outside all panels."""
    low, high = points.new_tensor(ends).T
    out = ((points < low) | (points > high)).any(1)
    share = 100 * float(out.double().mean()) if len(points) else 0.0
    return f" ({share:.0f} % lie outside)" if share >= 0.5 else ""


def _shades() -> Any:
    """Return a colour map from pale, but not white, to dark."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["YlGnBu"](np.linspace(0.18, 1, 256)))


def histograms_figure(
    panels: Mapping[str, Mapping[str, Tensor]],
    label: str = "weight",
    bins: int = 60,
    columns: int = 2,
) -> Figure:
    """Plot histograms by form, one panel for each title.

    Args:
        panels: for every title, values by form.
        label: of the horizontal axes; the titles replace an empty one.
        bins: largest number of bins, the same for all forms of a panel.
        columns: number of panels side by side.

    >>> weights = torch.randn(500)
    >>> figure = histograms_figure({"1.weight": {"raw": weights, "unit norms": weights / 2}})
    >>> figure.axes[0].get_title(), figure.axes[0].get_xlabel()
    ('1.weight', 'weight')
    """
    figure, axes = titled_panels(panels, columns)
    colour = colours(form for forms in panels.values() for form in forms)
    for ax, forms in zip(axes, panels.values(), strict=True):
        drawn = {form: v.double().flatten() for form, v in forms.items() if v.numel()}
        edges = span(_joined(drawn.values())) if drawn else (0.0, 1.0)
        most = max([v.numel() for v in drawn.values()], default=1)
        count = max(10, min(bins, round(2 * math.sqrt(most))))
        for k, (form, values) in enumerate(drawn.items()):
            width = 1.2 + 1.1 * max(0, min(len(drawn), 4) - 1 - k)  # what is below looks out
            same: dict[str, Any] = {"bins": count, "range": edges, "density": True}
            same["color"] = colour[form]
            ax.hist(values.numpy(), histtype="step", linewidth=width, label=form, **same)
            if k == 0:
                ax.hist(values.numpy(), histtype="stepfilled", alpha=0.15, zorder=0.5, **same)
    label_edges(axes, (label, "density"))
    legend(axes)
    return figure


def scatter_figure(
    panels: Mapping[str, Mapping[str, tuple[Tensor, ...]]],
    labels: tuple[str, str],
    diagonal: bool = False,
    columns: int = 2,
) -> Figure:
    """Plot points, one panel for each title.

    A few points have hollow markers, which remain visible below others, and optional error bars.

    Args:
        panels: for every title, both coordinates by name, and optionally the errors of both.
        labels: of both axes.
        diagonal: whether to draw the diagonal.
        columns: number of panels side by side.

    >>> points = {"networks": (torch.rand(10), torch.rand(10))}
    >>> figure = scatter_figure({"test": points, "shifted": points}, ("before", "after"))
    >>> [ax.get_title() for ax in figure.axes], figure.axes[0].get_xlabel()
    (['test', 'shifted'], 'before')
    """
    figure, axes = titled_panels(panels, columns)
    if len(axes) == 1:
        figure.set_size_inches(4.6, 4.0)
    colour = colours(name for groups in panels.values() for name in groups)
    for ax, groups in zip(axes, panels.values(), strict=True):
        for name, points in groups.items():
            _points(ax, points, list(colour).index(name), {"color": colour[name], "label": name})
        if diagonal:
            low, high = span(_joined(t for pair in groups.values() for t in pair[:2]))
            name = f"{labels[0]} = {labels[1]}"
            ends = [low, high]
            ax.plot(ends, ends, color="0.4", linewidth=1.2, linestyle="--", label=name)
    label_edges(axes, labels)
    legend(axes)
    return figure


def _points(ax: Axes, points: tuple[Tensor, ...], position: int, style: dict[str, Any]) -> None:
    x, y, *errors = (t.double().numpy() for t in points)
    bars: dict[str, Any] = dict(zip(("xerr", "yerr"), errors, strict=False))
    if len(x) > _MANY:
        ax.scatter(x, y, s=7, alpha=0.5, linewidths=0, **style)
        return
    position %= len(MARKERS)
    size = max(4.5, 8 - 0.5 * position) if position else 10.5  # what is below looks out
    ax.errorbar(
        x, y, **bars, fmt=MARKERS[position], ms=size, mfc="none", mew=1.3,
        elinewidth=0.9, **style,
    )  # fmt: skip


def _joined(tensors: Iterable[Tensor]) -> Any:
    return torch.cat([values.flatten().double() for values in tensors]).numpy()
