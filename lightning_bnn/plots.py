"""Pictures: pure functions from tensors to matplotlib figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "chains_figure",
    "curves_figure",
    "gaussians_figure",
    "hexbin_figure",
    "marginals_figure",
    "matrix_figure",
    "reliability_figure",
    "trajectories_figure",
]


def reliability_figure(
    count: Tensor, confidence: Tensor, accuracy: Tensor, ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """A reliability diagram: accuracy against confidence, and how many examples each bin holds.

    Args:
        count: examples per bin.
        confidence: mean confidence per bin.
        accuracy: fraction of correct examples per bin.
        ax: where to draw; by default a figure of its own.
    """
    figure, ax = _axes(ax)
    used = (count > 0).cpu()
    x, y, n = (t.cpu().double()[used].numpy() for t in (confidence, accuracy, count))
    ax.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
    ax.plot(x, y, color="tab:blue", marker="o", markersize=4, label="network")
    ax.vlines(x, x, y, color="tab:red", linewidth=2, alpha=0.6, label="gap")
    share, width = n / max(1, n.sum()), 0.8 / max(1, len(count))
    ax.bar(x, share, width=width, color="0.85", zorder=0, label="share of examples")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    ax.legend(loc="upper left", frameon=False)
    return figure, ax


def matrix_figure(
    matrix: Tensor, axis: str, value: str, ax: Axes | None = None
) -> tuple[Figure, Axes]:
    """A square matrix as an image with a colour bar.

    Args:
        matrix: ``(n, n)``.
        axis: what rows and columns are.
        value: what the colours mean.
        ax: where to draw; by default a figure of its own.
    """
    figure, ax = _axes(ax)
    image = ax.imshow(matrix.cpu().double().numpy(), cmap="viridis", interpolation="nearest")
    figure.colorbar(image, ax=ax, label=value, shrink=0.8)
    ax.set(xlabel=axis, ylabel=axis)
    return figure, ax


def _axes(ax: Axes | None, size: tuple[float, float] = (4.5, 5.0)) -> tuple[Any, Axes]:
    if ax is not None:
        return ax.figure, ax
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


# ------------------------------------------------------------ weights
def curves_figure(steps: Sequence[int], values: Mapping[str, Tensor], label: str) -> Figure:
    """Several curves over training steps.

    Args:
        steps: the horizontal axis.
        values: one curve per name.
        label: of the vertical axis.
    """
    figure, ax = _axes(None, (6.0, 3.6))
    for name, curve in values.items():
        ax.plot(steps, curve.cpu().numpy(), linewidth=1, label=name)
    ax.set(xlabel="step", ylabel=label)
    _legend(ax, len(values))
    return figure


def trajectories_figure(
    steps: Sequence[int], forms: Mapping[str, Tensor], labels: Sequence[str]
) -> Figure:
    """Some weights over time, one panel for each form (raw, scaled, sorted).

    Args:
        steps: the horizontal axis.
        forms: ``(times, weights)`` by name.
        labels: names of the weights.
    """
    figure, axes = _panels(len(forms), (3.2 * len(forms), 3.2))
    for ax, (form, values) in zip(axes, forms.items(), strict=True):
        for k, label in enumerate(labels):
            marker = "o" if len(steps) == 1 else None
            ax.plot(steps, values[:, k].numpy(), linewidth=1, label=label, marker=marker)
        ax.set(title=form, xlabel="step")
    axes[0].set_ylabel("weight")
    if len(labels) <= 12:
        lines = axes[0].get_lines()
        figure.legend(lines, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=7)
    return figure


def hexbin_figure(forms: Mapping[str, Tensor], labels: tuple[str, str]) -> Figure:
    """Density of two weights, one panel for each form (raw, scaled, sorted).

    Args:
        forms: ``(points, 2)`` by name.
        labels: names of the two weights.
    """
    figure, axes = _panels(len(forms), (3.2 * len(forms), 3.2))
    for ax, (form, points) in zip(axes, forms.items(), strict=True):
        x, y = points.double().numpy().T
        ax.hexbin(x, y, gridsize=30, mincnt=1, cmap="viridis", extent=(*_span(x), *_span(y)))
        ax.set(title=form, xlabel=labels[0])
    axes[0].set_ylabel(labels[1])
    return figure


def marginals_figure(layers: Mapping[str, Mapping[str, Tensor]], bins: int = 60) -> Figure:
    """Distributions of the weights of several layers, one panel each.

    Args:
        layers: for every layer, values by form.
        bins: of the histograms.
    """
    columns = min(3, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = _panels(len(layers), (3.2 * columns, 2.4 * rows), columns)
    for ax, (layer, forms) in zip(axes, layers.items(), strict=False):
        for form, values in forms.items():
            ax.hist(values.double().numpy(), bins, density=True, histtype="step", label=form)
        ax.set_title(layer, fontsize=9)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def chains_figure(chains: Mapping[str, Tensor], rhat: Mapping[str, Tensor]) -> Figure:
    """One number of every space along all chains, the worst one, and the R-hat of all of them.

    Args:
        chains: ``(chains, times, numbers)`` by space.
        rhat: ``(numbers,)`` by space.
    """
    figure, axes = _panels(2 * len(chains), (3.2 * len(chains), 4.6), len(chains))
    for ax, (space, values) in zip(axes, chains.items(), strict=False):
        worst = int(rhat[space].argmax())
        ax.plot(values[..., worst].T.numpy(), linewidth=0.8)
        ax.set_title(f"{space}: the worst of {values.shape[-1]}", fontsize=9)
        ax.set_xlabel("network of the chain")
    high = max(1.02, min(5.0, max(float(values.max()) for values in rhat.values())))
    for ax, space in zip(axes[len(chains) :], chains, strict=True):
        ax.hist(rhat[space].clamp(max=high).numpy(), 40, (0.99, high), color="0.6")
        ax.axvline(1.01, color="tab:red", linewidth=1)
        ax.set_xlabel("R-hat (line: 1.01)")
    axes[0].set_ylabel("value")
    axes[len(chains)].set_ylabel("how many")
    return figure


def gaussians_figure(
    panels: Sequence[tuple[str, Tensor, Tensor, Tensor, Tensor]],
    columns: int,
    labels: tuple[str, str] = ("", ""),
) -> Figure:
    """Diagonal Gaussians in the plane, as ellipses of two standard deviations over a density.

    Args:
        panels: title, axis of a square grid, density on it (first index: first coordinate), means
            and standard deviations ``(gaussians, 2)``.
        columns: panels side by side.
        labels: of both axes.
    """
    from matplotlib.patches import Ellipse

    rows = -(-len(panels) // columns)
    figure, axes = _panels(len(panels), (2.6 * columns, 2.7 * rows), columns)
    for ax, (title, axis, density, means, stds) in zip(axes, panels, strict=False):
        grid = axis.double().numpy()
        ax.contourf(grid, grid, density.double().numpy().T, levels=12, cmap="Blues")
        for mean, std in zip(means.tolist(), stds.tolist(), strict=True):
            ellipse = Ellipse(mean, 4 * std[0], 4 * std[1], fill=False, color="C3", lw=1)
            ax.add_patch(ellipse)
        ax.set_title(title, fontsize=8)
        ax.set_aspect("equal")
        ax.set(xlim=(grid[0], grid[-1]), ylim=(grid[0], grid[-1]))
    for ax in axes[:: max(1, columns)]:
        ax.set_ylabel(labels[1])
    for ax in axes[-columns:]:
        ax.set_xlabel(labels[0])
    return figure


def _span(values: Any) -> tuple[float, float]:
    """Limits that are not empty, for weights that never move and for no weights at all."""
    if not len(values):
        return -1.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = 1e-3 * max(abs(low), abs(high), 1e-6) if high - low < 1e-9 else 0.0
    return low - margin, high + margin


def _legend(ax: Axes, entries: int) -> None:
    if entries <= 12:
        ax.legend(frameon=False, fontsize=7)


def _panels(
    count: int, size: tuple[float, float], columns: int | None = None
) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = columns or count
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(-(-count // columns), columns, squeeze=False).ravel()
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, list(axes)
