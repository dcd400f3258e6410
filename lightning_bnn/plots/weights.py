"""Pictures of weights, and of how they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_bnn.plots.axes import axes_of, legend, panels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "chains_figure",
    "curves_figure",
    "distances_figure",
    "gaussians_figure",
    "trajectories_figure",
]


def curves_figure(steps: Sequence[int], values: Mapping[str, Tensor], label: str) -> Figure:
    """Several curves over training steps.

    Args:
        steps: the horizontal axis.
        values: one curve per name.
        label: of the vertical axis.

    >>> import torch
    >>> figure = curves_figure([1, 2, 3], {"tau": torch.tensor([1.0, 0.5, 0.9])}, "Kendall's tau")
    >>> figure.axes[0].get_ylabel(), [line.get_label() for line in figure.axes[0].lines]
    ("Kendall's tau", ['tau'])
    """
    figure, ax = axes_of(None, (6.0, 3.6))
    for name, curve in values.items():
        ax.plot(steps, curve.cpu().numpy(), linewidth=1, label=name)
    ax.set(xlabel="step", ylabel=label)
    legend(ax, len(values))
    return figure


def distances_figure(
    stages: Mapping[str, Mapping[str, float]], nulls: Sequence[Mapping[str, float]]
) -> Figure:
    """Distances of two networks layer by layer, after every step that brings them together.

    Args:
        stages: by step, the relative distance of every layer.
        nulls: the same after the last step, of networks that have nothing in common; their range
            is a grey bar.

    >>> stages = {"as given": {"1": 1.4, "3": 1.3}, "units in order": {"1": 0.6, "3": 0.5}}
    >>> figure = distances_figure(stages, [{"1": 0.9, "3": 0.8}, {"1": 1.0, "3": 0.9}])
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
    ('layer', 'relative distance')
    """
    layers = list(next(iter(stages.values())))
    figure, ax = axes_of(None, (min(16.0, max(5.0, 0.32 * len(layers))), 4.2))
    if nulls:
        ends = (_seen([f(null[n] for null in nulls) for n in layers]) for f in (min, max))
        for k, (low, high) in enumerate(zip(*ends, strict=True)):
            label = "independent" if k == 0 else None
            ax.bar(layers[k], max(high / low, 1.02) * low - low, 0.7, low, color="0.8", label=label)
    for k, (name, values) in enumerate(stages.items()):
        heights = _seen([values[n] for n in layers])
        ax.plot(layers, heights, "os^D"[k % 4], markersize=7 - k, fillstyle="none", label=name)
    ax.set(yscale="log", ylabel="relative distance", xlim=(-0.5, len(layers) - 0.5))
    if len(layers) > 6:
        ax.tick_params(axis="x", rotation=90, labelsize=7)
    ax.set_xlabel("layer")
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return figure


def _seen(values: Sequence[float]) -> list[float]:
    """Zeros where a logarithmic axis can show them."""
    return [max(value, 1e-9) for value in values]


def trajectories_figure(
    steps: Sequence[int], forms: Mapping[str, Tensor], labels: Sequence[str]
) -> Figure:
    """Some weights over time, one panel for each form (raw, scaled, sorted).

    Args:
        steps: the horizontal axis.
        forms: ``(times, weights)`` by name.
        labels: names of the weights.

    >>> import torch
    >>> forms = {"raw": torch.randn(10, 2), "sorted": torch.randn(10, 2)}
    >>> figure = trajectories_figure(range(10), forms, ["1.weight[0]", "1.weight[5]"])
    >>> [ax.get_title() for ax in figure.axes], len(figure.axes[0].lines)
    (['raw', 'sorted'], 2)
    """
    figure, axes = panels_of(len(forms), (3.2 * len(forms), 3.2))
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


def chains_figure(chains: Mapping[str, Tensor], rhat: Mapping[str, Tensor]) -> Figure:
    """For every space, the number with the largest R-hat along all chains, and all values of R-hat.

    Args:
        chains: ``(chains, times, numbers)`` by space.
        rhat: ``(numbers,)`` by space.

    >>> import torch
    >>> chains = {"function": torch.randn(4, 100, 3), "weights": torch.randn(4, 100, 8)}
    >>> figure = chains_figure(chains, {"function": torch.ones(3), "weights": torch.ones(8)})
    >>> [ax.get_title() for ax in figure.axes][:2]
    ['function: the worst of 3', 'weights: the worst of 8']
    """
    figure, axes = panels_of(2 * len(chains), (3.2 * len(chains), 4.6), len(chains))
    for ax, (space, values) in zip(axes, chains.items(), strict=False):
        worst = int(rhat[space].argmax())
        ax.plot(values[..., worst].T.numpy(), linewidth=0.8)
        ax.set_title(f"{space}: the worst of {values.shape[-1]}", fontsize=9)
        ax.set_xlabel("network of the chain")
    high = max(1.02, min(5.0, max(float(values.max()) for values in rhat.values())))
    for ax, space in zip(axes[len(chains) :], chains, strict=True):
        ax.hist(rhat[space].clamp(max=high).numpy(), bins=40, range=(0.99, high), color="0.6")
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

    >>> import torch
    >>> axis = torch.linspace(-2, 2, 20)
    >>> density = (-(axis[:, None] ** 2 + axis**2) / 2).exp()
    >>> panel = "one mode", axis, density, torch.zeros(1, 2), torch.ones(1, 2)
    >>> figure = gaussians_figure([panel], columns=1, labels=("first weight", "second weight"))
    >>> figure.axes[0].get_title(), figure.axes[0].get_xlabel()
    ('one mode', 'first weight')
    """
    from matplotlib.patches import Ellipse

    rows = -(-len(panels) // columns)
    figure, axes = panels_of(len(panels), (2.6 * columns, 2.7 * rows), columns)
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
