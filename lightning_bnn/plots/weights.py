"""Plots of weights, and of their changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_bnn.plots.axes import (
    CARD,
    axes_of,
    label_edges,
    label_ends,
    legend,
    panels_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def curves_figure(steps: Sequence[int], values: Mapping[str, Tensor], label: str) -> Figure:
    """Plot several curves over training steps, with their names at their ends.

    Many curves are coloured by a scale from the first to the last, and only the lowest and the
    highest have names.

    Args:
        steps: horizontal coordinates.
        values: one curve per name.
        label: of the vertical axis.

    >>> import torch
    >>> figure = curves_figure([1, 2, 3], {"tau": torch.tensor([1.0, 0.5, 0.9])}, "Kendall's tau")
    >>> figure.axes[0].get_ylabel(), [line.get_label() for line in figure.axes[0].lines]
    ("Kendall's tau", ['tau'])
    """
    from matplotlib import colormaps

    figure, ax = axes_of(CARD)
    many = len(values) > _NAMED
    ranks = sorted(values, key=lambda name: float(values[name].nanmean()))
    named = {*ranks[: _NAMED - 2], ranks[-1]} if many else set(ranks)
    for k, (name, curve) in enumerate(values.items()):
        colour = colormaps["viridis"](0.85 * k / (len(values) - 1)) if many else f"C{k}"
        ax.plot(
            steps, curve.cpu().numpy(), linewidth=1.2, color=colour, marker=_marker(steps),
            label=name if name in named else f"_{name}",
        )  # fmt: skip
    ax.set(xlabel="step (pale: last layers)" if many else "step", ylabel=label)
    label_ends(ax)
    return figure


_EQUAL = 1e-7
_FARTHEST = 2**0.5  # relative distance of weights that have nothing in common
"""Relative distance below which layers are the same."""
_NAMED = 6
"""Largest number of curves that all have names."""


def _marker(steps: Sequence[int]) -> str | None:
    """Mark a single point, which is not a line."""
    return "o" if len(steps) == 1 else None


def distances_figure(
    stages: Mapping[str, Mapping[str, float]], shares: Mapping[str, float]
) -> Figure:
    """Plot distances of two networks layer by layer, after every step, and their shared units.

    Layers that are equal, such as gains that the alignment holds at one, have no mark.

    Args:
        stages: relative distance of every layer, by step of the alignment.
        shares: fraction of units found in both networks, by group.

    >>> stages = {"as given": {"1": 1.4, "3": 1.3}, "units in order": {"1": 0.6, "3": 0.5}}
    >>> figure = distances_figure(stages, {"1.weight": 0.9})
    >>> [ax.get_ylabel() for ax in figure.axes]
    ['relative distance', 'units in common']
    """
    layers = list(next(iter(stages.values())))
    figure, (ax, below) = panels_of(2, 1, 3.2, min(16.0, max(5.0, 0.32 * len(layers))))
    for k, (name, values) in enumerate(stages.items()):
        heights = [values[n] if values[n] > _EQUAL else math.nan for n in layers]
        ax.plot(layers, heights, "os^D"[k % 4], markersize=7 - k, fillstyle="none", label=name)
    ax.set(yscale="log", ylabel="relative distance", xlim=(-0.5, len(layers) - 0.5), xlabel="layer")
    groups = [name.removesuffix(".weight") for name in shares]
    below.bar(groups, list(shares.values()), 0.7, color="0.6")
    below.set(ylim=(0, 1.03), ylabel="units in common", xlabel="group of units")
    for each, names in ((ax, layers), (below, groups)):
        if len(names) > 6:
            each.tick_params(axis="x", rotation=90, labelsize=7)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return figure


def family_figure(names: Sequence[str], apart: Tensor) -> Figure:
    """Draw the tree of networks that joins the closest first, families in colours.

    Args:
        names: of the networks.
        apart: relative distances of all pairs, infinite for those that are not related.

    >>> import torch
    >>> apart = torch.tensor([[0, 0.2, 9], [0.2, 0, 9], [9, 9, 0]])
    >>> figure = family_figure(["a", "b", "c"], apart)
    >>> sorted(text.get_text() for text in figure.axes[0].get_yticklabels())
    ['a', 'b', 'c']
    """
    from scipy.cluster.hierarchy import dendrogram, linkage
    from scipy.spatial.distance import squareform

    figure, ax = axes_of((7.0, min(14.0, 1.5 + 0.25 * len(names))))
    tree = linkage(squareform(apart.clamp(max=_FARTHEST).numpy()), "single")
    dendrogram(
        tree, labels=list(names), orientation="left", ax=ax, no_labels=len(names) > 60,
        color_threshold=0.999 * _FARTHEST, above_threshold_color="0.85",
    )  # fmt: skip
    ax.set(xlabel="relative distance after alignment", xlim=(_FARTHEST, 0))
    return figure


def layers_figure(
    values: Mapping[str, Sequence[float]], series: Sequence[str], label: str
) -> Figure:
    """Plot a few numbers of every layer, from the first layer at the top.

    Args:
        values: a number of every series, by layer.
        series: their names.
        label: of the numbers.

    >>> figure = layers_figure({"conv1": [2.0, 1.0], "fc": [1.0, 1.5]}, ["raw", "scaled"], "size")
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['conv1', 'fc']
    """
    figure, ax = axes_of((CARD[0], max(CARD[1], 0.9 + 0.2 * len(values))))
    for k, name in enumerate(series):
        numbers = [row[k] for row in values.values()]
        ax.plot(numbers, range(len(numbers)), "os"[k % 2], markersize=6 - k, mfc="none", label=name)
    ax.set_yticks(range(len(values)), list(values))
    ax.margins(y=0.08)
    ax.invert_yaxis()
    ax.set(xlabel=label, xlim=(0, 1.06 * max(map(max, values.values()))))
    legend([ax])
    return figure


def trajectories_figure(
    steps: Sequence[int],
    forms: Mapping[str, Tensor],
    labels: Sequence[str],
    axis: str = "weight",
) -> Figure:
    """Plot some weights over time, one panel for each form (raw, scaled, sorted).

    Args:
        steps: the horizontal axis.
        forms: ``(times, weights)`` by name.
        labels: names of the weights.
        axis: label of the vertical axis.

    >>> import torch
    >>> forms = {"raw": torch.randn(10, 2), "sorted": torch.randn(10, 2)}
    >>> figure = trajectories_figure(range(10), forms, ["1.weight[0]", "1.weight[5]"])
    >>> [ax.get_title() for ax in figure.axes], len(figure.axes[0].lines)
    (['raw', 'sorted'], 2)
    """
    figure, axes = panels_of(len(forms), len(forms), 3.2, 2.5)
    for ax, (form, values) in zip(axes, forms.items(), strict=True):
        for k, label in enumerate(labels):
            name = label if ax is axes[-1] else f"_{label}"
            ax.plot(steps, values[:, k].numpy(), linewidth=1.2, label=name, marker=_marker(steps))
        ax.set_title(form)
    label_edges(axes, ("step", axis))
    label_ends(axes[-1])
    return figure


def chains_figure(
    chains: Mapping[str, Tensor], rhat: Mapping[str, Tensor], every: bool = True
) -> Figure:
    """Plot the number with the largest R-hat in every space, and all values of R-hat.

    Args:
        chains: ``(chains, times, numbers)`` by space.
        rhat: ``(numbers,)`` by space.
        every: whether a last panel shows all values of R-hat.

    >>> import torch
    >>> chains = {"function": torch.randn(4, 100, 3), "weights": torch.randn(4, 100, 8)}
    >>> figure = chains_figure(chains, {"function": torch.ones(3), "weights": torch.ones(8)})
    >>> [ax.get_title() for ax in figure.axes][:2]
    ['function: the worst of 3', 'weights: the worst of 8']
    """
    figure, axes = panels_of(len(chains) + every)
    for ax, (space, values) in zip(axes, chains.items(), strict=False):
        worst = int(rhat[space].argmax())
        for k, chain in enumerate(values[..., worst]):
            ax.plot(chain.numpy(), linewidth=1, label=f"chain {k + 1}")
        ax.set(title=f"{space}: the worst of {values.shape[-1]}", ylabel=_VALUES.get(space, space))
        ax.set_xlabel("network of the chain")
    if every:
        _rhats(axes[-1], rhat)
    legend(axes)
    return figure


_VALUES = {"function": "prediction", "weights": "weight", "canonical": "canonical weight"}
"""Names of the compared numbers in each space."""


def _rhats(ax: Axes, rhat: Mapping[str, Tensor]) -> None:
    """Plot a histogram of all values for each space. The last bin includes larger ones."""
    high = max(1.02, min(5.0, max(float(values.max()) for values in rhat.values())))
    for k, (space, values) in enumerate(rhat.items()):
        ax.hist(
            values.clamp(max=high).numpy(), bins=40, range=(0.99, high), histtype="step",
            color=_SPACES[k % len(_SPACES)], linewidth=1.3 + 0.7 * (len(rhat) - 1 - k), label=space,
        )  # fmt: skip
    ax.axvline(1.01, color="tab:red", linewidth=1.2, linestyle="--", label="R-hat 1.01")
    ax.set(title="R-hat of all of them", xlabel="R-hat", ylabel="how many")


_SPACES = ("black", "tab:brown", "tab:pink")
"""Colours that no chain has, if there are few chains."""
