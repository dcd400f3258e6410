"""`lightning-bnn doctor`: diagnose a posterior on disk, in sentences with numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_bnn import modules
from lightning_bnn.doctor import Evidence, Examples, Report, Settings, examine
from lightning_bnn.doctor.evidence import NotPossible
from lightning_bnn.doctor.findings import REPORT_FILE
from lightning_bnn.evaluation.problem import Problem, StoredBatches, read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, StoredPosterior, read_posterior
from lightning_bnn.metrics.convergence import LEAST
from lightning_bnn.posteriors import Empirical
from lightning_bnn.quiet_runs import one_thread
from weightsym import Outcome
from weightsym.files import read_settings
from weightsym.params import Params, check_count

FAULTY = 3
"""Exit code if there is a fault. 2 means a mistake of the user, 1 a crash."""
_TRAINING, _HELD_OUT = 512, 2000


def doctor(
    place: str,
    data: str | None = None,
    samples: int = 20,
    out: str | None = None,
) -> Outcome:
    """Diagnose a posterior: what is wrong, why it matters, and what to do.

    Prints findings with their numbers. Faults make results wrong, warnings may do so, and notes
    explain what you see. Exit codes: 0 without faults, 3 with faults, 2 for mistakes. If the
    callback `PosteriorDoctor` watched the run, its curves of the training (losses, temperatures,
    acceptance) are read from its doctor.json.

    Args:
        place: a run (a folder written by `fit`), a checkpoint, a bank, or a folder of checkpoints;
            path[10:40] selects some of its members or networks. For example: lightning-bnn doctor
            lightning_logs/version_0
        data: a configuration with the network and its data, as for `fit`; needed if there is
            none beside the posterior.
        samples: number of networks drawn from every mode.
        out: folder for doctor.json; by default the text is only printed.
    """
    check_count("samples", samples)
    where = Location.of(place)
    config = where.config_or(data)
    with one_thread():
        evidence = _evidence(where, config, samples)
        if evidence.held_out is not None:
            _check(evidence, config)
        report = examine(evidence, {"place": place})
        print(report.text(), flush=True)
        if out is not None:
            print(f"\nwrote {report.write(Path(out))}")
    return Outcome(asdict(report), FAULTY if report.faults else 0)


def _check(evidence: Evidence, config: Path) -> None:
    """Refuse data that the network cannot take, since every check would be skipped."""
    try:
        _ = evidence.on_held_out
    except NotPossible as reason:
        raise ValueError(f"Data and network of {config} do not fit: {reason}.") from None


def _evidence(location: Location, config: Path, samples: int) -> Evidence:
    problem = read_problem(config)
    posterior = read_posterior("posterior", location, problem, samples)
    asked = _settings(read_settings(config), problem)
    settings = replace(asked, sampled=asked.sampled or posterior.origin.get("made") == "sampled")
    return Evidence(
        posterior.network,
        posterior.likelihood,
        posterior.modes,
        posterior.predictors,
        _joined(problem.training_set(-(-_TRAINING // 32)), _TRAINING),
        _held_out(problem),
        settings,
        _curves(location),
        chains=_chains(posterior) if settings.sampled else {},
        draws=samples,
        alone=len(posterior.modes) == 1 and _is_one(posterior),
    )


def _is_one(posterior: StoredPosterior) -> bool:
    return all(isinstance(mode, Empirical) and mode.size == 1 for mode in posterior.modes)


def _held_out(problem: Problem) -> Examples | None:
    validation = problem.validation_set()
    return _joined(validation if validation is not None else problem.test_set(), _HELD_OUT)


def _joined(batches: StoredBatches, most: int) -> Examples | None:
    """Return the first examples of some batches."""
    examples: list[tuple[Any, Tensor]] = []
    for inputs, targets in batches:
        if not isinstance(inputs, Tensor):
            return None
        examples.append((inputs, targets))
        if sum(len(targets) for _, targets in examples) >= most:
            break
    if not examples:
        return None
    inputs, targets = (torch.cat(list(column))[:most] for column in zip(*examples, strict=True))
    return Examples((inputs,), targets)


def _chains(posterior: StoredPosterior) -> Params:
    """Stack chains of networks, cut to the shortest, or return nothing if it is too short."""
    stacks = posterior.stacks()
    times = min((len(next(iter(stack.values()))) for stack in stacks), default=0)
    if times < LEAST:
        return {}
    return {name: torch.stack([s[name][:times] for s in stacks]) for name in stacks[0]}


def _settings(settings: Mapping[str, Any], problem: Problem) -> Settings:
    """Read settings from a configuration."""
    model = settings.get("model") or {}
    arguments = model.get("init_args") or {}
    module_class = getattr(modules, str(model.get("class_path", "")).rpartition(".")[2], None)
    chosen = arguments.get("optimizer")
    optimizer = (chosen.get("init_args") or {}) if isinstance(chosen, Mapping) else {}
    sampled = getattr(module_class, "__name__", "") in {"SGHMC", "SMILE", "HMC", "MILE"}
    num_data = arguments.get("num_data")
    return Settings(
        num_data=num_data if isinstance(num_data, int) else None,
        seen=_size(problem),
        temperature=_temperature(arguments, optimizer),
        kl_weight=_number(arguments.get("kl_weight", 1.0)),
        prior_std=_prior_std(module_class, arguments),
        weight_decay=0.0 if sampled else _number(optimizer.get("weight_decay"), 0.0),
        sampled=sampled,
        wanted_energy_variance=_number(optimizer.get("energy_variance"), None),
    )


def _prior_std(module_class: Any, arguments: Mapping[str, Any]) -> float | None:
    """Return the prior width of the configuration, or the default of the class."""
    if module_class is None:
        return None
    declared = getattr(module_class, "arguments", module_class)
    parameter = inspect.signature(declared).parameters.get("prior_std")
    value = arguments.get("prior_std", None if parameter is None else parameter.default)
    return _number(value, None)


def _temperature(arguments: Mapping[str, Any], optimizer: Mapping[str, Any]) -> float:
    """Return the temperature of the module or of its optimizer, one of which is 1 by default."""
    stated = [_number(settings.get("temperature")) for settings in (arguments, optimizer)]
    return next((t for t in stated if t != 1), 1.0)


def _number(value: Any, otherwise: Any = 1.0) -> Any:
    """Read a number from a configuration, also ``1e-3``, which YAML reads as a string."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return otherwise


def _size(problem: Problem) -> int | None:
    dataset = getattr(problem.source.train_dataloader(), "dataset", None)
    return len(dataset) if dataset is not None and hasattr(dataset, "__len__") else None


def _curves(location: Location) -> Mapping[str, Sequence[float]]:
    """Read the curves of the callback, if the run used it."""
    file = location.beside(REPORT_FILE)
    return {} if file is None else Report.read(file).curves
