"""How close posteriors are to one that was sampled: in weights, in functions, in predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_bnn.callbacks.training_cost import COST_FILE
from lightning_bnn.comparison.collect import FAILED, Comparison, Options, collect
from lightning_bnn.comparison.columns import columns_of, to_reference
from lightning_bnn.comparison.distance_tables import percent
from lightning_bnn.comparison.places import Place
from lightning_bnn.comparison.tables import Cell, Measured, Table
from lightning_bnn.plots import dots_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import is_gold, reference_names, reference_place
from lightning_bnn.settings_files import read_settings
from lightning_bnn.studies.findings import Findings, publish, results_folder

__all__ = ["LAWS", "Numbers", "cost_of", "fidelity", "numbers_by_method", "scored"]

LAWS = {"f_law": "function law", "ns_law": "NS law", "law": "law"}
"""Distances of a method's law to the reference, by what networks are compared as."""
_OF_A_CHAIN = 60
"""Networks of each chain of a reference that others are compared with."""
_QUALITIES = ("acc", "rmse", "nll", "crps", "ece", "cover90")
_NOTE = (
    "Laws: MMD² x 100 between the networks of a method, over runs and draws, and draws of the "
    "posterior: by what they predict, without symmetries (NS), and as they are; around zero for "
    "draws of the posterior itself. The other distances compare mean predictions of all modes with "
    "those of the reference. Gradients: of one network for all the data, of all networks together. "
    "±: jackknife over modes and chains, over test examples for a single mode. /: not known, or "
    "one mode only, whose law is not known."
)

Numbers = Mapping[str, Measured]


def fidelity(
    reference: str,
    posteriors: dict[str, str] | None = None,
    samples: int = 100,
    seed: int = 0,
    device: str | None = None,
    out: str = "studies/fidelity",
) -> None:
    """Score posteriors against one that was sampled, closest first.

    A posterior is a run (folder that `fit` has written), a checkpoint, a bank, or a folder of
    checkpoints, of the network and the data of the reference, which `lightning-bnn presets
    reference_digits` prints for the reference `digits`. It must have the reference's prior, too:
    with another one it approximates another posterior. Distances to a reference that is no gold
    are shown, but rank nothing.

    Args:
        reference: name of a reference (`lightning-bnn references` lists them), or a bank of chains.
        posteriors: by name, e.g. --posteriors.SWAG runs/swag --posteriors.MFVI runs/mfvi
        samples: networks drawn from every mode.
        seed: of all draws.
        device: where it is computed, by default a GPU if there is one.
        out: folder of the results.
    """
    if not posteriors:
        raise ValueError("`--posteriors` is missing: for example --posteriors.SWAG runs/swag")
    folder = results_folder(out, "fidelity")
    with one_thread():
        options = Options("full", samples, seed=seed, device=device)
        comparison = scored(reference, posteriors, folder, options)
    publish(_findings(reference, comparison, posteriors), folder)


def scored(
    reference: str, posteriors: Mapping[str, str], folder: Path, options: Options
) -> Comparison:
    """All numbers of posteriors beside a reference.

    Args:
        reference: its name, or a bank.
        posteriors: places by name.
        folder: for rows that need not be computed again.
        options: how they are compared.
    """
    place = reference_place(reference)
    like = place.config()
    config = None if like is None else str(like)
    options = replace(
        options, functions=True, reference_is="sampled", reference_samples=_OF_A_CHAIN
    )
    return collect(str(place.path), posteriors, folder, config, options)


def numbers_by_method(comparison: Comparison) -> dict[str, Numbers]:
    """Every number of all modes together, of methods that did not fail."""
    found: dict[str, dict[str, Measured]] = {}
    for row in comparison.rows:
        if row.mode != FAILED:
            found.setdefault(row.method, {}).update(row.numbers)
    return dict(found)


def cost_of(place: Place) -> dict[str, float]:
    """What a run has cost, if the callback `TrainingCost` has watched it."""
    file = place.file()
    for folder in (file, *list(file.parents)[:3]):
        if (folder / COST_FILE).is_file():
            return dict(json.loads((folder / COST_FILE).read_text(encoding="utf-8")))
    return {}


def _findings(reference: str, comparison: Comparison, posteriors: Mapping[str, str]) -> Findings:
    numbers = numbers_by_method(comparison)
    gold = _verdict(reference)
    order = sorted(numbers, key=lambda name: _closeness(numbers[name])) if gold else list(numbers)
    costs = {name: cost_of(Place.of(posteriors[name])) for name in order}
    title = f"Fidelity to the posterior {reference}"
    table = _table(title, {name: numbers[name] for name in order}, costs)
    notes = [
        f"{name} failed: {origin['failed']}"
        for name, origin in comparison.settings["posteriors"].items()
        if "failed" in origin
    ]
    notes += _other_priors(reference, posteriors)
    if not gold:
        notes.append(f"{reference} is no gold reference: distances to it rank nothing.")
    laws = {title: {"": [percent(numbers[n], law) for n in order]} for law, title in LAWS.items()}
    figures = {"laws": dots_figure(laws, order, label="MMD² x 100")}
    return Findings("fidelity", title, {"fidelity": table}, figures, notes, comparison.settings)


def _other_priors(reference: str, posteriors: Mapping[str, str]) -> list[str]:
    """What approximates another posterior, because its prior is another one."""
    wanted = _prior_std(reference_place(reference))
    stated = {name: _prior_std(Place.of(text)) for name, text in posteriors.items()}
    return [
        f"{name} has `prior_std` {std}, the reference {wanted}: it is of another posterior."
        for name, std in stated.items()
        if None not in (std, wanted) and std != wanted
    ]


def _prior_std(place: Place) -> Any:
    """As a configuration states it; None where none does."""
    config = place.config()
    model = read_settings(config).get("model") if config is not None else None
    arguments = model.get("init_args") if isinstance(model, dict) else None
    return arguments.get("prior_std") if isinstance(arguments, dict) else None


def _verdict(reference: str) -> bool:
    """Whether a reference of this package is gold; one of the user's own counts as such."""
    if reference not in reference_names():
        return True
    return is_gold(reference)


def _closeness(numbers: Numbers) -> float:
    value = numbers.get("f_law", Measured(math.inf)).value
    return value if math.isfinite(value) else math.inf


def _table(
    title: str, numbers: Mapping[str, Numbers], costs: Mapping[str, Mapping[str, Any]]
) -> Table:
    names = {name for of in numbers.values() for name in of}
    columns = {**to_reference(names)}
    columns |= {name: column for name, column in columns_of(names).items() if name in _QUALITIES}
    rows: list[list[Cell]] = [
        [
            name,
            *(costs[name].get(key, math.nan) for key in ("gradients", "seconds")),
            *(percent(of, law) for law in LAWS),
            *(column.shown(of.get(key, Measured(math.nan))) for key, column in columns.items()),
        ]
        for name, of in numbers.items()
    ]
    digits = {"gradients": 0, "seconds": 0, **dict.fromkeys(LAWS.values(), 2)}
    digits |= {column.title: column.digits for column in columns.values()}
    header = ["posterior", "gradients", "seconds", *LAWS.values()]
    header += [column.title for column in columns.values()]
    return Table(title, header, rows, digits, _NOTE)
