"""P1, figure 2: the L2 mass of trained networks, and what rescaling could save of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.comparison.tables import Cell, Table, spread
from lightning_bnn.params import Params
from lightning_bnn.plots import histograms_figure, scatter_figure
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.populations import ENSEMBLES, population
from lightning_bnn.symmetry import MinMass, Symmetries, min_mass, rescale

__all__ = ["mass", "mass_findings"]


def mass(
    networks: str | None = None,
    like: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    out: str = "studies/mass",
) -> None:
    """Compare the mass of networks with its minimum over all rescalings of their units.

    Weight decay pays for mass that changes nothing: a network far above its minimum has equivalents
    with a smaller loss. Figure 2 of P1 shows OptuNets on MNIST (--scale paper); by default
    perceptrons on the digits that come with scikit-learn are trained, as a substitute.

    Args:
        networks: a run, a bank or a folder of checkpoints, in place of training.
        like: its configuration, if it has none with it.
        scale: small or paper.
        members: networks to train.
        epochs: of training.
        out: folder of the results.
    """
    folder = results_folder(out, "mass")
    recipe = settings_of(ENSEMBLES, scale, members=members, epochs=epochs)
    found = population(folder, recipe, networks, like)
    findings = mass_findings(found.networks, found.symmetries(), found.settings, found.note)
    publish(findings, folder)


@dataclass(frozen=True)
class Masses:
    """Masses of a stack, and its largest weights, before and after rescaling."""

    optimum: MinMass
    largest: dict[str, tuple[Tensor, Tensor]]
    layers: dict[str, tuple[Tensor, Tensor]]


def mass_findings(
    networks: Params, sym: Symmetries, settings: Mapping[str, Any], note: str = ""
) -> Findings:
    """Table and figures.

    Args:
        networks: a stack.
        sym: its symmetries.
        settings: where it is from.
        note: what stands in for what.
    """
    found = _masses(networks, sym)
    optimum = found.optimum
    rows: list[list[Cell]] = [
        ["mass", spread(optimum.mass), *_range(optimum.mass)],
        ["minimum mass", spread(optimum.minimum), *_range(optimum.minimum)],
        ["excess %", spread(optimum.excess), *_range(optimum.excess)],
    ]
    layers: list[list[Cell]] = [
        [name, *(spread(t) for t in (*found.layers[name], *found.largest[name]))]
        for name in found.largest
    ]
    header = ["", "mean ± sd", "5 %", "median", "95 %"]
    per_layer = ["layer", "mass", "at the minimum", "largest weight", "at the minimum "]
    worst = max(float(optimum.gap.max()), torch.finfo(torch.float64).eps)
    certified = f"Certified to {worst:.0e} (relative duality gap of the worst network)."
    figure = scatter_figure(
        {"": {"networks": (optimum.mass.cpu(), optimum.minimum.cpu())}},
        ("mass", "minimum mass"),
        diagonal=True,
    )
    return Findings(
        "mass",
        f"Mass of {len(optimum.mass)} networks and its minimum over rescalings (P1, figure 2)",
        {
            "mass": Table("Masses", header, rows, 2, certified),
            "layers": Table("By layer, mean ± sd over networks", per_layer, layers, 2),
        },
        {
            "mass": figure,
            "excess": histograms_figure(
                {"excess mass": {"networks": optimum.excess.cpu()}}, "excess %", 40
            ),
            "largest": histograms_figure(
                {n: {"trained": a, "minimum": b} for n, (a, b) in found.largest.items()},
                "largest weight", 40,
            ),
        },
        [note] if note else [],
        settings,
    )  # fmt: skip


def _masses(networks: Params, sym: Symmetries) -> Masses:
    optimum = min_mass(networks, sym)
    smallest = rescale(networks, sym, optimum.scales)
    weights = [name for name in networks if name in sym.weights]
    pairs = {n: (networks[n].flatten(1).cpu(), smallest[n].flatten(1).cpu()) for n in weights}
    return Masses(
        optimum,
        {n: (a.abs().amax(1), b.abs().amax(1)) for n, (a, b) in pairs.items()},
        {n: (a.square().sum(1), b.square().sum(1)) for n, (a, b) in pairs.items()},
    )


def _range(values: Tensor) -> list[float]:
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    return values.double().cpu().quantile(levels).tolist()
