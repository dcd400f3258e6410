"""Posteriors against a reference, in weights and in predictions (P1, tables 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from lightning_bnn.evaluation.comparison import FAILED, Comparison, collect
from lightning_bnn.evaluation.protocols import PROTOCOLS
from lightning_bnn.evaluation.reference import Options
from lightning_bnn.evaluation.report import (
    CLASSES,
    PREDICTIONS,
    Column,
    columns_of,
    distances_by_kernel,
    distances_table,
    is_regression,
    note_of,
    percent,
    predicted_and_calibrated,
    reference_text,
)
from lightning_bnn.plots import dots_figure
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.tables import Cell, Measured, Table

__all__ = ["COLUMNS", "DISTANCE_TITLES", "compare", "findings_of"]

POOLED = {"mmd": "MMD²", "ns": "NS-MMD²"}
"""Distances of all networks alike, as P1 measures them."""
COLUMNS = {**POOLED, **{name: column.title for name, column in CLASSES.items()}}
"""Of classification; `columns_of` has those of other predictions."""
_KERNELS = {
    "mmd": "MMD² median", "mmd_mean": "mean", "mmd_max": "max",
    "ns": "NS median", "ns_mean": "NS mean", "ns_max": "NS max",
}  # fmt: skip
_POOLED_NOTE = (
    "MMD² x 100 of all networks alike, as P1 measures it: of K modes of several networks each, "
    "about 1/K of one mode's MMD² is left even if they are drawn from the reference's law, and "
    "none of one network each. A maximum over kernels has its zero at the noise floor, which is "
    "over splits of the reference, scaled to so many networks against all of it."
)
DISTANCE_TITLES = {
    "law": "law MMD²", "ns_law": "NS law", "mixture": "mixture MMD²", "ns_mixture": "NS mixture",
}  # fmt: skip
_MODES = {"one": "One mode", "multi": "Multi mode"}


def compare(
    reference: str = "",
    posteriors: dict[str, str] | None = None,
    like: str | None = None,
    protocol: Literal["full", "p1"] = "full",
    samples: int = 100,
    ood: str | None = None,
    score: Literal["max_probability", "entropy", "mutual_information"] = "max_probability",
    seed: int = 0,
    device: str | None = None,
    reference_is: Literal["trained", "sampled"] | None = None,
    out: str = "studies/compare",
) -> None:
    """Compare any number of posteriors with a reference: in weights, and in predictions.

    A posterior is a run (a folder that `fit` has written), a checkpoint, a bank, or a folder of
    checkpoints; rows in brackets select some of its modes or networks: runs/bank[0:10]. The command
    measures three distances to the reference, with and without symmetries: of the law (networks
    over runs and draws), of a single mode, and of the mixture of all modes. Predictions have one
    row for a single mode (mean and standard deviation over modes) and one for all together
    (standard error by the jackknife over modes); a posterior of one mode has errors by a bootstrap
    over test examples. Rows that were computed before with the same settings are read, not
    computed.

    Args:
        reference: the networks that represent the posterior: a bank, an ensemble, a folder.
        posteriors: the posteriors by name, e.g. --posteriors.SWAG runs/swag --posteriors.MFVI
            runs/mfvi
        like: a configuration with network and data; by default that of the reference, or of the
            first posterior that has one.
        protocol: full removes all symmetries that were found; p1 does what P1's code does, and also
            prints its two tables.
        samples: number of networks drawn from every posterior.
        ood: name of the test set that is out of distribution; by default the first.
        score: score that detects out-of-distribution examples.
        seed: random seed of the draws.
        device: device to compute on; by default a GPU if there is one.
        reference_is: whether the reference was trained or sampled, as the tables say; by default
            what the run says.
        out: folder for the results.
    """
    if not reference:
        raise ValueError("`--reference` is missing: a bank, an ensemble or a folder of networks.")
    if not posteriors:
        raise ValueError("`--posteriors` is missing: for example --posteriors.SWAG runs/swag")
    folder = results_folder(out, "compare")
    options = Options(protocol, samples, ood, score, seed, device, reference_is)
    publish(findings_of(collect(reference, posteriors, folder, like, options)), folder)


# ------------------------------------------------------------ tables and figures
def findings_of(comparison: Comparison) -> Findings:
    """Tables of distances and of predictions, what was compared, and their picture."""
    settings = comparison.settings
    notes = [f"{name} failed: {reason}" for name, reason in comparison.failures().items()]
    notes += [
        f"{name} was trained with other settings of the data than it is judged by: it may have "
        "seen test examples, and is not calibrated on validation data."
        for name, origin in settings["posteriors"].items()
        if origin.get("other_data")
    ]
    tables = {
        "distances": distances_table(comparison),
        **_predictions(comparison),
        "kernels": distances_by_kernel(comparison),
        "compared": _compared(settings),
    }
    figures = _figures(comparison)
    title = "Posteriors against a reference"
    return Findings("compare", title, tables, figures, notes, settings)


def _predictions(comparison: Comparison) -> dict[str, Table]:
    """The quality of predictions, also once calibrated, or P1's two tables under its protocol."""
    settings = comparison.settings
    names = {name for row in comparison.rows for name in row.numbers}
    predicted, calibrated = predicted_and_calibrated(names)
    on_top = {"calibrated": _of_columns("Calibrated", comparison, calibrated)} if calibrated else {}
    if not PROTOCOLS[settings["protocol"]].pools:
        return {"predictions": _of_columns("Predictions", comparison, predicted), **on_top}
    pooled = f"{reference_text(settings)} {_POOLED_NOTE}"
    return {
        "table1": _of_columns("P1, table 1", comparison, predicted, POOLED, pooled),
        "table2": _table("P1, table 2: over kernels", comparison, _KERNELS, 2, _POOLED_NOTE),
        **on_top,
    }


