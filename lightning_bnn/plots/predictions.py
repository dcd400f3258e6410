"""Figures of predictions: their calibration, and matrices of numbers between networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_bnn.plots.axes import TEXT, axes_of, legend, legend_below, panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["matrix_figure", "reliability_figure", "reliability_figures", "sizes_figure"]


def reliability_figure(
    count: Tensor, confidence: Tensor, accuracy: Tensor, ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """A reliability diagram: accuracy against confidence, and how many examples each bin holds.

    Args:
        count: examples per bin.
        confidence: mean confidence per bin.
        accuracy: fraction of correct examples per bin.
        ax: where to draw; by default a figure of its own.

    >>> import torch
    >>> from lightning_bnn.metrics import reliability
    >>> confidence, correct = torch.rand(100), torch.rand(100) < 0.5
    >>> figure, ax = reliability_figure(*reliability(confidence, correct))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('confidence', 'accuracy')
    """
    figure, ax = axes_of(ax, (4.2, 4.8))
    _reliability(ax, count, confidence, accuracy)
    legend_below(ax)
    return figure, ax


def _reliability(ax: Axes, count: Tensor, confidence: Tensor, accuracy: Tensor) -> None:
    used = (count > 0).cpu()
    x, y, n = (t.cpu().double()[used].numpy() for t in (confidence, accuracy, count))
    ax.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
    ax.plot(x, y, color="tab:blue", marker="o", markersize=4, label="predictions")
    ax.vlines(x, x, y, color="tab:red", linewidth=2, alpha=0.6, label="gap")
    share, width = n / max(1, n.sum()), 0.8 / max(1, len(count))
    ax.bar(x, share, width=width, color="0.85", zorder=0, label="share of examples")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")


def reliability_figures(diagrams: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Reliability diagrams side by side, one for each title.

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
        count, confidence, accuracy = diagram
        _reliability(ax, count, confidence, accuracy)
        ax.set_title(title)
    legend(axes)
    return figure


def sizes_figure(sizes: Mapping[str, Tensor], label: str, ax: Axes | None = None) -> Figure:
    """Bars of how often each whole number occurs, for every name.

    Args:
        sizes: whole numbers by name.
        label: of the horizontal axis.
        ax: where to draw; by default a figure of its own.

    >>> import torch
    >>> sizes = {"thr": torch.tensor([1, 1, 2]), "aps": torch.tensor([1, 2, 3])}
    >>> figure = sizes_figure(sizes, "classes in the set")
    >>> figure.axes[0].get_xlabel(), len(figure.axes[0].patches)  # of 0 to 3 classes, two names
    ('classes in the set', 8)
    """
    figure, ax = axes_of(ax, (4.6, 3.4))
    most = max((int(values.max()) for values in sizes.values() if values.numel()), default=0)
    width = 0.8 / max(1, len(sizes))
    for k, (name, values) in enumerate(sizes.items()):
        counts = values.long().cpu().bincount(minlength=most + 1).double()
        x = [j + (k - (len(sizes) - 1) / 2) * width for j in range(most + 1)]
        ax.bar(x, (counts / max(1, len(values))).numpy(), width=width, label=name)
    ax.set(xlabel=label, ylabel="share of examples", xticks=range(most + 1))
    legend_below(ax)
    return figure


def matrix_figure(
    matrix: Tensor, axis: str, value: str, ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """A square matrix as an image with a colour bar.

    Args:
        matrix: ``(n, n)``.
        axis: what rows and columns are.
        value: what the colours mean.
        ax: where to draw; by default a figure of its own.

    >>> import torch
    >>> figure, ax = matrix_figure(torch.eye(5), axis="network", value="information")
    >>> ax.get_xlabel(), [other.get_ylabel() for other in figure.axes if other is not ax]
    ('network', ['information'])
    """
    figure, ax = axes_of(ax)
    image = ax.imshow(matrix.cpu().double().numpy(), cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=ax, shrink=0.8).set_label(value, fontsize=TEXT)
    ax.set(xlabel=axis, ylabel=axis)
    return figure, ax
