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

import torch
from tqdm.auto import tqdm

import lightning_bnn
from lightning_bnn.comparison.problem import Batches, Surroundings, read_surroundings
from lightning_bnn.comparison.protocols import PROTOCOLS
from lightning_bnn.comparison.reference import Arena, Row, rows_of
from lightning_bnn.comparison.stored_posteriors import (
    Place,
    find_config,
    fingerprint,
    read_contender,
    stack_of,
)
from lightning_bnn.comparison.tables import Measured
from lightning_bnn.quiet import quiet

__all__ = ["FAILED", "Comparison", "Options", "collect"]

FAILED = "failed"
"""The mode of a row of a posterior that could not be judged."""
Found = tuple[list[Row], Mapping[str, Any]]
"""Rows of a posterior, and where it is from."""


@dataclass(frozen=True)
class Options:
    """How posteriors are compared, see `lightning_bnn.studies.compare.compare`."""

    protocol: str = "full"
    samples: int = 100
    ood: str | None = None
    score: str = "max_probability"
    seed: int = 0
    device: str | None = None


@dataclass(frozen=True)
class Comparison:
    """All rows.

    Attributes:
        rows: of all posteriors.
        floors: MMD^2 between parts of the reference, by the networks of the smaller one.
        settings: everything that decides the numbers.
    """

    rows: Sequence[Row]
    floors: Mapping[int, Mapping[str, Measured]]
    settings: Mapping[str, Any]


def collect(
    reference: str,
    posteriors: Mapping[str, str],
    folder: Path,
    like: str | None = None,
    options: Options | None = None,
) -> Comparison:
    """Compare posteriors with a reference.

    Args:
        reference: networks that stand for the posterior.
        posteriors: places by name.
        folder: rows are kept in ``folder/rows``.
        like: a configuration with network and data, by default that of the first run.
        options: how they are compared.
    """
    options = options or Options()
    if options.samples < 2:
        raise ValueError(f"`samples` must be at least 2, got {options.samples}.")
    for name in posteriors:
        if not re.fullmatch(r"[^/\\\x00]+", name):
            raise ValueError(f"`posteriors`: names go into file names, {name!r} cannot.")
    places = {name: Place.of(text) for name, text in posteriors.items()}
    first = Place.of(reference)
    config = Path(like) if like is not None else _config([first, *places.values()])
    around = read_surroundings(config)
    settings = {
        "reference": reference,
        "reference_sha256": fingerprint(first.file()),
        "config": str(config),
        "config_sha256": fingerprint(config),
        "version": lightning_bnn.__version__,
        **{name: value for name, value in asdict(options).items() if name != "device"},
    }
    _check_apart(first, places)
    arena = _arena(first, around, options)
    outside = around.outside(options.ood)
    sets = [around.inside(), *([] if outside is None else [outside[1]])]
    settings |= {
        "reference_networks": arena.size,
        "ood_set": "none" if outside is None else outside[0],
    }
    rows: list[Row] = []
    origins: dict[str, Mapping[str, Any]] = {}
    for name, place in (bar := tqdm(list(places.items()), desc="posteriors")):
        bar.set_postfix_str(name)
        own = {"name": name, "sha256": fingerprint(place.file()), "rows": str(place.rows)}
        found, origins[name] = _remembered(
            folder / "rows" / f"{name}.json",
            {**settings, "posterior": own},
            functools.partial(_rows, name, place, around, arena, sets, options),
        )
        rows += found
    if all(row.mode == FAILED for row in rows):
        raise ValueError(f"Every posterior failed: {origins[rows[0].method]['failed']}")
    counts = sorted({row.networks for row in rows if "mmd" in row.numbers})
    counts = counts if arena.size >= 4 else []  # fewer cannot be split
    floors = {count: arena.noise_floor(count) for count in counts}
    return Comparison(rows, floors, {**settings, "posteriors": origins})


def _config(places: Sequence[Place]) -> Path:
    for place in places:
        found = find_config(place)
        if found is not None:
            return found
    raise ValueError(
        "None of the posteriors has a `config.yaml`: pass a configuration with network and data as "
        "`--like`."
    )


def _check_apart(first: Place, places: Mapping[str, Place]) -> None:
    """A network in both sets biases the MMD."""
    for name, place in places.items():
        if place.file().resolve() != first.file().resolve():
            continue
        mine, theirs = (set(range(10**6)[p.rows or slice(None)]) for p in (first, place))
        if mine & theirs:
            raise ValueError(
                f"{name} shares networks with the reference: choose rows that are disjoint, such "
                f"as {place.path}[0:10] and {place.path}[10:]."
            )


def _arena(first: Place, around: Surroundings, options: Options) -> Arena:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device` {device!r} cannot be used here: {error}") from None
    return Arena(
        stack_of(read_contender("reference", first, around)),
        around.template,
        [around.example()],
        PROTOCOLS[options.protocol],
        options.samples,
        options.seed,
        device,
    )


def _rows(
    name: str,
    place: Place,
    around: Surroundings,
    arena: Arena,
    sets: Sequence[Batches],
    options: Options,
) -> Found:
    contender = read_contender(name, place, around, options.samples)
    rows = rows_of(contender, arena, sets, options.score)
    return rows, {**contender.origin, "modes": len(contender.modes)}


# ------------------------------------------------------------ rows that are there already
def _remembered(path: Path, key: Mapping[str, Any], compute: Callable[[], Found]) -> Found:
    """Rows of an earlier call with the same key; a posterior that fails has a row that says so."""
    held = _held(path)
    if held.get("key") == json.loads(json.dumps(key)):
        return [_row(row) for row in held["rows"]], held["origin"]
    name = key["posterior"]["name"]
    try:
        with quiet():
            rows, origin = compute()
    except (ValueError, RuntimeError, OSError) as error:
        text = " ".join(str(error).split())
        tqdm.write(f"{name} failed: {text}")
        return [Row(name, FAILED, {}, 0)], {"failed": text}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {"key": key, "origin": origin, "rows": [asdict(row) for row in rows]}
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return rows, origin


def _held(path: Path) -> dict[str, Any]:
    """What an earlier call has written; nothing if it was interrupted."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _row(held: dict[str, Any]) -> Row:
    numbers = {name: Measured(*pair) for name, pair in held["numbers"].items()}
    return Row(**{**held, "numbers": numbers})
