"""Tables, figures and cautions of a comparison with a reference, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_bnn.evaluation.comparison import FAILED, Comparison, collect
from lightning_bnn.evaluation.evaluators import Score
from lightning_bnn.evaluation.protocols import PROTOCOLS
from lightning_bnn.evaluation.reference_networks import Made, Options
from lightning_bnn.evaluation.report import (
    CLASSES,
    Column,
    advice_table,
    cautions_of,
    columns_of,
    distance,
    distances_table,
    is_regression,
    note_of,
    numbers_table,
    percent,
    reference_text,
)
from lightning_bnn.findings import Findings, results_folder, write_findings
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.plots import dots_figure
from lightning_bnn.tables import Cell, Table

POOLED = {"mmd": distance("MMD²"), "ns": distance("NS-MMD²")}
"""Distances of all networks alike, as P1 measures them."""
_KERNELS = {
    "mmd": distance("MMD² median"), "mmd_mean": distance("mean"), "mmd_max": distance("max"),
    "ns": distance("NS median"), "ns_mean": distance("NS mean"), "ns_max": distance("NS max"),
}  # fmt: skip
COLUMNS = {
    **POOLED, "law": distance("law MMD²"), "ns_law": distance("NS law"),
    "mixture": distance("mixture MMD²"), "ns_mixture": distance("NS mixture"), **CLASSES,
}  # fmt: skip
"""Of classification, distances before predictions."""
_POOLED_NOTE = (
    "MMD² x 100 of pooled networks, as in P1: K modes of several networks each retain about 1/K "
    "of one mode's MMD² even if they are drawn from the reference's law, and modes of one "
    "network none. A maximum over kernels has its zero at the noise floor, from splits of the "
    "reference, scaled to the numbers of networks."
)
_MODES = {"one": "One mode", "multi": "Multi mode"}


def compare(
    reference: Any,
    posteriors: Mapping[str, Any],
    data: Any = None,
    *,
    network: nn.Module | None = None,
    likelihood: nn.Module | None = None,
    protocol: str = "full",
    samples: int = 100,
    ood: str | None = None,
    score: Score = "max_probability",
    seed: int = 0,
    reference_is: Made | None = None,
    out: str | None = None,
) -> Findings:
    """Compare any number of posteriors with a reference: in weights, and in predictions.

    Args:
        reference: the networks that represent the posterior: whatever `Posterior.of` takes, a run,
            or a checkpoint.
        posteriors: the same by name. ``Posterior.of(networks, draws=True)`` says that networks are
            draws of one posterior, and not found independently of each other.
        data: test data: a datamodule, a loader of inputs and targets, or both as two tensors, or a
            dict of such sets by name, of which all but the first are out of distribution; or a
            configuration with network and data, by default that of the first run.
        network: a module of the kind that is compared, by default the first that is given.
        likelihood: what outputs say about targets, by default that of the first module that has
            one, else `Categorical`.
        protocol: ``"full"`` removes all symmetries that were found; ``"p1"`` does what the code of
            Laurent et al. (2024) does.
        samples: networks drawn from every posterior.
        ood: name of the test set that is out of distribution; by default the first.
        score: that detects out-of-distribution examples.
        seed: of the draws.
        reference_is: whether the reference was trained or sampled, as the tables say.
        out: a folder for tables and figures, and for rows that need not be computed again.

    Returns:
        Tables, figures and cautions, which print, show in a notebook, and have ``to_pandas()``.
    """
    check_choice("protocol", protocol, tuple(PROTOCOLS))
    folder = None if out is None else results_folder(out, "compare")
    options = Options(protocol, samples, ood, score, seed, reference_is)
    comparison = collect(reference, posteriors, folder, data, options, network, likelihood)
    findings = findings_of(comparison.require_one())
    if folder is not None:
        write_findings(findings, folder)
    return findings


# ------------------------------------------------------------ tables and figures
def findings_of(comparison: Comparison) -> Findings:
    """Return tables of distances and predictions, the settings, and a figure."""
    settings = comparison.settings
    advice = advice_table(comparison)
    tables = {
        **({"advice": advice} if advice.rows else {}),
        "distances": distances_table(comparison),
        **_predictions(comparison),
        "compared": _compared(settings),
    }
    figures = {"metrics": metrics_figure(comparison)}
    title = "Posteriors against a reference"
    return Findings("compare", title, tables, figures, cautions_of(comparison), settings)


def _predictions(comparison: Comparison) -> dict[str, Table]:
    """Return tables of predictions, also after calibration, or P1's two tables in its protocol."""
    settings = comparison.settings
    names = {name for row in comparison.rows for name in row.numbers}
    predicted, calibrated = (columns_of(names, group) for group in ("predicted", "calibrated"))
    about = _note(note_of(predicted, settings))
    tables = {}
    if PROTOCOLS[settings["protocol"]].pools:
        pooled = f"{reference_text(settings)} {_POOLED_NOTE} {about}"
        tables["table1"] = _table("P1, table 1", comparison, {**POOLED, **predicted}, pooled)
        title = "P1, table 2: over kernels"
        tables["table2"] = _table(title, comparison, _KERNELS, _POOLED_NOTE)
    else:
        tables["predictions"] = _table("Predictions", comparison, predicted, about)
    if calibrated:
        about = _note(note_of(calibrated, settings))
        tables["calibrated"] = _table("Calibrated", comparison, calibrated, about)
    return tables


