"""P1, figures 1 and 5: the posterior of two hidden units, raw, scaled and sorted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from bnn_research.populations import Recipe, study_job
from bnn_research.scales import settings_of
from lightning_bnn.commands.runs import reseeded, run_jobs
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import hexbin_figure, scatter_figure
from lightning_bnn.posteriors import Empirical
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome, Symmetries, canonicalise
from weightsym.params import Params

_NORM, _MOST_LOSS = 3.0, 0.01
_LAST = "3.weight"
_TITLES = {
    "as trained": "as trained\n(each function many times)",
    "scaled": "scales removed\n(each function twice)",
    "scaled and ordered": "scales and order removed\n(each function once)",
}
"""Of the panels."""
_QUANTILES = {"median": 0.5, "5 %": 0.05, "95 %": 0.95}


_RECIPE = Recipe("two_gaussians", "two Gaussians", 10_000)
RECIPES = {"small": _RECIPE, "paper": _RECIPE}


def toy(
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    seed: int = 0,
    out: str = "studies/toy",
) -> Outcome:
    """Train perceptrons with two hidden units, and draw both weights of their last layer.

    As trained, the density has a copy of every solution for each order of the units and each way to
    scale them. If hidden units are scaled to norm 3, and then ordered by their outgoing weights,
    one copy of each remains. Networks with a loss above 0.01 in the last epoch are left out, as in
    the paper; the default is the paper's scale.

    Args:
        scale: small or paper.
        members: number of networks to train.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    folder = results_folder(out, "toy")
    recipe = settings_of(RECIPES, scale, members=members)
    overrides = {**recipe.overrides(), "model.init_args.max_loss": _MOST_LOSS}
    job = reseeded(study_job("runs", recipe.preset, overrides), seed)
    run = run_jobs([job], folder)["runs"]
    problem, posterior = run.problem(), run.module().posterior()
    assert isinstance(posterior, Empirical)
    forms = {
        name: stack[_LAST][:, 0]
        for name, stack in forms_of(posterior.networks, problem.symmetries()).items()
    }
    points, labels = next(iter(problem.training_set(1)))
    header = ["", "here", "note"]
    table = Table("Both weights of the last layer", header, _rows(forms, recipe.members), 3)
    settings = {"command": job.command, "norm": _NORM, "largest loss": _MOST_LOSS}
    title = "Two hidden units (P1, figure 1)"
    figures = _figures(forms, points, labels)
    return publish(
        Findings("toy", title, {"weights": table}, figures, [job.command], settings), folder
    )


def _figures(forms: Mapping[str, Tensor], points: Tensor, labels: Tensor) -> dict[str, Any]:
    """Plot the weights in all forms, and the data."""
    data = {"training data": {f"class {k}": tuple(points[labels == k].T) for k in (0, 1)}}
    titled = {_TITLES[name]: weights for name, weights in forms.items()}
    mirror = "mirror: exchanging the units takes a network to the other side"
    return {
        "weights": hexbin_figure(titled, ("weight 1", "weight 2"), True, 0.96, mirror),
        "data": scatter_figure(data, ("x", "y")),
    }


def forms_of(networks: Params, sym: Symmetries) -> dict[str, Params]:
    """Return networks as trained, with hidden units of norm 3, and ordered by the last layer.

    Args:
        networks: a stack.
        sym: its symmetries.
    """
    scaled = canonicalise(networks, sym, "unit-norm", None, target=_NORM)
    ordered = canonicalise(scaled, sym, None, "outgoing", descending=False)
    return {"as trained": networks, "scaled": scaled, "scaled and ordered": ordered}


def _rows(forms: Mapping[str, Tensor], trained: int) -> list[list[Cell]]:
    """Return the distribution of the weights, and tests of their equality."""
    from scipy.stats import ks_2samp

    raw = forms["as trained"]
    quadrants = {
        "++": (raw > 0).all(1), "--": (raw < 0).all(1),
        "+-": (raw[:, 0] > 0) & (raw[:, 1] < 0), "-+": (raw[:, 0] < 0) & (raw[:, 1] > 0),
    }  # fmt: skip
    rows: list[list[Cell]] = [
        ["networks", len(raw), f"of {trained} trained"],
        ["not converged, %", 100 * (1 - len(raw) / trained), f"loss above {_MOST_LOSS}"],
    ]
    quantiles = raw.norm(dim=1).quantile(torch.tensor(list(_QUANTILES.values()))).tolist()
    rows += [
        [f"norm of both weights, {name}", value, ""]
        for name, value in zip(_QUANTILES, quantiles, strict=True)
    ]
    rows += [
        [f"quadrant {n}", float(inside.double().mean()), ""] for n, inside in quadrants.items()
    ]
    for name, points in forms.items():
        p = float(ks_2samp(points[:, 0].numpy(), points[:, 1].numpy()).pvalue)
        verdict = "same distribution" if p > 0.01 else "different distributions"
        rows.append([f"KS of the marginals, {name}: p", p, verdict])
    return rows
