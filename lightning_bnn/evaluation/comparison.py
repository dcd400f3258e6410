"""Scores of posteriors on disk beside a reference, computed once and cached."""

from __future__ import annotations

import functools
import json
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

import lightning_bnn
from lightning_bnn.calibration import calibrated
from lightning_bnn.evaluation.draws import draw, predictions_of_mode
from lightning_bnn.evaluation.errors import Numbers, bootstrap, jackknife, left_out, over_modes
from lightning_bnn.evaluation.evaluators import NumbersOf, Score, numbers_of
from lightning_bnn.evaluation.problem import Problem, StoredBatches, read_problem
from lightning_bnn.evaluation.reference_networks import (
    Options,
    Reference,
    predictions_of_reference,
    rhat_of_predictions,
)
from lightning_bnn.evaluation.run_settings import has_other_data
from lightning_bnn.evaluation.stored_posteriors import (
    Location,
    StoredPosterior,
    digest_of_file,
    read_posterior,
)
from lightning_bnn.posteriors import Empirical
from lightning_bnn.posteriors.sources import network_of
from lightning_bnn.predictions import DensityPredictions, Predictions, kind_of
from lightning_bnn.quiet_runs import quiet
from lightning_bnn.tables import Measured
from weightsym import params as P
from weightsym.files import parse_json, write_whole
from weightsym.params import Params, is_weight, keyed_generator


@dataclass(frozen=True)
class Row:
    """The metrics of one posterior, for one mode or for all of them.

    Attributes:
        method: name of the posterior.
        mode: "one" or "multi".
        numbers: by name, as fractions and nats.
        seeds: number of modes behind the errors.
        networks: number of networks that were compared with the reference.
        pooled: number of networks that were compared as one pool, as in P1.
    """

    method: str
    mode: str
    numbers: Numbers
    seeds: int
    networks: int = 0
    pooled: int = 0