def _table(title: str, comparison: Comparison, columns: Mapping[str, Column], note: str) -> Table:
    """Return a table with rows for single modes, all modes, failures and noise floors."""
    order = [*_MODES, FAILED]
    rows: list[tuple[dict[str, Cell], Mapping[str, Any]]] = [
        ({"mode": _MODES.get(row.mode, ""), "method": row.method}, row.numbers)
        for row in sorted(comparison.rows, key=lambda row: order.index(row.mode))
        if columns is not _KERNELS or "mmd" in row.numbers
    ]
    pooled = {row.pooled for row in comparison.rows} if "mmd" in columns else set()
    for count, floor in comparison.floors.items():
        if count in pooled:
            cells = {**dict.fromkeys(columns, ""), **floor}
            rows.append(({"mode": "Noise floor", "method": f"{count} networks"}, cells))
    return numbers_table(title, rows, columns, note)


def _note(of_predictions: str) -> str:
    return (
        f"{of_predictions} ±: over modes (One mode), by the jackknife over modes (Multi mode), "
        "over test examples (a posterior of one mode). /: not defined, or failed."
    )


def _compared(settings: Mapping[str, Any]) -> Table:
    """Return a table of the origin of every number."""
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
def metrics_figure(comparison: Comparison, chosen: Sequence[str] = ()) -> Any:
    """Draw distances and metrics of predictions with their errors, and the noise.

    Args:
        comparison: any.
        chosen: names of numbers; by default four distances and four numbers of predictions.
    """
    rows = {(row.method, row.mode): row.numbers for row in comparison.rows}
    names = {name for numbers in rows.values() for name in numbers}
    gaussian = ("rmse", "nll", "crps", "cover90")
    chosen = chosen or (
        *("law", "ns_law", *(POOLED if "mmd" in names else ("mixture", "ns_mixture"))),
        *(gaussian if is_regression(names) else ("acc", "nll", "ece", "aupr")),
    )
    columns = {k: c for k, c in {**COLUMNS, **columns_of(names)}.items() if k in names}
    columns = {name: columns[name] for name in chosen if name in columns}
    methods = list(dict.fromkeys(method for method, mode in rows if mode != FAILED))
    panels = {
        column.title: {
            text: [column.cell(rows.get((method, mode), {}), name) for method in methods]
            for mode, text in _MODES.items()
        }
        for name, column in columns.items()
    }
    floors = _bands(comparison)
    for name, key in (("mixture", "floor"), ("ns_mixture", "ns_floor")):
        of_methods = [percent(rows.get((method, "multi"), {}), key) for method in methods]
        floors[name] = [(floor.value, 2 * floor.error) for floor in of_methods]
    return dots_figure(
        panels,
        methods,
        {columns[name].title: band for name, band in floors.items() if name in columns},
        label={column.title: _in_words(column.unit) for column in columns.values()},
    )


def _bands(comparison: Comparison) -> dict[str, Any]:
    """Return noise bands of two deviations around zero, for the most networks or fewest modes."""
    floors, modes = comparison.floors, {row.seeds for row in comparison.rows}
    bands = {}
    for name, key in (("law", "mmd"), ("ns_law", "ns"), ("mmd", "mmd"), ("ns", "ns")):
        counts = set(floors) & modes if name.endswith("law") else set(floors)
        if counts:
            floor = floors[min(counts) if name.endswith("law") else max(counts)][key]
            bands[name] = (100 * floor.value, 200 * floor.error)
    return bands


def _in_words(unit: str) -> str:
    """Replace arrows by words.

    >>> _in_words("% ↑"), _in_words("↓"), _in_words("nats x 100")
    ('%, more is better', 'less is better', 'nats x 100')
    """
    arrows = {"↑": "more is better", "↓": "less is better"}
    words = [unit.rstrip("↑↓ "), arrows.get(unit[-1:], "")]
    return ", ".join(word for word in words if word)
