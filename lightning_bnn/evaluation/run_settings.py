"""Differences between configurations of runs: of the posterior, and of the data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_bnn import datamodules, likelihoods
from lightning_bnn.evaluation.stored_posteriors import Location
from weightsym.files import read_settings

_CHANGE_NOTHING = frozenset(
    ("root", "batch_size", "eval_batch_size", "orders", "num_workers", "augment")
)
"""Arguments of datamodules that do not change the sets of examples."""
Part = tuple[str, dict[str, Any]]
"""A class by its name, and its arguments."""


def has_other_data(location: Location, config: Path) -> bool:
    """Return whether a run has other data, or another split, than a configuration.

    Its training examples may then be among those that it is compared on. Locations without a
    configuration of their own say nothing.

    Args:
        location: where the posterior is.
        config: with the data that it is compared on.
    """
    run, problem = _settings(location.config()), _settings(config)
    return bool(run and problem) and _difference(_data(run), _data(problem)) is not None


def other_posterior(location: Location, config: Path) -> list[tuple[str, str, str]]:
    """List settings by which a run targets another posterior than a configuration.

    Args:
        location: where it is; locations without a configuration of their own say nothing.
        config: of the posterior that it is taken for.

    Returns:
        Name of each (``data``, ``prior_std``, ``likelihood``), its value, and the expected one.
    """
    run, problem = _settings(location.config()), _settings(config)
    return [*_differences(run, problem)] if run and problem else []


def _differences(
    run: Mapping[str, Any], problem: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    models = [_arguments(settings) for settings in (run, problem)]
    parts = {"data": [_data(run), _data(problem)]}
    if all(models):
        parts["likelihood"] = [_likelihood(arguments) for arguments in models]
    for name, pair in parts.items():
        words = _difference(*pair)
        if words is not None:
            yield (name, *words)
    std, wanted = (arguments.get("prior_std") for arguments in models)
    if None not in (std, wanted) and std != wanted:
        yield "prior_std", str(std), str(wanted)


def _difference(first: Part, second: Part) -> tuple[str, str] | None:
    """Describe the differences of two parts of configurations, or return None."""
    (name, arguments), (other_name, others) = first, second
    if name != other_name:
        return name, other_name
    keys = [k for k in arguments if k in others and arguments[k] != others[k]]
    differing, wanted = (", ".join(f"{k}={a[k]}" for k in keys) for a in (arguments, others))
    return (f"{name}({differing})", f"{name}({wanted})") if keys else None


# ------------------------------------------------------------ parts of configurations
def _settings(config: Path | None) -> dict[str, Any]:
    """Read a configuration with data. Return no settings for any other file."""
    try:
        settings = {} if config is None else read_settings(config)
    except (OSError, ValueError):
        return {}
    return settings if "data" in settings else {}


def _arguments(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the module, empty if there are none."""
    model = settings.get("model")
    arguments = model.get("init_args") if isinstance(model, Mapping) else None
    return arguments if isinstance(arguments, Mapping) else {}


def _data(settings: Mapping[str, Any]) -> Part:
    """Return the datamodule, and the arguments that determine its splits."""
    name, arguments = _part(settings["data"], datamodules)
    return name, {k: v for k, v in arguments.items() if k not in _CHANGE_NOTHING}


def _likelihood(arguments: Mapping[str, Any]) -> Part:
    """Read the likelihood, by default that of classes."""
    return _part(arguments.get("likelihood") or "Categorical", likelihoods)


def _part(stated: Any, package: ModuleType) -> Part:
    """Return a class by its bare name, and its arguments with this package's defaults."""
    if not isinstance(stated, Mapping):
        stated = {"class_path": stated}
    name = str(stated.get("class_path")).rpartition(".")[2]
    parameters = inspect.signature(getattr(package, name, object)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return name, {**defaults, **(stated.get("init_args") or {})}