def _of_columns(
    title: str,
    comparison: Comparison,
    columns: Mapping[str, Column],
    distances: Mapping[str, str] | None = None,
    about: str = "",
) -> Table:
    """A table of numbers of predictions, perhaps with distances before them."""
    digits = {column.title: column.digits for column in columns.values()}
    titles = {**(distances or {}), **{name: column.title for name, column in columns.items()}}
    digits |= dict.fromkeys((distances or {}).values(), 2)
    note = f"{about} {_note(note_of(columns, comparison.settings))}".strip()
    return _table(title, comparison, titles, digits, note)


def _table(
    title: str,
    comparison: Comparison,
    columns: Mapping[str, str],
    digits: int | Mapping[str, int],
    note: str,
) -> Table:
    """Rows of one mode, of all modes, of what has failed, and noise floors of pooled networks."""
    order = [*_MODES, FAILED]
    rows: list[list[Cell]] = [
        [_MODES.get(row.mode, ""), row.method, *(_cell(row.numbers, name) for name in columns)]
        for row in sorted(comparison.rows, key=lambda row: order.index(row.mode))
        if columns is not _KERNELS or "mmd" in row.numbers
    ]
    pooled = {row.pooled for row in comparison.rows} if "mmd" in columns else set()
    for count, floor in comparison.floors.items():
        if count not in pooled:
            continue
        cells = (_cell(floor, name) if name in floor else "" for name in columns)
        rows.append(["Noise floor", f"{count} networks", *cells])
    return Table(title, ["mode", "method", *columns.values()], rows, digits, note)


def _cell(numbers: Mapping[str, Measured], name: str) -> Measured:
    """A number as tables show it, or NaN where there is none."""
    found = numbers.get(name, Measured(math.nan))
    return PREDICTIONS[name].shown(found) if name in PREDICTIONS else percent(numbers, name)


def _note(of_predictions: str) -> str:
    return (
        f"{of_predictions} ±: over modes (One mode), by the jackknife over modes (Multi mode), "
        "over test examples (a posterior of one mode). /: not defined, or failed."
    )