def rows_of(
    posterior: StoredPosterior,
    reference: Reference,
    sets: Sequence[StoredBatches],
    score: Score,
    predicted: Any = None,
    validation: StoredBatches | None = None,
) -> list[Row]:
    """Return a row for single modes (with deviations) and one for all together (jackknife).

    Args:
        posterior: what is compared.
        reference: what it is compared with.
        sets: data, the first in distribution.
        score: that detects out-of-distribution examples.
        predicted: what the reference predicts in distribution.
        validation: data that predictions are calibrated on, if there are any.
    """
    posterior = _at_most(posterior, reference)
    count = len(posterior.modes)
    share = max(1, reference.samples // count)
    every, sizes = _drawn(posterior, reference)
    with torch.no_grad():
        distances = reference.of_modes(every, [k for k, n in enumerate(sizes) for _ in range(n)])
    pooled = _pooled(every, sizes, reference, share) if reference.pools else {}
    quality = _quality(posterior, reference, sets, score, share, predicted, validation)
    all_modes = sum(sizes), sum(min(size, share) for size in sizes)
    compared = {"one": (min(sizes), min(sizes)), "multi": all_modes}
    return [
        Row(
            posterior.name,
            mode,
            {**pooled.get(mode, {}), **numbers, **quality.get(mode, {})},
            count,
            *compared[mode],
        )
        for mode, numbers in distances.items()
    ]


def _at_most(posterior: StoredPosterior, reference: Reference) -> StoredPosterior:
    """Draw ``samples`` modes if there are more."""
    count = len(posterior.modes)
    if count <= reference.samples:
        return posterior
    order = torch.randperm(count, generator=keyed_generator(reference.seed, "modes"))
    return posterior.only(order[: reference.samples].sort().values.tolist())


@torch.no_grad()
def _drawn(posterior: StoredPosterior, reference: Reference) -> tuple[Params, list[int]]:
    """Return the networks of all modes as one stack, and their number in each mode."""
    draws = (draw(m, reference.samples, reference.seed, k) for k, m in enumerate(posterior.modes))
    stacks = [{name: t for name, t in stack.items() if is_weight(name, t)} for stack in draws]
    every = {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}
    reference.check(every, posterior.name)
    return every, [P.stack_size(stack) for stack in stacks]


@torch.no_grad()
def _pooled(
    every: Params, sizes: Sequence[int], reference: Reference, share: int
) -> dict[str, Numbers]:
    """Return the distances of pooled networks as in P1: as many of all modes as of one."""
    alone = torch.arange(sum(sizes)).split(list(sizes))
    shared = [rows[:share] for rows in alone]
    single = alone if min(sizes) >= 2 else ()
    together = [torch.cat(shared), *left_out(shared)] if len(alone) > 1 else []
    distances = reference.pooled(every, [*single, *together])
    numbers: dict[str, Numbers] = {}
    if single:
        numbers["one"] = over_modes(distances[: len(single)])
    if together:
        whole, *left = distances[len(single) :]
        numbers["multi"] = jackknife(whole, left)
    return numbers


def _quality(
    posterior: StoredPosterior,
    reference: Reference,
    sets: Sequence[StoredBatches],
    score: Score,
    share: int,
    predicted: Any,
    validation: StoredBatches | None,
) -> dict[str, Numbers]:
    """Compute the metrics of predictions for single modes and for all, if there are data."""
    if not sets:
        return {}
    if not posterior.knows_its_noise():
        raise ValueError(
            f"{posterior.name} lacks the noise that its likelihood has learned: pass the "
            "checkpoint of the run instead of a bank or a folder."
        )
    likelihood = posterior.likelihood
    has_scores = kind_of(likelihood, sets[0].targets()) is not DensityPredictions
    sets = sets if has_scores else sets[:1]  # others say nothing without targets
    held_out = [] if validation is None or not has_scores else [validation]
    of_modes = _predictions(posterior, reference, [*sets, *held_out], share)

    def numbers(of_sets: Sequence[Predictions]) -> NumbersOf:
        tested, validated = of_sets[: len(sets)], of_sets[len(sets) :]
        calibration = _calibration(validated[0], reference.seed) if validated else None
        return numbers_of(tested, score, predicted, sets[0].target_std(), calibration)

    alone = [numbers([counts[0] for counts in mode]) for mode in of_modes]
    if len(alone) == 1:
        sizes = [counts[0].examples for counts in of_modes[0][: len(sets)]]
        return {"one": bootstrap(sizes, alone[0], seed=reference.seed)}
    shared = [
        parts[0].stacked(parts)
        for parts in ([mode[s][1] for mode in of_modes] for s in range(len(of_modes[0])))
    ]
    modes = torch.arange(len(alone))
    subsets = [modes, *left_out(modes.split(1))]
    whole, *left = (
        numbers([predictions.modes(subset).mean() for predictions in shared])()
        for subset in subsets
    )
    return {"one": over_modes([of_mode() for of_mode in alone]), "multi": jackknife(whole, left)}


def _predictions(
    posterior: StoredPosterior, reference: Reference, sets: Sequence[StoredBatches], share: int
) -> list[list[Any]]:
    """Predict every set by all networks of each mode, and by its share in the mixture."""
    return [
        predictions_of_mode(
            mode, posterior.network, posterior.likelihood, sets, (reference.samples, share),
            reference.seed, k, device=reference.device,
        )
        for k, mode in enumerate(posterior.predictors)
    ]  # fmt: skip


def _calibration(validated: Predictions, seed: int) -> Any:
    """Calibrate without warnings, which would repeat the tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return calibrated(validated, seed=seed)


FAILED = "failed"
"""The mode of a row of a posterior that could not be compared."""
_FORMAT = 5
"""Version of stored rows; rows of other versions are computed again."""
RowsAndOrigin = tuple[list[Row], Mapping[str, Any]]
"""Rows of a posterior, and where it is from."""


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, and the settings that determine them.

    Attributes:
        rows: of all posteriors.
        floors: MMD^2 between parts of a reference of single networks, by those of the smaller one.
        settings: everything that decides the numbers.
    """

    rows: Sequence[Row]
    floors: Mapping[int, Numbers]
    settings: Mapping[str, Any]

    def failures(self) -> dict[str, str]:
        """Map posteriors that could not be compared to the reason."""
        origins = self.settings["posteriors"].items()
        return {name: origin["failed"] for name, origin in origins if "failed" in origin}

    def require_one(self) -> Comparison:
        """Refuse a comparison in which every posterior has failed."""
        failures = self.failures()
        if len(failures) == len(self.settings["posteriors"]):
            raise ValueError(f"Every posterior failed: {next(iter(failures.values()))}")
        return self


def collect(
    reference: Any,
    posteriors: Mapping[str, Any],
    folder: Path | None = None,
    data: Any = None,
    options: Options | None = None,
    network: nn.Module | None = None,
    likelihood: nn.Module | None = None,
) -> Comparison:
    """Compare posteriors with a reference, with rows for failures, too.

    Args:
        reference: networks that stand for the posterior: a location, or what `Posterior.of` takes.
        posteriors: the same by name.
        folder: rows of posteriors on disk are stored in ``folder/rows``.
        data: a configuration with network and data, by default that of the first run; or test data.
        options: how they are compared.
        network: one of their kind, by default that of the first that has one.
        likelihood: says what outputs mean, by default that of the first module that has one.
    """
    options = options or Options()
    first, sources = _source(reference), _sources(posteriors, options)
    config, problem = _problem(data, [first, *sources.values()], network, likelihood)
    whole = read_posterior("reference", first, problem)
    stored = whole.thinned(options.reference_samples)
    networks = Reference.of(stored, problem, options)
    ood = problem.ood_set(options.ood)
    settings = {
        "reference": str(reference) if isinstance(first, Location) else _kind(first),
        **_identity(first, config, options),
        "reference_networks": networks.size,
        "reference_chains": len(stored.modes) if networks.has_chains else None,
        "reference_rhat": rhat_of_predictions(whole, problem),
        "reference_made": options.reference_is or stored.origin.get("made"),
        "ood_set": "none" if ood is None else ood[0],
    }
    sets = [problem.test_set(), *([] if ood is None else [ood[1]])]
    settings["test_examples"] = len(sets[0].targets())
    validation = problem.validation_set()
    settings["validation_examples"] = None if validation is None else len(validation.targets())
    every = [*sets, *([] if validation is None else [validation])]
    settings["data_sha256"] = [batches.digest() for batches in every]

    @functools.cache
    def predicted() -> Any:
        return predictions_of_reference(stored, sets[0], networks)

    def compute(name: str, source: Location | Any) -> RowsAndOrigin:
        posterior = read_posterior(name, source, problem, samples=options.samples)
        on_disk = config if isinstance(source, Location) else None
        has_other = on_disk is not None and has_other_data(source, on_disk)
        held_out = None if has_other else validation
        rows = rows_of(posterior, networks, sets, options.score, predicted(), held_out)
        return rows, {**posterior.origin, "modes": len(posterior.modes), "other_data": has_other}

    keep = None if folder is None or config is None else folder / "rows"
    rows, origins = _all_rows(sources, settings, keep, compute)
    return Comparison(rows, _floors(rows, networks), {**settings, "posteriors": origins})


def _identity(reference: Location | Any, config: Path | None, options: Options) -> dict[str, Any]:
    """Return the settings that determine the results besides networks and data."""
    return {
        "reference_sha256": reference.digest() if isinstance(reference, Location) else "in memory",
        "config": None if config is None else str(config),
        "config_sha256": None if config is None else digest_of_file(config),
        "version": lightning_bnn.__version__,
        "format": _FORMAT,
        **{k: v for k, v in asdict(options).items() if k != "reference_is"},
    }


def _floors(rows: Sequence[Row], reference: Reference) -> dict[int, Numbers]:
    """Return noise floors for the sizes of the rows, if the reference can be split."""
    if reference.size < 4 or reference.has_chains:
        return {}
    counts = {row.seeds for row in rows if "law" in row.numbers}
    counts |= {row.pooled for row in rows if "mmd" in row.numbers}
    return {count: reference.noise_floor(count) for count in sorted(counts)}


def _all_rows(
    sources: Mapping[str, Location | Any],
    settings: Mapping[str, Any],
    folder: Path | None,
    compute: Callable[[str, Location | Any], RowsAndOrigin],
) -> tuple[list[Row], dict[str, Mapping[str, Any]]]:
    """Return the rows of all posteriors in order, and the origin of each."""
    rows: list[Row] = []
    origins: dict[str, Mapping[str, Any]] = {}
    for name, source in (bar := tqdm(list(sources.items()), desc="posteriors")):
        bar.set_postfix_str(name)
        if folder is None or not isinstance(source, Location):
            new, origins[name] = _computed(name, source, compute)
        else:
            identity = {"name": name, "sha256": source.digest(), "rows": str(source.rows)}
            key, path = {**settings, "posterior": identity}, folder / f"{name}.json"
            stored = _stored(path, json.loads(json.dumps(key)))
            new, origins[name] = stored or _computed(name, source, compute)
            if stored is None and "failed" not in origins[name]:
                _store(path, {"key": key, "origin": origins[name], "rows": [*map(asdict, new)]})
        rows += new
    return rows, origins


def _source(source: Any) -> Location | Any:
    """Return the location that a path names, and any other source unchanged."""
    return Location.of(str(source)) if isinstance(source, (str, Path)) else source


def _kind(source: Any) -> str:
    """Name the type of a source, with an article.

    >>> _kind([nn.Linear(2, 1)])
    'a list'
    """
    class_name = type(source).__name__
    return f"{'an' if class_name[0] in 'AEIOU' else 'a'} {class_name}"


def _sources(posteriors: Mapping[str, Any], options: Options) -> dict[str, Location | Any]:
    if not isinstance(posteriors, Mapping) or not posteriors:
        raise ValueError(
            "`posteriors` must map names to posteriors, as in {'SWAG': swag}, got "
            f"{'none' if isinstance(posteriors, Mapping) else _kind(posteriors)}."
        )
    if options.samples < 2:
        raise ValueError(f"`samples` must be at least 2, got {options.samples}.")
    for name in posteriors:
        if not re.fullmatch(r"[^/\\\x00]+", name):
            raise ValueError(f"`posteriors`: names become file names, but {name!r} cannot.")
    return {name: _source(source) for name, source in posteriors.items()}


def _problem(
    data: Any,
    sources: Sequence[Location | Any],
    network: nn.Module | None,
    likelihood: nn.Module | None,
) -> tuple[Path | None, Problem]:
    """Return the common problem of the sources, and the configuration that defines it, if any."""
    if data is None or isinstance(data, (str, Path)):
        config = _config(sources) if data is None else Path(data)
        return config, read_problem(config)
    module = next((s for s in sources if hasattr(s, "judged_modes")), None)
    likelihood = likelihood or getattr(module, "likelihood", None)
    return None, Problem.of(data, network or network_of(sources), likelihood)


def _config(sources: Sequence[Location | Any]) -> Path:
    for source in sources:
        config = source.config() if isinstance(source, Location) else None
        if config is not None:
            return config
    raise ValueError(
        "None of the posteriors has a `config.yaml`: pass `data`, a configuration with network and "
        "data, or, in Python, test data."
    )


# ------------------------------------------------------------ rows that are there already
def _computed(
    name: str, source: Location | Any, compute: Callable[[str, Location | Any], RowsAndOrigin]
) -> RowsAndOrigin:
    """Compute the rows of a posterior, or one that explains its failure."""
    try:
        with quiet():
            return compute(name, source)
    except (ValueError, RuntimeError, OSError) as error:
        message = " ".join(str(error).split())
        tqdm.write(f"{name} failed: {message}")
        return [Row(name, FAILED, {}, 0)], {"failed": message}


def _store(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n", wait=False)


def _stored(path: Path, key: Any) -> RowsAndOrigin | None:
    """Read the cached result of an earlier call with the same key, unless it is damaged."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            return None
        return [_row(**row) for row in content["rows"]], dict(content["origin"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return None


def _row(
    method: str,
    mode: str,
    numbers: Mapping[str, Sequence[float]],
    seeds: int,
    networks: int,
    pooled: int,
) -> Row:
    measured = {
        name: Measured(float(value), float(error)) for name, (value, error) in numbers.items()
    }
    counts = [operator.index(count) for count in (seeds, networks, pooled)]
    if not (isinstance(method, str) and isinstance(mode, str)):
        raise TypeError("a row must have a name and a mode")
    return Row(method, mode, measured, *counts)


def scores_of_halves(location: Location, config: Path, options: Options) -> Numbers:
    """Compare the second half of a reference's chains with the first, like any posterior.

    Both halves are draws of one law, so these distances are noise alone: a posterior that is no
    farther from the reference cannot be told from it. Fewer than four chains have none, since a
    law takes two on each side.

    Args:
        location: where the chains are.
        config: with their network and data.
        options: how posteriors are compared with the reference.
    """
    problem = read_problem(config)
    stored = read_posterior("reference", location, problem).thinned(options.reference_samples)
    half = sum(isinstance(mode, Empirical) and mode.size > 1 for mode in stored.modes) // 2
    if half < 2:
        return {}
    first, second = stored.only(range(half)), stored.only(range(half, 2 * half))
    reference = Reference.of(first, problem, options)
    sets = [problem.test_set()] if stored.knows_its_noise() else []
    predicted = predictions_of_reference(first, sets[0], reference) if sets else None
    rows = rows_of(second, reference, sets, options.score, predicted)
    return {name: number for row in rows for name, number in row.numbers.items()}
