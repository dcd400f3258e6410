"""Figures of the calibration of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_bnn.plots.axes import legend, panels_of
from lightning_bnn.plots.lines import Line, lines_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_reliability(ax: Axes, count: Tensor, confidence: Tensor, accuracy: Tensor) -> None:
    """Draw a reliability diagram: accuracy against confidence, and examples per bin.

    Args:
        ax: where to draw.
        count: number of examples per bin.
        confidence: mean confidence per bin.
        accuracy: fraction of correct examples per bin.
    """
    used = (count > 0).cpu()
    x, y, n = (t.cpu().double()[used].numpy() for t in (confidence, accuracy, count))
    ax.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
    ax.plot(x, y, color="tab:blue", marker="o", markersize=4, label="predictions")
    ax.vlines(x, x, y, color="tab:red", linewidth=2, alpha=0.6, label="gap")
    share, width = n / max(1, n.sum()), 0.8 / max(1, len(count))
    ax.bar(x, share, width=width, color="0.85", zorder=0, label="share of examples")
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="confidence", ylabel="accuracy")


def reliability_figures(diagrams: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Plot reliability diagrams side by side, one for each title.

    Args:
        diagrams: examples, mean confidence and accuracy per bin, by title.

    >>> import torch
    >>> from lightning_bnn.metrics import reliability
    >>> diagram = reliability(torch.rand(100), torch.rand(100) < 0.5)
    >>> figure = reliability_figures({"before": diagram, "after": diagram})
    >>> [ax.get_title() for ax in figure.axes][:2]
    ['before', 'after']
    """
    figure, axes = panels_of(len(diagrams), height=3.1)
    for ax, (title, diagram) in zip(axes, diagrams.items(), strict=True):
        draw_reliability(ax, *diagram)
        ax.set_title(title)
    legend(axes)
    return figure


def quantiles_figure(shares: Mapping[str, Tensor]) -> Figure:
    """Plot shares of targets below their predicted quantiles, a line for each forecast.

    Args:
        shares: at evenly spaced levels between 0 and 1, by the name of the forecast.

    >>> figure = quantiles_figure({"before": torch.rand(19), "after": torch.rand(19)})
    >>> figure.axes[0].get_xlabel()
    'level'
    """
    count = len(next(iter(shares.values())))
    levels = torch.arange(1, count + 1) / (count + 1)
    lines = {"perfect": Line(levels, levels)}
    lines |= {name: Line(levels, share) for name, share in shares.items()}
    return lines_figure({"": lines}, ("level", "share of targets below its quantile"))
