"""P1, figure 9 and its corollary: equality of the marginals of all units of a layer."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from bnn_research.populations import Recipe, population
from lightning_bnn.evaluation.populations import (
    Population,
    forms_of,
    incoming_weights,
    units_figure,
)
from lightning_bnn.extras import needed
from lightning_bnn.findings import Findings, publish
from lightning_bnn.plots import Line, histograms_figure, lines_figure
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome, Symmetries
from weightsym.params import Params, ravel

RECIPES = {
    "small": Recipe("demo_reference", "digits (a substitute for UCI's table of energy)", 400),
    "paper": Recipe("energy_ensemble", "UCI energy", 1000),
}
_COMPONENTS = 20


def marginals(
    networks: str | None = None,
    data: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    out: str = "studies/marginals",
) -> Outcome:
    """Test the effect of symmetries on marginals, and plot them with and without symmetries.

    Since units can be exchanged, a weight has the same marginal in all units of a layer, and each
    unit is equally likely to hold the largest weight. Networks from different starts must pass
    these tests. Chains that have not left their mode fail them, and so, on purpose, do networks
    whose symmetries are removed. The share of variance of the leading principal components shows
    whether a plane could represent the posterior.

    Args:
        networks: a run, a bank or a folder of checkpoints; by default networks are trained.
        data: a configuration with their network and data, if there is none beside them.
        scale: small, which runs in minutes, or paper, the paper's recipe.
        members: number of networks to train.
        epochs: number of training epochs.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    ensemble = population(
        "marginals", out, RECIPES, scale, networks, data, seed, members=members, epochs=epochs
    )
    return publish(marginals_findings(ensemble), ensemble.folder)


def marginals_findings(population: Population) -> Findings:
    """Return tables and figures.

    Args:
        population: networks and their problem.
    """
    networks, sym = population.networks, population.problem.symmetries()
    forms = forms_of(networks, sym)
    tests = [row for form, stack in forms.items() for row in _tests(form, stack, sym)]
    shares = {form: explained_variance(stack) for form, stack in forms.items()}
    spectrum: list[list[Cell]] = [
        [form, *(100 * float(share[:k].sum()) for k in (1, 2, 5, 10, 20)), *clusters(forms[form])]
        for form, share in shares.items()
    ]
    note = (
        "KS: smallest of the p-values of the two-sample tests between the first unit and each of "
        "the others, for every incoming weight, times their number (Bonferroni). Chi-square: is "
        "each unit equally likely to hold the layer's largest weight? Between inputs: the same "
        "tests between the first weight of a unit and each of its others, which no symmetry makes "
        "alike where inputs cannot be exchanged."
    )
    header = ["", "layer", "units", "KS p", "p < 0.05 %", "largest weight: chi-square p"]
    header.append("between inputs: KS p")
    explained = "Variance that the leading principal components explain, %; mean-shift clusters"
    components = ["", "1", "2", "5", "10", "20", "clusters", "in the largest %"]
    ranks = torch.arange(1, _COMPONENTS + 1)
    curves = {
        form: Line(ranks[: len(share)], 100 * share.cumsum(0)[:_COMPONENTS])
        for form, share in shares.items()
    }
    weights = [name for name in networks if name in sym.weights]
    panels = {n: {form: stack[n].flatten() for form, stack in forms.items()} for n in weights}
    return Findings(
        "marginals",
        "Marginals of the weights (P1, figure 9 and corollary)",
        {
            "equal": Table("Do all units have the same marginals?", header, tests, 3, note),
            "pca": Table(explained, components, spectrum, 1),
        },
        {
            "marginals": histograms_figure(panels),
            "units": units_figure(forms, sym),
            "pca": lines_figure({"": curves}, ("principal components", "variance explained (%)")),
        },
        population.notes,
        population.settings,
    )


def _tests(form: str, stack: Params, sym: Symmetries) -> list[list[Cell]]:
    table: list[list[Cell]] = []
    for name, rows in incoming_weights(stack, sym):
        p = exchange_p_values(rows)
        often, largest_p = 100 * float((p < 0.05).double().mean()), argmax_p_value(rows)
        inputs = _smallest(exchange_p_values(rows.transpose(1, 2)))
        table.append([form, name, rows.shape[1], _smallest(p), often, largest_p, inputs])
    return table


def _smallest(p: Tensor) -> float:
    """Return the smallest p-value times the number of tests, or NaN without any."""
    return min(1.0, float(p.min()) * p.numel()) if p.numel() else math.nan


def exchange_p_values(rows: Tensor) -> Tensor:
    """Return p-values of KS tests between the first unit and the others, ``(units - 1, weights)``.

    Args:
        rows: ``(networks, units, weights)``.
    """
    from scipy.stats import ks_2samp

    first, *others = rows.double().unbind(1)
    return torch.tensor(
        [
            [
                ks_2samp(left.numpy(), two.numpy()).pvalue
                for left, two in zip(first.T, second.T, strict=True)
            ]
            for second in others
        ]
    )


def argmax_p_value(rows: Tensor) -> float:
    """Test by chi-square whether all units are equally likely to hold the largest weight.

    Args:
        rows: ``(networks, units, weights)``.
    """
    from scipy.stats import chisquare

    holders = rows.amax(-1).argmax(1)
    counts = torch.bincount(holders, minlength=rows.shape[1])
    return float(chisquare(counts.numpy()).pvalue)


def explained_variance(stack: Params) -> Tensor:
    """Return the share of the variance of every principal component, the largest first."""
    rows = ravel(stack, stacked=True)[0].double()
    values = torch.linalg.svdvals(rows - rows.mean(0)).square()
    return values / values.sum()


def clusters(stack: Params) -> tuple[int, float]:
    """Return the number of clusters that mean shift finds, and per cent in the largest."""
    with needed("Mean shift"):
        from sklearn.cluster import MeanShift, estimate_bandwidth

    rows = ravel(stack, stacked=True)[0].double().numpy()
    width = estimate_bandwidth(rows, quantile=0.3)
    labels = torch.from_numpy(MeanShift(bandwidth=width or None).fit(rows).labels_)
    counts = torch.bincount(labels.long())
    return len(counts), 100 * float(counts.max()) / len(labels)
