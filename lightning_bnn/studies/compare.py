"""P1, tables 1 and 2: posteriors against a reference, in weights and in predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_bnn.comparison.collect import FAILED, Comparison, Options, collect
from lightning_bnn.comparison.protocols import PROTOCOLS
from lightning_bnn.comparison.reference import Row
from lightning_bnn.comparison.tables import Cell, Measured, Table
from lightning_bnn.plots import dots_figure
from lightning_bnn.studies.findings import Findings, publish, results_folder

__all__ = ["COLUMNS", "compare", "findings_of"]

Score = Literal["max_probability", "entropy", "mutual_information"]
COLUMNS = {
    "mmd": "MMD²", "ns": "NS-MMD²", "acc": "Acc", "ece": "ECE", "ace": "ACE", "brier": "Brier",
    "nll": "NLL", "aupr": "AUPR", "fpr95": "FPR95", "idmi": "IDMI", "oodmi": "OODMI",
}  # fmt: skip
_KERNELS = {
    "mmd": "MMD² median", "mmd_mean": "mean", "mmd_max": "max",
    "ns": "NS median", "ns_mean": "NS mean", "ns_max": "NS max",
}  # fmt: skip
_OF_MAXIMA = (
    "MMD² x 100, with the median, the mean and the maximum over twenty kernels. Medians and means "
    "are around zero for networks of the reference's own law; a maximum is not: it is the largest "
    "of twenty noisy numbers, so that its zero is where the noise floor is."
)
_DIGITS = {title: {"nll": 3, "mmd": 2, "ns": 2}.get(name, 1) for name, title in COLUMNS.items()}
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
    floors, settings = comparison.floors, comparison.settings
    failed = [
        f"{name} failed: {origin['failed']}"
        for name, origin in settings["posteriors"].items()
        if "failed" in origin
    ]
    return Findings(
        "compare",
        "Posteriors against a reference",
        {
            "table1": _table("Table 1", comparison, COLUMNS, _DIGITS, _note(settings)),
            "table2": _table("Table 2: over kernels", comparison, _KERNELS, 2, _OF_MAXIMA),
            "compared": _compared(settings),
        },
        {"metrics": _picture(comparison.rows, floors[max(floors)] if floors else {})},
        failed,
        settings,
    )


def _table(
    title: str,
    comparison: Comparison,
    columns: Mapping[str, str],
    digits: int | Mapping[str, int],
    note: str = "",
) -> Table:
    """Rows of one mode, of all modes, of what has failed, and noise floors."""
    order = [*_MODES, FAILED]
    rows: list[list[Cell]] = [
        [_MODES.get(row.mode, ""), row.method, *_numbers(row.numbers, columns)]
        for row in sorted(comparison.rows, key=lambda row: order.index(row.mode))
        if columns is COLUMNS or "mmd" in row.numbers
    ]
    for count, floor in comparison.floors.items():
        cells = zip(columns, _numbers(floor, columns), strict=True)
        rows.append(
            ["Noise floor", f"{count} networks", *(c if n in floor else "" for n, c in cells)]
        )
    return Table(title, ["mode", "method", *columns.values()], rows, digits, note)


def _note(settings: Mapping[str, Any]) -> str:
    about = PROTOCOLS[settings["protocol"]].about
    return (
        "MMD² and mutual information (nats) x 100, the others in per cent but NLL (nats). NS: "
        f"{about}. OOD examples are the positive class, found by {settings['score']}. ±: over "
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
    told = (
        f"Reference: {settings['reference_networks']} networks of {settings['reference']} "
        f"({settings['reference_sha256']}). Out of distribution: {settings['ood_set']}."
    )
    return Table("What was compared", ["method", *keys], rows, note=told)


def _numbers(numbers: Mapping[str, Measured], columns: Mapping[str, str]) -> list[Cell]:
    return [_scaled(name, numbers.get(name, Measured(math.nan))) for name in columns]


def _scaled(name: str, number: Measured) -> Measured:
    scale = 1 if name == "nll" else 100
    return Measured(number.value * scale, number.error * scale)


def _titled(name: str, title: str) -> str:
    """With its unit, and an arrow to where it is better."""
    unit = {
        "mmd": "x 100 ",
        "ns": "x 100 ",
        "nll": "nats ",
        "idmi": "nats x 100",
        "oodmi": "nats x 100",
    }
    arrow = "" if name in ("idmi", "oodmi") else "↑" if name in ("acc", "aupr") else "↓"
    return f"{title}  ({unit.get(name, '% ')}{arrow})"


def _picture(rows: Sequence[Row], floor: Mapping[str, Measured]) -> Any:
    methods = list(dict.fromkeys(row.method for row in rows if row.mode != FAILED))
    found = {(row.method, row.mode): row for row in rows}
    panels = {}
    for name, title in COLUMNS.items():
        if not any(name in row.numbers for row in rows):
            continue
        panels[_titled(name, title)] = {
            text: [
                _scaled(name, found[m, mode].numbers.get(name, Measured(math.nan)))
                if (m, mode) in found
                else Measured(math.nan)
                for m in methods
            ]
            for mode, text in _MODES.items()
        }
    bands = {
        _titled(name, COLUMNS[name]): (100 * floor[name].value, 200 * floor[name].error)
        for name in ("mmd", "ns")
        if name in floor
    }
    return dots_figure(panels, methods, bands)
