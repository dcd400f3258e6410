"""Distances of posteriors to a sampled one, in weights, functions and predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_bnn.callbacks.training_cost import COST_FILE
from lightning_bnn.evaluation.comparison import FAILED, Comparison, collect, scores_of_halves
from lightning_bnn.evaluation.reference_networks import Options, have_converged
from lightning_bnn.evaluation.report import (
    Column,
    columns_of,
    distance,
    is_regression,
    note_of,
    numbers_table,
    reference_text,
)
from lightning_bnn.evaluation.run_settings import other_posterior
from lightning_bnn.evaluation.stored_posteriors import Location
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import reference_names
from lightning_bnn.references.shipped import is_gold, reference_location
from lightning_bnn.tables import Cell, Measured, Table
from weightsym import Outcome
from weightsym.files import read_json

LAWS = {"f_law": "function law", "ns_law": "NS law", "law": "law"}
"""Distances of a method's law to the reference, by the space of the comparison."""
HALVES = "half of the reference"
"""Name of the row for values that are indistinguishable from the reference."""
_QUALITIES = ("acc", "rmse", "nll", "nll_moments", "crps", "ece", "cover90", "width90", "calib")
_NOTE = (
    "Laws: MMD² x 100 between the networks of a method, over runs and draws, and draws of the "
    "posterior: by what they predict, without symmetries (NS), and as they are; around zero for "
    "draws of the posterior itself. The other distances compare predictions of all modes with "
    f"those of the reference. {HALVES[0].upper()}{HALVES[1:]}: the second half of its chains, "
    "beside the first; what is not farther than that cannot be told from it. Gradients: of one "
    "network for all the data, of all networks together, and seconds of the processor: known of "
    "runs with the callback `TrainingCost`. ±: jackknife over modes and chains, over test examples "
    "for a single mode. /: not known, or one mode only, whose law is not known."
)
Numbers = Mapping[str, Measured]
UNKNOWN = Measured(math.nan)


_OF_A_CHAIN = 60
"""Number of networks per chain of a reference that are compared."""
_MAY_HAVE_SEEN = " It may have seen examples that it is judged by."


def fidelity(
    reference: str,
    posteriors: dict[str, str] | None = None,
    samples: int = 100,
    seed: int = 0,
    out: str = "studies/fidelity",
) -> Outcome:
    """Score posteriors against a sampled one, closest first.

    A posterior is a run (a folder written by `fit`), a checkpoint, a bank, or a folder of
    checkpoints, of the network and the data of the reference. `config.yaml` in its folder has both,
    and `lightning-bnn references digits` names this folder for the reference `digits`. A posterior
    must also have the reference's prior and likelihood: with others it approximates another
    posterior. Distances to a reference that is not gold, or whose chains have not converged, are
    shown, but not ranked.

    Args:
        reference: name of a reference (`lightning-bnn references` lists them), or a bank of chains.
        posteriors: the posteriors by name, e.g. --posteriors.SWAG runs/swag --posteriors.MFVI
            runs/mfvi
        samples: number of networks drawn from every mode.
        seed: random seed of all draws.
        out: folder for the results.
    """
    if not posteriors:
        raise ValueError("`--posteriors` is missing: for example --posteriors.SWAG runs/swag")
    gold = is_gold(reference) if reference in reference_names() else None
    options = options_for(samples, seed)
    location, folder = reference_location(reference), results_folder(out, "fidelity")
    with one_thread():
        comparison = scored(reference, posteriors, folder, options).require_one()
        halves = scores_of_halves(location, Path(comparison.settings["config"]), options)
    return publish(_findings(reference, gold, comparison, halves, posteriors), folder)


def options_for(samples: int, seed: int) -> Options:
    """Return options for comparisons with a sampled posterior.

    Args:
        samples: number of networks drawn from every mode.
        seed: random seed of all draws.
    """
    return Options(
        "full", samples, seed=seed, functions=True, reference_is="sampled",
        reference_samples=_OF_A_CHAIN,
    )  # fmt: skip


def scored(
    reference: str, posteriors: Mapping[str, str], folder: Path, options: Options
) -> Comparison:
    """Compare posteriors with a reference. Some of them may fail.

    Args:
        reference: its name, or a bank.
        posteriors: paths by name.
        folder: for rows that can be reused.
        options: of the comparison.
    """
    location = reference_location(reference)
    return collect(str(location.path), posteriors, folder, location.config(), options)


