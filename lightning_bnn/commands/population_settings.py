"""The configuration of a population, and of each of its parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from lightning_bnn.commands.presets import preset_names, preset_text
from lightning_bnn.settings_files import read_settings, settings_of_text

__all__ = ["part_settings", "population_settings"]


def population_settings(path: Path, change: dict[str, Any]) -> dict[str, Any]:
    """The configuration with its changes, refused where no population can be trained by it.

    Args:
        path: a file, or the name of a preset.
        change: new values by the full names of settings.
    """
    settings = _read(path)
    if not {"model", "data"} <= settings.keys():
        raise ValueError(f"`config`: {path} must have `model` and `data`, as for `fit`.")
    settings["trainer"] = settings.get("trainer") or {}
    settings.pop("ckpt_path", None)
    _spell_out(settings)
    for name, value in change.items():
        _put(settings, name, value)
    _spell_out(settings)
    _check_trainer(settings["trainer"])
    return settings


def part_settings(settings: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The configuration that trains members ``first`` to ``last - 1`` of a population."""
    settings = copy.deepcopy(settings)
    model, data = settings["model"]["init_args"], settings["data"]["init_args"]
    model |= {"members": last - first, "first_member": first}
    if data.get("orders") is not None:
        data["orders"] = list(range(first, last))
    rates = model.get("member_rates")
    if rates is not None:
        if not isinstance(rates, list) or len(rates) < last:
            raise ValueError(f"`member_rates` must be one for each member, got {rates}.")
        model["member_rates"] = rates[first:last]
    return settings


def _read(path: Path) -> dict[str, Any]:
    if str(path) in preset_names():
        return settings_of_text(preset_text(str(path)), str(path))
    if not path.exists():
        raise ValueError(
            f"`config`: there is no file {path}, and no preset of that name; "
            "`lightning-bnn presets` lists them."
        )
    return read_settings(path)


def _spell_out(settings: dict[str, Any]) -> None:
    """The three groups as groups, where the name of a class may stand for one."""
    settings["trainer"] = _group("trainer", settings["trainer"])
    for name in ("model", "data"):
        value = settings[name]
        group = _group(name, {"class_path": value} if isinstance(value, str) else value)
        arguments = _group(f"{name}.init_args", group.get("init_args") or {})
        settings[name] = {**group, "init_args": arguments}


def _group(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"`config`: {name} must be a group of settings, got {value!r}.")
    return value


def _put(settings: dict[str, Any], name: str, value: Any) -> None:
    *groups, last = name.split(".")
    for group in groups:
        settings = settings.setdefault(group, {})
        if not isinstance(settings, dict):
            raise ValueError(f"`change`: {name} does not fit, {group} is no group of settings.")
    settings[last] = value


def _check_trainer(trainer: dict[str, Any]) -> None:
    if trainer.get("fast_dev_run"):
        raise ValueError("`config`: a population cannot be a `fast_dev_run`.")
    if trainer.setdefault("devices", 1) not in (1, [0], "1"):
        raise ValueError(
            "`config`: a part of a population trains on one device, got `trainer.devices` "
            f"{trainer['devices']}; several run side by side by `engine` ray, or in one "
            "run of `fit` with `--trainer.strategy members`."
        )
