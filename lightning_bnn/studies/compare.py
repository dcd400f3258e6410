"""P1, tables 1 and 2: posteriors against a reference, in weights and in predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from lightning_bnn.comparison.collect import FAILED, Comparison, Options, collect
from lightning_bnn.comparison.columns import CLASSES, PREDICTIONS, columns_of, note_of
from lightning_bnn.comparison.protocols import PROTOCOLS
from lightning_bnn.comparison.tables import Cell, Measured, Table
from lightning_bnn.judging.judges import Score
from lightning_bnn.plots import dots_figure
from lightning_bnn.studies.findings import Findings, publish, results_folder

__all__ = ["COLUMNS", "compare", "findings_of"]

_WEIGHTS = {"mmd": "MMD²", "ns": "NS-MMD²"}
COLUMNS = {**_WEIGHTS, **{name: column.title for name, column in CLASSES.items()}}
"""Of classification; `columns_of` has those of other predictions."""
_KERNELS = {
    "mmd": "MMD² median", "mmd_mean": "mean", "mmd_max": "max",
    "ns": "NS median", "ns_mean": "NS mean", "ns_max": "NS max",
}  # fmt: skip
_OF_MAXIMA = (
    "MMD² x 100, with the median, the mean and the maximum over twenty kernels. Medians and means "
    "are around zero for networks of the reference's own law; a maximum is not: it is the largest "
    "of twenty noisy numbers, so that its zero is where the noise floor is."
)
_UNITS = {"mmd": "x 100 ↓", "ns": "x 100 ↓"}
"""Of the axes of figures, and where it is better."""
_DIGITS = dict.fromkeys(_WEIGHTS.values(), 2)
_MODES = {"one": "One mode", "multi": "Multi mode"}


def compare(
    reference: str = "",
    posteriors: dict[str, str] | None = None,
    like: str | None = None,
    protocol: Literal["full", "p1"] = "full",
    samples: int = 100,
    ood: str | None = None,
    score: Score = "max_probability",
    seed: int = 0,
    device: str | None = None,
    out: str = "studies/compare",
) -> None:
    """Compare any number of posteriors with a reference, and print tables 1 and 2 of P1.

    A posterior is a run (folder that `fit` has written), a checkpoint, a bank, or a folder of
    checkpoints; some of its modes or networks by rows in brackets, runs/bank[0:10]. It has one row
    for a single mode (mean and standard deviation over its modes) and one for all modes together
    (standard error by the jackknife over modes); a posterior of one mode has errors by a bootstrap
    over test examples. The last row is the noise floor: MMD² between random parts of the reference.
    Rows that were computed before with the same settings are read, not computed.

    Args:
        reference: networks that stand for the posterior: a bank, an ensemble, a folder.
        posteriors: by name, e.g. --posteriors.SWAG runs/swag --posteriors.MFVI runs/mfvi
        like: a configuration that says what network and data are; by default that of the reference
            or of the first posterior that has one.
        protocol: full removes all symmetries that were found; p1 does what P1's code does.
        samples: networks drawn from every posterior.
        ood: name of the test set that is out of distribution, by default the first.
        score: that detects it.
        seed: of all draws.
        device: where it is computed, by default a GPU if there is one.
        out: folder of the results.
    """
    if not reference:
        raise ValueError("`--reference` is missing: a bank, an ensemble or a folder of networks.")
    if not posteriors:
        raise ValueError("`--posteriors` is missing: for example --posteriors.SWAG runs/swag")
    folder = results_folder(out, "compare")
    options = Options(protocol, samples, ood, score, seed, device)
    publish(findings_of(collect(reference, posteriors, folder, like, options)), folder)


# ------------------------------------------------------------ tables and figures
def findings_of(comparison: Comparison) -> Findings:
    """Tables 1 and 2, what was compared, and their picture."""
    settings = comparison.settings
    failed = [
        f"{name} failed: {origin['failed']}"
        for name, origin in settings["posteriors"].items()
        if "failed" in origin
    ]
    names = {name for row in comparison.rows for name in row.numbers}
    predicted = columns_of(names)
    columns = {**_WEIGHTS, **{name: column.title for name, column in predicted.items()}}
    digits = {**_DIGITS, **{column.title: column.digits for column in predicted.values()}}
    note = _note(settings, note_of(names, settings))
    tables = {
        "table1": _table("Table 1", comparison, columns, digits, note),
        "table2": _table("Table 2: over kernels", comparison, _KERNELS, 2, _OF_MAXIMA),
        "compared": _compared(settings),
    }
    figures = {"metrics": _figure(comparison)}
    title = "Posteriors against a reference"
    return Findings("compare", title, tables, figures, failed, settings)


def _table(
    title: str,
    comparison: Comparison,
    columns: Mapping[str, str],
    digits: int | Mapping[str, int],
    note: str,
) -> Table:
    """Rows of one mode, of all modes, of what has failed, and noise floors."""
    order = [*_MODES, FAILED]
    rows: list[list[Cell]] = [
        [_MODES.get(row.mode, ""), row.method, *(_cell(row.numbers, name) for name in columns)]
        for row in sorted(comparison.rows, key=lambda row: order.index(row.mode))
        if columns is not _KERNELS or "mmd" in row.numbers
    ]
    for count, floor in comparison.floors.items():
        cells = (_cell(floor, name) if name in floor else "" for name in columns)
        rows.append(["Noise floor", f"{count} networks", *cells])
    return Table(title, ["mode", "method", *columns.values()], rows, digits, note)


def _cell(numbers: Mapping[str, Measured], name: str) -> Measured:
    """A number as tables show it; NaN where there is none."""
    value, error = numbers.get(name, Measured(math.nan))
    if name in PREDICTIONS:
        return PREDICTIONS[name].shown(Measured(value, error))
    return Measured(value * 100, error * 100)


def _note(settings: Mapping[str, Any], of_predictions: str) -> str:
    about = PROTOCOLS[settings["protocol"]].about
    return (
        f"MMD² x 100. NS: {about}. {of_predictions} ±: over "
        "modes (One mode), by the jackknife over modes (Multi mode), over test examples (a "
        "posterior of one mode), over splits of the reference, scaled to so many networks against "
        "all of it (noise floor). /: not defined, or failed."
    )


def _compared(settings: Mapping[str, Any]) -> Table:
    """Where every number is from."""
    keys = ("kind", "modes", "rows", "sha256", "path")
    rows: list[list[Cell]] = [
        [name, *(str(origin.get(key, "")) for key in keys)]
        for name, origin in settings["posteriors"].items()
    ]
    note = (
        f"Reference: {settings['reference_networks']} networks of {settings['reference']} "
        f"({settings['reference_sha256']}). Out of distribution: {settings['ood_set']}."
    )
    return Table("What was compared", ["method", *keys], rows, note=note)


def _figure(comparison: Comparison) -> Any:
    """All numbers with their errors, and the noise floor of the most networks."""
    rows = {(row.method, row.mode): row.numbers for row in comparison.rows}
    methods = list(dict.fromkeys(method for method, mode in rows if mode != FAILED))
    names = {name for numbers in rows.values() for name in numbers}
    titles = {name: f"{_WEIGHTS[name]}  ({_UNITS[name]})" for name in _WEIGHTS if name in names}
    titles |= {name: f"{c.title}  ({c.unit})" for name, c in columns_of(names).items()}
    panels = {
        title: {
            text: [_cell(rows.get((method, mode), {}), name) for method in methods]
            for mode, text in _MODES.items()
        }
        for name, title in titles.items()
    }
    floors = comparison.floors
    floor = floors[max(floors)] if floors else {}
    bands = {
        titles[name]: (100 * floor[name].value, 200 * floor[name].error)
        for name in ("mmd", "ns")
        if name in floor
    }
    return dots_figure(panels, methods, bands)