def numbers_by_method(comparison: Comparison) -> dict[str, Numbers]:
    """Return every number of all modes together, for methods that did not fail."""
    numbers: dict[str, dict[str, Measured]] = {}
    for row in comparison.rows:
        if row.mode != FAILED:
            numbers.setdefault(row.method, {}).update(row.numbers)
    return dict(numbers)


def cost_of(location: Location) -> dict[str, float]:
    """Read the cost of a run, if it used the callback `TrainingCost`."""
    file = location.beside(COST_FILE)
    return {} if file is None else read_json(file)


# ------------------------------------------------------------ results
def _findings(
    reference: str,
    gold: bool | None,
    comparison: Comparison,
    halves: Numbers,
    posteriors: Mapping[str, str],
) -> Findings:
    numbers, settings = numbers_by_method(comparison), comparison.settings
    unranked = _why_unranked(reference, gold, settings)
    if not unranked:  # the closest first, those without a law last
        laws = {name: row.get("f_law", UNKNOWN).value for name, row in numbers.items()}
        order = sorted(numbers, key=lambda name: (math.isnan(laws[name]), laws[name]))
        numbers = {name: numbers[name] for name in order}
    rows: dict[str, Numbers] = {}
    for name, row in numbers.items():
        cost = cost_of(Location.of(posteriors[name]))
        rows[name] = {**row, **{key: Measured(value) for key, value in cost.items()}}
    rows |= {HALVES: halves} if halves else {}
    about, names = (
        f"{reference_text(settings)} {_NOTE}",
        {name for row in rows.values() for name in row},
    )
    if is_regression(names):
        about += f" {note_of(names & set(_QUALITIES), settings)}"
    title = f"Fidelity to the posterior {reference}"
    tables = {
        "fidelity": scores_table(title, rows, _QUALITIES, about, {}),
    }
    notes = [f"{name} failed: {reason}" for name, reason in comparison.failures().items()]
    for name, text in posteriors.items():
        for setting, actual, wanted in other_posterior(Location.of(text), Path(settings["config"])):
            difference = f"{name} has `{setting}` {actual}, the reference {wanted}"
            warning = _MAY_HAVE_SEEN if setting == "data" else ""
            notes.append(f"{difference}: it belongs to another posterior.{warning}")
    notes += [f"{unranked}: distances to it are not ranked."] if unranked else []
    return Findings("fidelity", title, tables, {}, notes, settings)


def _why_unranked(reference: str, gold: bool | None, settings: Mapping[str, Any]) -> str:
    """Explain why distances to a reference are not ranked, or return an empty string.

    References of lightning-bnn-data have a verdict. A user's own is judged by the agreement of its
    chains.
    """
    rhat = settings["reference_rhat"]
    if gold is not None:
        return "" if gold else f"{reference} is not a gold reference"
    if rhat is None:
        return (
            f"It is unknown whether {reference} has draws of the posterior, since it does "
            "not consist of several chains of at least eight networks"
        )
    return "" if have_converged(rhat) else f"The chains of {reference} have not converged"


# ------------------------------------------------------------ tables and figures
def scores_table(
    title: str,
    numbers: Mapping[str, Numbers],
    qualities: Sequence[str],
    note: str,
    first: Mapping[str, Mapping[str, Cell]],
) -> Table:
    """Return cost, distances to the reference and quality of predictions, one row per posterior.

    Args:
        title: of the table.
        numbers: by posterior, including gradients and seconds if they are known.
        qualities: names of test numbers with a column.
        note: below the table.
        first: additional first columns, as cells by posterior.
    """
    names = {name for row in numbers.values() for name in row}
    columns = {"gradients": Column("gradients", "", 1, 0), "seconds": Column("seconds", "", 1, 0)}
    columns |= {law: distance(title) for law, title in LAWS.items()}
    columns |= columns_of(names, "reference")
    columns |= {name: column for name, column in columns_of(names).items() if name in qualities}
    rows = [
        (
            {
                "method" if first else "posterior": name,
                **{heading: cells[name] for heading, cells in first.items()},
            },
            row,
        )
        for name, row in numbers.items()
    ]
    return numbers_table(title, rows, columns, note)
