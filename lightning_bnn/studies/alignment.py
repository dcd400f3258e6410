"""Many networks in one frame: loss and accuracy of their mean, by architecture and method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from lightning_bnn.arguments import check_count
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.studies.alignment_methods import MATRICES
from lightning_bnn.studies.alignment_networks import ARCHITECTURES
from lightning_bnn.studies.alignment_populations import DRAWS, OfSets, Population, Scale
from lightning_bnn.studies.findings import (
    Findings,
    measured_line,
    publish,
    results_folder,
    settings_of,
)
from lightning_bnn.tables import Cell, Measured, Table, interval, spread

__all__ = ["alignment"]

CURVES = ("as they are", "first, ascent", "first, best", "first, activations", "joint", *MATRICES)
"""Methods with a curve; the tables have all of them."""
SCALES = {
    "smallest": Scale(("MLP, 2 x 16",), (2,), 2, 0.05),
    "small": Scale(tuple(ARCHITECTURES), (2, 5, 10), 5),
    "paper": Scale(tuple(ARCHITECTURES), (2, 5, 10, 20, 50), 10),
}


def alignment(
    scale: Literal["smallest", "small", "paper"] = "small",
    only: str | None = None,
    seed: int = 0,
    seeds: int = 1,
    out: str = "studies/alignment",
) -> None:
    """Average N networks after bringing them into one frame, by method, architecture and N.

    Networks of seven kinds are trained from different starts. Disjoint sets of N are averaged as
    they are, matched to the first (by coordinate ascent, by the better of ascent and Frank-Wolfe,
    by activations, correlations and regressions; pairs also by gradients of the loss half way), and
    aligned jointly. The norms of transformers are folded, and transformers are
    also matched by permutations and matrices together. The tables show the loss of the mean network
    above that of the networks (for two of them the barrier at the midpoint), its accuracy, and the
    squared distance to the mean, also as a share of that without alignment. BatchNorm statistics
    are estimated anew. If networks were trained with a prior, single draws of the Gaussian that has
    the means and deviations of the weights are judged as well.

    Args:
        scale: smallest (a trial), small (up to 10 networks) or paper (up to 50).
        only: part of the names of the architectures to use.
        seed: random seed of the initial weights and of the order of the data.
        seeds: number of populations, from this seed and the next ones; tables then have 95 %
            intervals over them.
        out: folder for the results; networks that were trained before are taken from there.
    """
    check_count("seeds", seeds, least=1)
    folder = results_folder(out, "alignment")
    settings = settings_of(SCALES, scale)
    names = [n for n in settings.architectures if only is None or only in n]
    if not names:
        raise ValueError(
            f"`only` must be part of one of {', '.join(settings.architectures)}, got {only!r}."
        )
    with tqdm(total=len(names), desc="alignment", unit="kind") as bar:
        found = {}
        for name in names:
            bar.set_postfix_str(name)
            populations = (
                Population(ARCHITECTURES[name], name, settings, s, folder)
                for s in range(seed, seed + seeds)
            )
            found[name] = _summary([population.measured() for population in populations])
            bar.update()
    publish(_findings(found, settings, seed, seeds), folder)


Numbers = dict[str, dict[int, dict[str, Measured]]]
"""By method and by the number of networks: what was measured."""


def _summary(of_seeds: Sequence[OfSets]) -> Numbers:
    """Mean and interval over seeds; of one seed, mean and standard deviation over its sets."""

    def summed(rows: Sequence[Sequence[dict[str, float]]], key: str) -> Measured:
        sets = [torch.tensor([numbers[key] for numbers in row]).double() for row in rows]
        return (
            spread(sets[0]) if len(sets) == 1 else interval(torch.stack([s.mean() for s in sets]))
        )

    return {
        method: {
            size: {key: summed([of[method][size] for of in of_seeds], key) for key in rows[0]}
            for size, rows in sizes.items()
        }
        for method, sizes in of_seeds[0].items()
    }


# ------------------------------------------------------------ tables and figures
def _findings(found: Mapping[str, Numbers], settings: Scale, seed: int, seeds: int) -> Findings:
    titles = {
        "excess": "Loss of the mean above the mean loss of the networks (nats)",
        "accuracy": "Accuracy of the mean network (%)",
        "draws": f"Mean accuracy of {DRAWS} single draws of one Gaussian for all networks (%)",
        "distance": "Squared distance to the mean, as a share of that without alignment",
        "per_network": "Squared distance to the mean, per network",
        "seconds": "CPU seconds per set",
    }
    note = (
        f"Mean and half of the 95 % interval (Student's t) over {seeds} seeds, each the mean over "
        "disjoint sets of its networks"
        if seeds > 1
        else "Mean and standard deviation over disjoint sets of networks"
    )
    tables = {
        key: _table(title, key, found, settings, note)
        for key, title in titles.items()
        if _having(key, found)
    }
    return Findings(
        "alignment",
        "Averages of networks that are brought into one frame",
        tables,
        _figures(found),
        ["Data: scikit-learn's digits; GPT: characters of a module of Python's standard library."],
        {"scale": settings.__dict__, "seed": seed, "seeds": seeds},
    )


def _figures(found: Mapping[str, Numbers]) -> dict[str, Any]:
    """One panel for each architecture, one curve for each method."""
    excess, distance = ("networks", "excess loss (nats)"), ("networks", "share of the distance")
    return {
        "excess": lines_figure(_curves("excess", found), excess, log="xy"),
        "distance": lines_figure(_curves("distance", found), distance, log="x"),
    }


def _curves(key: str, found: Mapping[str, Numbers]) -> dict[str, dict[str, Line]]:
    """By architecture and method, over the number of networks."""
    return {
        name: {
            method: measured_line(list(numbers), [n[key] for n in numbers.values()])
            for method, numbers in methods.items()
            if method in CURVES
        }
        for name, methods in found.items()
    }


def _table(title: str, key: str, found: Mapping[str, Numbers], settings: Scale, note: str) -> Table:
    header = ["", "method", *(f"N = {size}" for size in settings.sizes)]
    rows: list[list[Cell]] = [
        [name, method, *(_cell(numbers.get(size), key) for size in settings.sizes)]
        for name, methods in _having(key, found).items()
        for method, numbers in methods.items()
    ]
    return Table(title, header, rows, 1 if key in ("accuracy", "draws", "per_network") else 3, note)


def _cell(number: Mapping[str, Measured] | None, key: str) -> Cell:
    """What was measured, if it was."""
    return math.nan if number is None else number[key]


def _having(key: str, found: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """The architectures of which something was measured."""
    return {
        name: methods
        for name, methods in found.items()
        if all(key in number for numbers in methods.values() for number in numbers.values())
    }
