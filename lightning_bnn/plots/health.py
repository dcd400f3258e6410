"""A few small panels about the health of a posterior: loss, reliability, chains, deviations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_bnn.plots.axes import legend, panels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["health_figure"]

_BINS = 10


def health_figure(
    curves: Mapping[str, Sequence[float]],
    confidence: tuple[Tensor, Tensor] | None = None,
    spreads: Tensor | None = None,
    densities: Tensor | None = None,
) -> Figure:
    """Panels of the doctor's evidence, without those that have no data.

    Args:
        curves: values epoch by epoch, by name.
        confidence: of every held-out prediction ``(examples,)``, and whether it is right.
        spreads: errors of held-out predictions in their own standard deviations.
        densities: log-densities of data along chains, ``(chains, times)``.

    >>> confidence = torch.rand(50), torch.rand(50) < 0.5
    >>> figure = health_figure({"loss": [1.0, 0.6, 0.5]}, confidence)
    >>> [ax.get_ylabel() for ax in figure.axes]
    ['loss', 'share that is right']
    """
    panels: list[tuple[str, str]] = [("curve", name) for name, c in curves.items() if len(c) > 1]
    panels += [("confidence", "")] if confidence is not None else []
    panels += [("spreads", "")] if spreads is not None else []
    panels += [("densities", "")] if densities is not None else []
    figure, axes = panels_of(max(1, len(panels)))
    for ax, (panel, name) in zip(axes, panels, strict=False):
        if panel == "curve":
            _curve(ax, name, curves[name])
        elif panel == "confidence" and confidence is not None:
            _confidence(ax, *confidence)
        elif panel == "spreads" and spreads is not None:
            _spreads(ax, spreads)
        elif densities is not None:
            _densities(ax, densities)
    if not panels:
        axes[0].text(0.5, 0.5, "nothing to draw", ha="center", va="center")
        axes[0].set_axis_off()
    else:
        legend(axes)
    return figure


def _curve(ax: Axes, name: str, values: Sequence[float]) -> None:
    ax.plot(range(1, len(values) + 1), [float(v) for v in values], ".-", color="0.25", ms=3)
    ax.set(xlabel="epoch of training", ylabel=name.replace("_", " "))


def _confidence(ax: Axes, confidence: Tensor, right: Tensor) -> None:
    """The accuracy of predictions by their confidence."""
    which = (confidence * _BINS).long().clamp(0, _BINS - 1)
    counts = torch.bincount(which, minlength=_BINS)
    hits = torch.bincount(which, right.double(), _BINS)
    sums = torch.bincount(which, confidence.double(), _BINS)
    present = counts > 4
    ax.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--", label="as sure as right")
    x, y = (sums / counts)[present], (hits / counts)[present]
    error = (y * (1 - y) / counts[present]).sqrt()
    ax.errorbar(x.tolist(), y.tolist(), error.tolist(), fmt="o", markersize=4, color="0.25",
                label="held-out predictions")  # fmt: skip
    ax.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1.02), ylim=(0, 1.02))


def _spreads(ax: Axes, z: Tensor) -> None:
    """Errors in predicted standard deviations, beside a normal distribution."""
    x = torch.linspace(-4, 4, 100)
    ax.hist(z.flatten().clamp(-4, 4).tolist(), bins=24, range=(-4, 4), density=True, color="0.7",
            label="held-out errors")  # fmt: skip
    normal = torch.distributions.Normal(0.0, 1.0)
    ax.plot(
        x.tolist(), normal.log_prob(x).exp().tolist(), color="0.1", linewidth=1, label="N(0, 1)"
    )
    ax.set(xlabel="error / predicted deviation", ylabel="density")


def _densities(ax: Axes, values: Tensor) -> None:
    for k, row in enumerate(values):
        ax.plot(row.tolist(), linewidth=1, label=f"chain {k + 1}")
    ax.set(xlabel="network of the chain", ylabel="log-density of data")
