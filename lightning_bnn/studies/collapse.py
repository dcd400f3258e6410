"""P1, figures 3, 7 and 8: how much pairs of networks of an ensemble know of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn import params as P
from lightning_bnn.comparison.problem import Batches, Surroundings
from lightning_bnn.comparison.tables import Cell, Table, spread
from lightning_bnn.params import Params
from lightning_bnn.plots import histograms_figure, scatter_figure
from lightning_bnn.posteriors import stream_predictions
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.populations import ENSEMBLES, population

__all__ = ["collapse", "collapse_findings"]


def collapse(
    networks: str | None = None,
    like: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    ood: str | None = None,
    out: str = "studies/collapse",
) -> None:
    """Mutual information of all pairs of networks, in and out of distribution.

    Pairs that agree in distribution may or may not agree out of it: P1 finds a positive,
    significant and very low correlation. By default perceptrons on scikit-learn's digits are
    trained, as a substitute for OptuNets on MNIST (--scale paper); ResNets are given by --networks.

    Args:
        networks: a run, a bank or a folder of checkpoints, in place of training.
        like: its configuration, if it has none with it.
        scale: small or paper.
        members: networks to train.
        epochs: of training.
        ood: name of the test set that is out of distribution, by default the first.
        out: folder of the results.
    """
    folder = results_folder(out, "collapse")
    recipe = settings_of(ENSEMBLES, scale, members=members, epochs=epochs)
    found = population(folder, recipe, networks, like)
    findings = collapse_findings(found.networks, found.around, ood, found.settings, found.note)
    publish(findings, folder)


def collapse_findings(
    networks: Params,
    around: Surroundings,
    ood: str | None,
    settings: Mapping[str, Any],
    note: str = "",
) -> Findings:
    """Table and figures.

    Args:
        networks: a stack.
        around: network and data.
        ood: name of the set that is out of distribution.
        settings: where the networks are from.
        note: what stands in for what.
    """
    outside = around.outside(ood)
    if outside is None:
        raise ValueError("`ood`: the data have no set that is out of distribution.")
    count = P.stack_size(networks)
    if count < 3:
        raise ValueError(f"`networks` must be at least 3 for pairs to differ, got {count}.")
    name, batches = outside
    upper = tuple(torch.triu_indices(count, count, 1))
    inner, outer = (
        _pairs(networks, around, one, label)[upper]
        for one, label in ((around.inside(), "in distribution"), (batches, name))
    )
    r, p = pearson(inner, outer, count)
    rows: list[list[Cell]] = [
        ["in distribution", spread(inner), float(inner.min()), float(inner.max()), _skew(inner)],
        [name, spread(outer), float(outer.min()), float(outer.max()), _skew(outer)],
    ]
    about = (
        f"Pearson correlation {r:.3f}, p = {p:.1e} (permutations of the networks, which pairs "
        f"share); {len(inner)} pairs."
    )
    header = ["nats", "mean ± sd", "min", "max", "skewness"]
    return Findings(
        "collapse",
        f"Mutual information of pairs among {count} networks (P1, figures 3, 7, 8)",
        {"pairs": Table("Mutual information of pairs", header, rows, 4, about)},
        {
            "pairs": histograms_figure(
                {"in distribution": {"pairs": inner}, name: {"pairs": outer}},
                "mutual information (nats)",
            ),
            "joint": scatter_figure(
                {f"r = {r:.2f}": {"pairs": (inner, outer)}},
                ("in distribution (nats)", f"{name} (nats)"),
            ),
        },
        [note] if note else [],
        {**settings, "ood": name},
    )


def _pairs(networks: Params, around: Surroundings, batches: Batches, label: str) -> Tensor:
    seen = iter(tqdm(batches, desc=label))
    found = stream_predictions(around.template, networks, seen, pairs=True)
    assert found.pairs is not None
    return found.pairs


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
    x = _standard(inner)
    found = float((x * _standard(outer)).mean())
    count = 0
    for _ in range(repeats):
        order = torch.randperm(networks, generator=generator)
        moved = matrix[order][:, order][upper[0], upper[1]]
        count += abs(float((x * _standard(moved)).mean())) >= abs(found)
    return found, (count + 1) / (repeats + 1)


def _standard(values: Tensor) -> Tensor:
    centred = values.double() - values.double().mean()
    return centred / centred.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)


def _skew(values: Tensor) -> float:
    return float(_standard(values).pow(3).mean())
