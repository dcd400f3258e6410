"""How close posteriors are to one that was sampled: in weights, in functions, in predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_bnn.callbacks.training_cost import COST_FILE
from lightning_bnn.evaluation.comparison import (
    FAILED,
    Comparison,
    attempt,
    one_succeeded,
    scores_of_halves,
)
from lightning_bnn.evaluation.reference import Options, have_converged
from lightning_bnn.evaluation.run_settings import other_posterior
from lightning_bnn.evaluation.stored_posteriors import Location
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import is_gold, reference_location, reference_names
from lightning_bnn.studies.fidelity_tables import (
    Numbers,
    by_function_law,
    laws_figure,
    mixtures_table,
    scores_table,
)
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.tables import Measured

__all__ = ["cost_of", "fidelity", "numbers_by_method", "options_for", "scored"]

_OF_A_CHAIN = 60
"""Networks of each chain of a reference that others are compared with."""
_MAY_HAVE_SEEN = " It may have seen examples that it is judged by."


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
    reference_digits` prints for the reference `digits`. It must have the reference's prior and
    likelihood, too: with others it approximates another posterior. Distances to a reference that is
    no gold, or whose chains have not converged, are shown, but rank nothing.

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
    gold = is_gold(reference) if reference in reference_names() else None
    options = options_for(samples, seed, device)
    place, folder = reference_location(reference), results_folder(out, "fidelity")
    with one_thread():
        comparison = one_succeeded(scored(reference, posteriors, folder, options))
        halves = scores_of_halves(place, Path(comparison.settings["config"]), options)
    publish(_findings(reference, gold, comparison, halves, posteriors), folder)


def options_for(samples: int, seed: int, device: str | None = None) -> Options:
    """How posteriors are compared with one that was sampled.

    Args:
        samples: networks drawn from every mode.
        seed: of all draws.
        device: where it is computed, by default a GPU if there is one.
    """
    return Options(
        "full", samples, seed=seed, device=device, functions=True, reference_is="sampled",
        reference_samples=_OF_A_CHAIN,
    )  # fmt: skip


def scored(
    reference: str, posteriors: Mapping[str, str], folder: Path, options: Options
) -> Comparison:
    """All numbers of posteriors beside a reference; some of them may have failed.

    Args:
        reference: its name, or a bank.
        posteriors: places by name.
        folder: for rows that need not be computed again.
        options: how they are compared.
    """
    place = reference_location(reference)
    like = place.config()
    config = None if like is None else str(like)
    return attempt(str(place.path), posteriors, folder, config, options)


def numbers_by_method(comparison: Comparison) -> dict[str, Numbers]:
    """Every number of all modes together, of methods that did not fail."""
    found: dict[str, dict[str, Measured]] = {}
    for row in comparison.rows:
        if row.mode != FAILED:
            found.setdefault(row.method, {}).update(row.numbers)
    return dict(found)


def cost_of(place: Location) -> dict[str, float]:
    """What a run has cost, if the callback `TrainingCost` has watched it."""
    file = place.file()
    for folder in (file, *list(file.parents)[:3]):
        if (folder / COST_FILE).is_file():
            return dict(json.loads((folder / COST_FILE).read_text(encoding="utf-8")))
    return {}


# ------------------------------------------------------------ what is found, and what to know
def _findings(
    reference: str,
    gold: bool | None,
    comparison: Comparison,
    halves: Numbers,
    posteriors: Mapping[str, str],
) -> Findings:
    numbers, settings = numbers_by_method(comparison), comparison.settings
    unranked = _why_unranked(reference, gold, settings)
    order = list(numbers) if unranked else by_function_law(numbers)
    ordered = {name: numbers[name] for name in order}
    costs = {name: cost_of(Location.of(posteriors[name])) for name in order}
    title = f"Fidelity to the posterior {reference}"
    tables = {
        "fidelity": scores_table(title, ordered, costs, halves, settings),
        "mixtures": mixtures_table(ordered, comparison.rows, halves),
    }
    notes = [f"{name} failed: {reason}" for name, reason in comparison.failures().items()]
    notes += _other_posteriors(Path(settings["config"]), posteriors)
    notes += [f"{unranked}: distances to it rank nothing."] if unranked else []
    figures = {"laws": laws_figure(ordered, halves)}
    return Findings("fidelity", title, tables, figures, notes, settings)


def _why_unranked(reference: str, gold: bool | None, settings: Mapping[str, Any]) -> str:
    """Why distances to a reference rank nothing; nothing if they do.

    Those of the package have a verdict, one of the user's own has chains that agree or do not.
    """
    rhat = settings["reference_rhat"]
    if gold is not None:
        return "" if gold else f"{reference} is no gold reference"
    if rhat is None:
        return (
            f"Nobody knows whether {reference} has draws of the posterior, since it is not several "
            "chains of at least eight networks"
        )
    return "" if have_converged(rhat) else f"The chains of {reference} have not converged"


def _other_posteriors(config: Path, posteriors: Mapping[str, str]) -> list[str]:
    """What approximates another posterior: of other data, with another prior or likelihood."""
    return [
        f"{name} has `{what}` {own}, the reference {wanted}: it is of another posterior."
        + (_MAY_HAVE_SEEN if what == "data" else "")
        for name, text in posteriors.items()
        for what, own, wanted in other_posterior(Location.of(text), config)
    ]
