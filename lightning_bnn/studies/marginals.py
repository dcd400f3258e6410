"""P1, figure 9 and its corollary: are the marginals of all units of a layer the same?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.comparison.tables import Cell, Table
from lightning_bnn.params import Params, ravel
from lightning_bnn.plots import Line, histograms_figure, lines_figure
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.populations import Recipe, population
from lightning_bnn.symmetry import Symmetries, canonicalise
from lightning_bnn.symmetry.units import unit_rows, writer

__all__ = ["marginals", "marginals_findings", "units_figure"]

SCALES = {
    "small": Recipe("demo_reference", "digits (a substitute for UCI's table of energy)", 400),
    "paper": Recipe("energy_ensemble", "UCI energy", 1000),
}
_COMPONENTS = 20


def marginals(
    networks: str | None = None,
    like: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    out: str = "studies/marginals",
) -> None:
    """Test what symmetries say about marginals, and draw these with and without symmetries.

    Since units can be exchanged, a weight has the same marginal in all units of a layer, and each
    unit is equally likely to hold the largest weight. Networks from different starts must pass
    these tests; chains that have not left their mode fail them, and so do networks whose symmetries
    are removed, on purpose. The share of variance of the leading principal components tells whether
    a plane could show the posterior.

    Args:
        networks: a run, a bank or a folder of checkpoints, in place of training.
        like: its configuration, if it has none with it.
        scale: small or paper.
        members: networks to train.
        epochs: of training.
        out: folder of the results.
    """
    folder = results_folder(out, "marginals")
    recipe = settings_of(SCALES, scale, members=members, epochs=epochs)
    found = population(folder, recipe, networks, like)
    publish(
        marginals_findings(found.networks, found.symmetries(), found.settings, found.note), folder
    )


def marginals_findings(
    networks: Params, sym: Symmetries, settings: Mapping[str, Any], note: str = ""
) -> Findings:
    """Tables and figures.

    Args:
        networks: a stack.
        sym: its symmetries.
        settings: where it is from.
        note: what stands in for what.
    """
    forms = {
        "as trained": networks,
        "symmetries removed": canonicalise(networks, sym),
    }
    tests = [row for form, stack in forms.items() for row in _tests(form, stack, sym)]
    shares = {form: explained_variance(stack) for form, stack in forms.items()}
    spectrum: list[list[Cell]] = [
        [form, *(100 * float(share[:k].sum()) for k in (1, 2, 5, 10, 20)), *clusters(forms[form])]
        for form, share in shares.items()
    ]
    weights = [name for name in networks if name in sym.weights]
    about = (
        "KS: smallest of the p-values of the two-sample tests between the first unit and each of "
        "the others, for every incoming weight, times their number (Bonferroni). Chi-square: is "
        "each unit equally likely to hold the layer's largest weight?"
    )
    header = ["", "layer", "units", "KS p", "p < 0.05 %", "largest weight: chi-square p"]
    ranks = torch.arange(1, _COMPONENTS + 1)
    return Findings(
        "marginals",
        "Marginals of the weights (P1, figure 9 and corollary)",
        {
            "equal": Table("Do all units have the same marginals?", header, tests, 3, about),
            "pca": Table(
                "Variance that the leading principal components explain, %; mean-shift clusters",
                ["", "1", "2", "5", "10", "20", "clusters", "in the largest %"],
                spectrum,
                1,
            ),
        },
        {
            "marginals": histograms_figure(
                {n: {form: stack[n].flatten() for form, stack in forms.items()} for n in weights}
            ),
            "units": units_figure(forms, sym),
            "pca": lines_figure(
                {
                    "": {
                        form: Line(ranks[: len(share)], 100 * share.cumsum(0)[:_COMPONENTS])
                        for form, share in shares.items()
                    }
                },
                ("principal components", "variance explained (%)"),
            ),
        },
        [note] if note else [],
        settings,
    )


def _rows(stack: Params, sym: Symmetries, index: int) -> tuple[str, Tensor] | None:
    """Incoming weights of a group, ``(networks, units, weights)``, and the tensor's name."""
    group = sym.permutations[index]
    place = writer(sym, group)
    if place is None or group.kind == "block":
        return None
    return sym.axes[place.axis].tensor, unit_rows(stack, sym, place)


def _tests(form: str, stack: Params, sym: Symmetries) -> list[list[Cell]]:
    found: list[list[Cell]] = []
    for index in range(len(sym.permutations)):
        held = _rows(stack, sym, index)
        if held is not None:
            name, rows = held
            p = exchange_p_values(rows)
            found.append(
                [form, name, rows.shape[1], min(1.0, float(p.min()) * p.numel()),
                 100 * float((p < 0.05).double().mean()), argmax_p_value(rows)]
            )  # fmt: skip
    return found


def exchange_p_values(rows: Tensor) -> Tensor:
    """KS tests between the first unit and the others, ``(units - 1, weights)``.

    Args:
        rows: ``(networks, units, weights)``.
    """
    from scipy.stats import ks_2samp

    first, *others = rows.double().unbind(1)
    return torch.tensor(
        [
            [ks_2samp(first[:, j].numpy(), o[:, j].numpy()).pvalue for j in range(o.shape[1])]
            for o in others
        ]
    )


def argmax_p_value(rows: Tensor) -> float:
    """Chi-square test of which unit holds the largest weight.

    Args:
        rows: ``(networks, units, weights)``.
    """
    from scipy.stats import chisquare

    holders = rows.amax(-1).argmax(1)
    counts = torch.bincount(holders, minlength=rows.shape[1])
    return float(chisquare(counts.numpy()).pvalue)


def explained_variance(stack: Params) -> Tensor:
    """Share of the variance of every principal component, the largest first."""
    rows = ravel(stack, stacked=True)[0].double()
    values = torch.linalg.svdvals(rows - rows.mean(0)).square()
    return values / values.sum()


def clusters(stack: Params) -> tuple[int, float]:
    """Number of clusters that mean shift finds among the networks, and per cent in the largest."""
    from sklearn.cluster import MeanShift, estimate_bandwidth

    rows = ravel(stack, stacked=True)[0].double().numpy()
    width = estimate_bandwidth(rows, quantile=0.3)
    labels = torch.from_numpy(MeanShift(bandwidth=width or None).fit(rows).labels_)
    counts = torch.bincount(labels.long())
    return len(counts), 100 * float(counts.max()) / len(labels)


def units_figure(forms: Mapping[str, Params], sym: Symmetries) -> Any:
    """The largest weight of a first, a middle and a last unit, one panel for each form.

    Args:
        forms: stacks by name.
        sym: their symmetries.
    """
    return histograms_figure(
        {f"largest weight, {form}": _of_units(stack, sym) for form, stack in forms.items()}
    )


def _of_units(stack: Params, sym: Symmetries) -> dict[str, Tensor]:
    """Largest weights of the first, a middle and the last unit of the first layer."""
    for index in range(len(sym.permutations)):
        held = _rows(stack, sym, index)
        if held is not None:
            largest = held[1].amax(-1)
            units = sorted({0, math.ceil(largest.shape[1] / 2) - 1, largest.shape[1] - 1})
            return {f"unit {k + 1}": largest[:, k] for k in units}
    return {}
