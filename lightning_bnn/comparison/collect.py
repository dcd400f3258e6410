"""Rows of numbers for any posteriors on disk; what was computed before is read."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

import lightning_bnn
from lightning_bnn.comparison.convergence import rhat_of_predictions
from lightning_bnn.comparison.errors import Numbers
from lightning_bnn.comparison.options import Options
from lightning_bnn.comparison.places import Place, digest_of_file
from lightning_bnn.comparison.problem import read_problem
from lightning_bnn.comparison.reference import Reference
from lightning_bnn.comparison.reference_predictions import predictions_of_reference
from lightning_bnn.comparison.rows import Row, rows_of
from lightning_bnn.comparison.run_settings import has_other_data
from lightning_bnn.comparison.stored_posteriors import read_posterior
from lightning_bnn.comparison.tables import Measured
from lightning_bnn.quiet_runs import quiet

__all__ = ["FAILED", "Comparison", "attempt", "collect", "one_succeeded"]

FAILED = "failed"
"""The mode of a row of a posterior that could not be judged."""
_FORMAT = 3
"""Of stored rows: what other versions have computed is not read."""
RowsAndOrigin = tuple[list[Row], Mapping[str, Any]]
"""Rows of a posterior, and where it is from."""


@dataclass(frozen=True)
class Comparison:
    """All rows.

    Attributes:
        rows: of all posteriors.
        floors: MMD^2 between parts of a reference of single networks, by those of the smaller one.
        settings: everything that decides the numbers.
    """

    rows: Sequence[Row]
    floors: Mapping[int, Numbers]
    settings: Mapping[str, Any]

    def failures(self) -> dict[str, str]:
        """Why posteriors could not be judged, by name."""
        origins = self.settings["posteriors"].items()
        return {name: origin["failed"] for name, origin in origins if "failed" in origin}


def collect(
    reference: str,
    posteriors: Mapping[str, str],
    folder: Path,
    like: str | None = None,
    options: Options | None = None,
) -> Comparison:
    """Compare posteriors with a reference; refused if all of them fail.

    The arguments are those of `attempt`.
    """
    return one_succeeded(attempt(reference, posteriors, folder, like, options))


def one_succeeded(comparison: Comparison) -> Comparison:
    """A comparison, refused if there is nothing in it but failures."""
    failures = comparison.failures()
    if len(failures) == len(comparison.settings["posteriors"]):
        raise ValueError(f"Every posterior failed: {next(iter(failures.values()))}")
    return comparison


def attempt(
    reference: str,
    posteriors: Mapping[str, str],
    folder: Path,
    like: str | None = None,
    options: Options | None = None,
) -> Comparison:
    """Compare posteriors with a reference; those that fail have a row that says so.

    Args:
        reference: networks that stand for the posterior.
        posteriors: places by name.
        folder: rows are kept in ``folder/rows``.
        like: a configuration with network and data, by default that of the first run.
        options: how they are compared.
    """
    options = options or Options()
    first, places = Place.of(reference), _places(posteriors, options)
    config = _config([first, *places.values()]) if like is None else Path(like)
    problem = read_problem(config)
    settings = {
        "reference": reference,
        "reference_sha256": first.digest(),
        "config": str(config),
        "config_sha256": digest_of_file(config),
        "version": lightning_bnn.__version__,
        "format": _FORMAT,
        **{k: v for k, v in asdict(options).items() if k not in ("device", "reference_is")},
    }
    _check_disjoint(first, places)
    whole = read_posterior("reference", first, problem)
    stored = whole.thinned(options.reference_samples)
    networks = Reference.of(stored, problem, options)
    ood = problem.ood_set(options.ood)
    settings |= {
        "reference_networks": networks.size,
        "reference_chains": len(stored.modes) if networks.has_chains else None,
        "reference_rhat": rhat_of_predictions(whole, problem),
        "reference_made": options.reference_is or stored.origin.get("made"),
        "ood_set": "none" if ood is None else ood[0],
    }
    sets = [problem.test_set(), *([] if ood is None else [ood[1]])]
    settings["test_examples"] = len(sets[0].targets())
    validation = problem.validation_set()
    every = [*sets, *([] if validation is None else [validation])]
    settings["data_sha256"] = [batches.digest() for batches in every]

    @functools.cache
    def predicted() -> Any:
        return predictions_of_reference(stored, sets[0], networks, stored.likelihood)

    def compute(name: str, place: Place) -> RowsAndOrigin:
        posterior = read_posterior(name, place, problem, samples=options.samples)
        other = has_other_data(place, config)
        known = None if other else validation
        rows = rows_of(posterior, networks, sets, options.score, predicted(), known)
        return rows, {**posterior.origin, "modes": len(posterior.modes), "other_data": other}

    rows, origins = _all_rows(places, settings, folder / "rows", compute)
    counts = {row.seeds for row in rows if "law" in row.numbers}
    counts |= {row.pooled for row in rows if "mmd" in row.numbers}
    if networks.size < 4 or networks.has_chains:  # cannot be split into parts of one law
        counts = set()
    floors = {count: networks.noise_floor(count) for count in sorted(counts)}
    return Comparison(rows, floors, {**settings, "posteriors": origins})


def _all_rows(
    places: Mapping[str, Place],
    settings: Mapping[str, Any],
    folder: Path,
    compute: Callable[[str, Place], RowsAndOrigin],
) -> tuple[list[Row], dict[str, Mapping[str, Any]]]:
    """The rows of all posteriors, one after the other, and where each is from."""
    rows: list[Row] = []
    origins: dict[str, Mapping[str, Any]] = {}
    for name, place in (bar := tqdm(list(places.items()), desc="posteriors")):
        bar.set_postfix_str(name)
        identity = {"name": name, "sha256": place.digest(), "rows": str(place.rows)}
        key = {**settings, "posterior": identity}
        new, origins[name] = _stored_or_computed(
            folder / f"{name}.json", key, functools.partial(compute, name, place)
        )
        rows += new
    return rows, origins


def _places(posteriors: Mapping[str, str], options: Options) -> dict[str, Place]:
    if options.samples < 2:
        raise ValueError(f"`samples` must be at least 2, got {options.samples}.")
    for name in posteriors:
        if not re.fullmatch(r"[^/\\\x00]+", name):
            raise ValueError(f"`posteriors`: names go into file names, {name!r} cannot.")
    return {name: Place.of(text) for name, text in posteriors.items()}


def _config(places: Sequence[Place]) -> Path:
    for place in places:
        config = place.config()
        if config is not None:
            return config
    raise ValueError(
        "None of the posteriors has a `config.yaml`: pass a configuration with network and data as "
        "`--like`."
    )


def _check_disjoint(reference: Place, places: Mapping[str, Place]) -> None:
    """Refuse networks that are in both sets: they bias the MMD."""
    for name, place in places.items():
        if place.file().resolve() != reference.file().resolve():
            continue
        one, other = (set(range(10**6)[p.rows or slice(None)]) for p in (place, reference))
        if one & other:
            raise ValueError(
                f"{name} shares networks with the reference: choose rows that are disjoint, such "
                f"as {place.path}[0:10] and {place.path}[10:]."
            )


# ------------------------------------------------------------ rows that are there already
def _stored_or_computed(
    path: Path, key: Mapping[str, Any], compute: Callable[[], RowsAndOrigin]
) -> RowsAndOrigin:
    """Rows of an earlier call with the same key; a posterior that fails has a row that says so."""
    stored = _stored(path)
    if stored.get("key") == json.loads(json.dumps(key)):
        return [_row(**row) for row in stored["rows"]], stored["origin"]
    name = key["posterior"]["name"]
    try:
        with quiet():
            rows, origin = compute()
    except (ValueError, RuntimeError, OSError) as error:
        message = " ".join(str(error).split())
        tqdm.write(f"{name} failed: {message}")
        return [Row(name, FAILED, {}, 0)], {"failed": message}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"key": key, "origin": origin, "rows": [asdict(row) for row in rows]}
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return rows, origin


def _stored(path: Path) -> dict[str, Any]:
    """What an earlier call has written; nothing if it was interrupted."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _row(numbers: Mapping[str, Sequence[float]], **fields: Any) -> Row:
    return Row(numbers={name: Measured(*pair) for name, pair in numbers.items()}, **fields)
