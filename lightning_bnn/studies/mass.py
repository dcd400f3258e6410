"""P1, figure 2: the L2 mass of trained networks, and what rescaling could save of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.plots import histograms_figure, scatter_figure
from lightning_bnn.studies.findings import Findings, publish
from lightning_bnn.studies.runs import ENSEMBLES, Population, population
from lightning_bnn.tables import Cell, Table, spread
from weightsym import MinMass, min_mass, rescale

__all__ = ["mass", "mass_findings"]


def mass(
    networks: str | None = None,
    data: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    out: str = "studies/mass",
) -> None:
    """Compare the mass of networks with its minimum over all rescalings of their units.

    Weight decay penalises mass that changes nothing: a network far above its minimum has
    equivalents with a smaller loss. Figure 2 of P1 shows OptuNets on MNIST (--scale paper). By
    default perceptrons on the digits that come with scikit-learn are trained, as a substitute.

    Args:
        networks: a run, a bank or a folder of checkpoints whose networks are used; by default
            networks are trained.
        data: a configuration with their network and data, if none lies beside them.
        scale: small, which runs in minutes, or paper, the paper's recipe.
        members: number of networks to train.
        epochs: epochs of training.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    ensemble = population(
        "mass", out, ENSEMBLES, scale, networks, data, seed, members=members, epochs=epochs
    )
    publish(mass_findings(ensemble), ensemble.folder)


def mass_findings(population: Population) -> Findings:
    """Table and figures.

    Args:
        population: networks and their problem.
    """
    networks, sym = population.networks, population.problem.symmetries()
    optimum = min_mass(networks, sym)
    smallest = rescale(networks, sym, optimum.scales)
    names = [name for name in networks if name in sym.weights]
    weights = {n: [stack[n].flatten(1).cpu() for stack in (networks, smallest)] for n in names}
    largest = {name: [w.abs().amax(1) for w in both] for name, both in weights.items()}
    layers: list[dict[str, Cell]] = [
        {
            "layer": name,
            "weights": trained.shape[1],
            "mass": spread(trained.square().sum(1)),
            "at the minimum": spread(least.square().sum(1)),
            "largest weight": spread(largest[name][0]),
            "largest at the minimum": spread(largest[name][1]),
        }
        for name, (trained, least) in weights.items()
    ]
    totals = {"mass": optimum.mass, "minimum mass": optimum.minimum, "excess %": optimum.excess}
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    rows: list[list[Cell]] = [
        [name, spread(values), *values.double().cpu().quantile(levels).tolist()]
        for name, values in totals.items()
    ]
    header = ["", "mean ± sd", "5 %", "median", "95 %"]
    worst = max(float(optimum.gap.max()), torch.finfo(torch.float64).eps)
    certified = f"Certified to {worst:.0e} (relative duality gap of the worst network)."
    return Findings(
        "mass",
        f"Mass of {len(optimum.mass)} networks and its minimum over rescalings (P1, figure 2)",
        {
            "mass": Table("Masses", header, rows, 2, certified),
            "layers": Table.of("By layer, mean ± sd over networks", layers, 2),
        },
        _figures(optimum, largest),
        population.notes,
        population.settings,
    )


def _figures(optimum: MinMass, largest: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
    """Masses and their minima, what rescaling would save, and the largest weights."""
    points = {"": {"a network": (optimum.mass.cpu(), optimum.minimum.cpu())}}
    excess = {"": {"": optimum.excess.cpu()}}
    extremes = {n: {"trained": a, "minimum": b} for n, (a, b) in largest.items()}
    return {
        "mass": scatter_figure(points, ("mass", "minimum mass"), diagonal=True),
        "excess": histograms_figure(excess, "excess mass (%)", 40),
        "largest": histograms_figure(extremes, "largest weight", 40),
    }