def _compared(settings: Mapping[str, Any]) -> Table:
    """The origin of every number."""
    keys = ("kind", "made", "modes", "rows", "sha256", "path")
    rows: list[list[Cell]] = [
        [name, *(str(origin.get(key, "")) for key in keys)]
        for name, origin in settings["posteriors"].items()
    ]
    note = (
        f"Reference: {settings['reference_networks']} networks of {settings['reference']} "
        f"({settings['reference_sha256']}). Out of distribution: {settings['ood_set']}."
    )
    return Table("What was compared", ["method", *keys], rows, note=note)


# ------------------------------------------------------------ figures
def _figures(comparison: Comparison) -> dict[str, Any]:
    """The main numbers with their errors and noise."""
    names = {name for row in comparison.rows for name in row.numbers}
    every = {name: title for name, title in {**DISTANCE_TITLES, **POOLED}.items() if name in names}
    units = {title: "x 100, less is better" for title in every.values()}
    for name, column in columns_of(names).items():
        every[name] = column.title
        units[column.title] = _in_words(column.unit)
    first = [name for name in _first(names) if name in every]
    return {"metrics": _figure(comparison, {name: every[name] for name in first}, units)}


def _first(names: Collection[str]) -> list[str]:
    """The numbers of the first figure: four distances, and four of predictions."""
    distances = ["law", "ns_law", *(POOLED if "mmd" in names else ("mixture", "ns_mixture"))]
    gaussian = ["rmse", "nll", "crps", "cover90"]
    return [*distances, *(gaussian if is_regression(names) else ["acc", "nll", "ece", "aupr"])]


def _in_words(unit: str) -> str:
    """Arrows as words.

    >>> _in_words("% ↑"), _in_words("↓"), _in_words("nats x 100")
    ('%, more is better', 'less is better', 'nats x 100')
    """
    arrows = {"↑": "more is better", "↓": "less is better"}
    word = arrows.get(unit[-1:])
    return unit if word is None else ", ".join(part for part in (unit[:-1].strip(), word) if part)


def _figure(comparison: Comparison, titles: Mapping[str, str], units: Mapping[str, str]) -> Any:
    """Numbers with their errors, one panel for each of the titles."""
    rows = {(row.method, row.mode): row.numbers for row in comparison.rows}
    methods = list(dict.fromkeys(method for method, mode in rows if mode != FAILED))
    panels = {
        title: {
            text: [_cell(rows.get((method, mode), {}), name) for method in methods]
            for mode, text in _MODES.items()
        }
        for name, title in titles.items()
    }
    floors = _bands(comparison, titles) | _mixture_floors(rows, methods, titles)
    return dots_figure(panels, methods, floors, label=units)


def _bands(comparison: Comparison, titles: Mapping[str, str]) -> dict[str, Any]:
    """Noise around zero, two deviations of it: of the most networks, or of the fewest modes."""
    floors, modes = comparison.floors, {row.seeds for row in comparison.rows}
    bands = {}
    for name, key in (("law", "mmd"), ("ns_law", "ns"), ("mmd", "mmd"), ("ns", "ns")):
        counts = set(floors) & modes if name in DISTANCE_TITLES else set(floors)
        if name in titles and counts:
            floor = floors[min(counts) if name in DISTANCE_TITLES else max(counts)][key]
            bands[titles[name]] = (100 * floor.value, 200 * floor.error)
    return bands


def _mixture_floors(
    rows: Mapping[tuple[str, str], Mapping[str, Measured]],
    methods: Sequence[str],
    titles: Mapping[str, str],
) -> dict[str, Any]:
    """The mixture distance of single networks of the reference's own law, method by method."""
    found = {}
    for name, key in (("mixture", "floor"), ("ns_mixture", "ns_floor")):
        floors = [percent(rows.get((method, "multi"), {}), key) for method in methods]
        if name in titles:
            found[titles[name]] = [(floor.value, 2 * floor.error) for floor in floors]
    return found
