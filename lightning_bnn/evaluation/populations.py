"""Findings on populations: mass removed by rescaling, similarity of functions, large weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.findings import Findings
from lightning_bnn.plots import histograms_figure, scatter_figure
from lightning_bnn.posteriors import stream_predictions
from lightning_bnn.predictions import ClassPredictions, kind_of
from lightning_bnn.tables import Cell, Table, spread
from weightsym import MinMass, Symmetries, canonicalise, min_mass, rescale, unit_rows, writer
from weightsym import params as P
from weightsym.params import Params


@dataclass(frozen=True)
class Population:
    """Networks with their template, symmetries and data.

    Attributes:
        networks: a stack.
        problem: network and data.
        settings: where it is from.
        notes: on substitutes and origins, for readers.
        folder: where results about it go.
    """

    networks: Params
    problem: Problem
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folder: Path = Path()


# ------------------------------------------------------------ mass
def mass_findings(population: Population) -> Findings:
    """Make tables and figures of masses and their minima.

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
        _mass_figures(optimum, largest),
        population.notes,
        population.settings,
    )


def _mass_figures(optimum: MinMass, largest: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
    """Draw masses and their minima, the excess that rescaling saves, and the largest weights."""
    points = {"": {"a network": (optimum.mass.cpu(), optimum.minimum.cpu())}}
    excess = {"": {"": optimum.excess.cpu()}}
    extremes = {n: {"trained": a, "minimum": b} for n, (a, b) in largest.items()}
    return {
        "mass": scatter_figure(points, ("mass", "minimum mass"), diagonal=True),
        "excess": histograms_figure(excess, "excess mass (%)", 40),
        "largest": histograms_figure(extremes, "largest weight", 40),
    }


# ------------------------------------------------------------ functions
def collapse_findings(population: Population, ood: str | None = None) -> Findings:
    """Make tables and figures of the mutual information of pairs of networks.

    Args:
        population: networks and data.
        ood: name of the set that is out of distribution.
    """
    from scipy.stats import skew

    count = P.stack_size(population.networks)
    if count < 3:
        raise ValueError(f"`networks` must be at least 3 for pairs to differ, got {count}.")
    if kind_of(population.problem.likelihood) is not ClassPredictions:
        likelihood = type(population.problem.likelihood).__name__
        raise ValueError(f"`networks` must predict classes, but their likelihood is {likelihood}.")
    pairs = _pairs(population, ood)
    name = list(pairs)[-1]
    inner, outer = pairs.values()
    r, p = pearson(inner, outer, count)
    rows: list[dict[str, Cell]] = [
        {
            "nats": label,
            "mean ± sd": spread(values),
            "min": float(values.min()),
            "max": float(values.max()),
            "skewness": float(skew(values.double().numpy())),
        }
        for label, values in pairs.items()
    ]
    note = (
        f"Pearson correlation {r:.3f}, p = {p:.1e} (permutations of the networks, which pairs "
        f"share); {len(inner)} pairs."
    )
    panels = {label: {"pairs": values} for label, values in pairs.items()}
    points = {f"r = {r:.2f}": {"pairs": (inner, outer)}}
    return Findings(
        "collapse",
        f"Mutual information of pairs among {count} networks (P1, figures 3, 7, 8)",
        {
            "pairs": Table.of("Mutual information of pairs", rows, 4, note),
            "correlation": Table(
                "Are both correlated?", ["", "Pearson's r", "p"], [["all pairs", r, p]], 3
            ),
        },
        {
            "pairs": histograms_figure(panels, "mutual information (nats)"),
            "joint": scatter_figure(points, ("in distribution (nats)", f"{name} (nats)")),
        },
        population.notes,
        {**population.settings, "ood": name},
    )


def _pairs(population: Population, ood: str | None) -> dict[str, Tensor]:
    """Return the differences of all pairs of networks, in and out of distribution, by set."""
    ood_set = population.problem.ood_set(ood)
    if ood_set is None:
        raise ValueError("`ood`: the data have no out-of-distribution set.")
    count = P.stack_size(population.networks)
    upper = tuple(torch.triu_indices(count, count, 1))
    pairs = {}
    for name, batches in (("in distribution", population.problem.test_set()), ood_set):
        predictions = stream_predictions(
            population.problem.network, population.networks, tqdm(batches, desc=name), pairs=True
        )
        assert predictions.pairs is not None
        pairs[name] = predictions.pairs[upper]
    return pairs


def pearson(inner: Tensor, outer: Tensor, networks: int, repeats: int = 999) -> tuple[float, float]:
    """Return the correlation over pairs, and its p-value by the Mantel test.

    Pairs with a network in common are not independent, so that the usual p-value is far too small:
    here the networks of one matrix are permuted.

    Args:
        inner: one number for every pair, in the order of ``triu_indices``.
        outer: another one.
        networks: how many.
        repeats: permutations.
    """
    upper = torch.triu_indices(networks, networks, 1)
    matrix = outer.new_zeros(networks, networks)
    matrix[upper[0], upper[1]] = outer
    matrix = matrix + matrix.T
    generator = torch.Generator().manual_seed(0)

    def correlation(values: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([inner, values]).double())[0, 1])

    as_paired, count = correlation(outer), 0
    for _ in range(repeats):
        order = torch.randperm(networks, generator=generator)
        moved = matrix[order][:, order][upper[0], upper[1]]
        count += abs(correlation(moved)) >= abs(as_paired)
    return as_paired, (count + 1) / (repeats + 1)


# ------------------------------------------------------------ units
def forms_of(networks: Params, sym: Symmetries) -> dict[str, Params]:
    """Return networks as trained, and without symmetries."""
    return {"as trained": networks, "symmetries removed": canonicalise(networks, sym)}


def incoming_weights(stack: Params, sym: Symmetries) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor name and weights ``(networks, units, weights)`` of every group of units.

    Args:
        stack: networks.
        sym: their symmetries.
    """
    for group in sym.permutations:
        unit_writer = writer(sym, group)
        if unit_writer is not None and group.kind != "block":
            yield sym.axes[unit_writer.axis].tensor, unit_rows(stack, sym, unit_writer)


def units_figure(forms: Mapping[str, Params], sym: Symmetries) -> Any:
    """Draw the largest weight of a first, a middle and a last unit, one panel for each form.

    Args:
        forms: stacks by name.
        sym: their symmetries.
    """
    return histograms_figure(
        {f"largest weight,\n{form}": _of_units(stack, sym) for form, stack in forms.items()}
    )


def _of_units(stack: Params, sym: Symmetries) -> dict[str, Tensor]:
    """Return the largest weights of the first, a middle and the last unit of the first layer."""
    for _, rows in incoming_weights(stack, sym):
        largest, count = rows.amax(-1), rows.shape[1]
        units = sorted({0, math.ceil(count / 2) - 1, count - 1})
        return {f"unit {k + 1}": largest[:, k] for k in units}
    return {}
