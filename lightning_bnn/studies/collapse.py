"""P1, figures 3, 7 and 8: mutual information of all pairs of networks of an ensemble."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn.evaluation.predictions import has_classes
from lightning_bnn.plots import histograms_figure, scatter_figure
from lightning_bnn.posteriors import stream_predictions
from lightning_bnn.studies.findings import Findings, publish
from lightning_bnn.studies.runs import ENSEMBLES, Population, population
from lightning_bnn.tables import Cell, Table, spread
from weightsym import params as P

__all__ = ["collapse", "collapse_findings"]


def collapse(
    networks: str | None = None,
    data: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    ood: str | None = None,
    seed: int = 0,
    out: str = "studies/collapse",
) -> None:
    """Measure how different networks are, by the mutual information of all pairs.

    The information is measured in and out of distribution.

    Pairs that agree in distribution may or may not agree out of it: P1 finds a positive,
    significant and very low correlation. By default perceptrons on scikit-learn's digits are
    trained, as a substitute for OptuNets on MNIST (--scale paper); for ResNets use --networks.

    Args:
        networks: a run, a bank or a folder of checkpoints whose networks are used; by default
            networks are trained.
        data: a configuration with their network and data, if none lies beside them.
        scale: small, which runs in minutes, or paper, the paper's recipe.
        members: number of networks to train.
        epochs: epochs of training.
        ood: name of the test set that is out of distribution; by default the first.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    ensemble = population(
        "collapse", out, ENSEMBLES, scale, networks, data, seed, members=members, epochs=epochs
    )
    publish(collapse_findings(ensemble, ood), ensemble.folder)


def collapse_findings(population: Population, ood: str | None = None) -> Findings:
    """Table and figures.

    Args:
        population: networks and data.
        ood: name of the set that is out of distribution.
    """
    from scipy.stats import skew

    count = P.stack_size(population.networks)
    if count < 3:
        raise ValueError(f"`networks` must be at least 3 for pairs to differ, got {count}.")
    if not has_classes(population.problem.likelihood):
        likelihood = type(population.problem.likelihood).__name__
        raise ValueError(f"`networks` must predict classes, their likelihood is {likelihood}.")
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
    """The differences of all pairs of networks, in and out of distribution, by set."""
    ood_set = population.problem.ood_set(ood)
    if ood_set is None:
        raise ValueError("`ood`: the data have no set that is out of distribution.")
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
    """Correlation over pairs, and its p-value by the Mantel test.

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
