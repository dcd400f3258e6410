"""The configuration of a population and of its parts, and the record of it in its folder."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

import lightning_bnn
from lightning_bnn.bank.disk import write_whole
from lightning_bnn.commands.presets import preset_names, preset_text
from weightsym.loading import read_json
from weightsym.settings_files import read_settings, settings_of_text

__all__ = [
    "check_identity", "identity_of", "part_settings", "population_settings", "write_identity",
]  # fmt: skip

_MEMBERS = ("model.init_args.members", "model.init_args.first_member")
_BEGUN = ("networks.bin", "parts/*/part.json", "parts/*/checkpoints/*.ckpt")
"""Files that are not thrown away when the configuration changes: networks, or work on them."""


def population_settings(path: Path, change: dict[str, Any]) -> dict[str, Any]:
    """Read a configuration with its changes, and refuse what cannot train a population.

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
    """Make the configuration that trains members ``first`` to ``last - 1`` of a population."""
    settings = copy.deepcopy(settings)
    model, data = settings["model"]["init_args"], settings["data"]["init_args"]
    model |= {"members": last - first, "first_member": first}
    if data.get("orders") is not None:
        data["orders"] = list(range(first, last))
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
    """Expand the three groups, for which the name of a class may stand."""
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
            raise ValueError(f"`change`: {name} does not fit, {group} is not a group of settings.")
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


# ------------------------------------------------------------ identity
def identity_of(settings: dict[str, Any], every_n_epochs: int | None) -> dict[str, Any]:
    """Collect the settings that two commands share if they train the same population.

    Args:
        settings: the configuration.
        every_n_epochs: how often members are kept.
    """
    return {**_by_full_name(settings), "every_n_epochs": every_n_epochs}


def check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that holds another population, or other files.

    Args:
        folder: the bank.
        identity: of the population.
    """
    recorded = _recorded_in(folder)
    if recorded is None:
        if folder.exists() and (not folder.is_dir() or any(map(_is_foreign, folder.iterdir()))):
            raise ValueError(
                f"`bank` {folder} is there, and no population: choose a folder that is new or "
                "empty."
            )
        return
    names = _differing(recorded, identity)
    if names and any(any(folder.glob(pattern)) for pattern in _BEGUN):
        changes = (f"{n}: {recorded.get(n)} there, {identity.get(n)} here" for n in names[:3])
        raise ValueError(
            f"`bank` {folder} holds a population of another configuration ({'; '.join(changes)}): "
            "choose another folder."
        )


def write_identity(folder: Path, settings: dict[str, Any], identity: dict[str, Any]) -> None:
    """Record the identity of the population, while the bank is locked.

    Args:
        folder: the bank.
        settings: the configuration.
        identity: of the population.
    """
    check_identity(folder, identity)
    recorded = _recorded_in(folder)
    if recorded is not None and _differing(recorded, identity):
        shutil.rmtree(folder / "parts", ignore_errors=True)  # it came to nothing
    content = {"settings": identity, "version": lightning_bnn.__version__}
    write_whole(folder / "population.json", json.dumps(content, indent=1))
    write_whole(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def _recorded_in(folder: Path) -> dict[str, Any] | None:
    """Read the identity of the population in a folder, or return None."""
    path, remedy = folder / "population.json", "put back a copy, or choose another folder"
    if not path.is_file():
        return None
    identity = read_json(path, remedy).get("settings")
    if not isinstance(identity, dict):
        raise ValueError(f"{path} is damaged: {remedy}.")
    return identity


def _is_foreign(path: Path) -> bool:
    """Tell files of a user from those that a killed command leaves."""
    return path.name != ".lock" and not path.name.startswith(".population.json.")


def _differing(recorded: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """List the settings that differ."""
    return [n for n in {**recorded, **identity} if recorded.get(n) != identity.get(n)]


def _by_full_name(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Name every setting in full, except those that choose the members."""
    if not isinstance(settings, dict):
        value = settings is not None if prefix.endswith(".orders.") else settings
        return {prefix[:-1]: json.loads(json.dumps(value, default=str))}
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _by_full_name(value, f"{prefix}{name}.")
    return {name: value for name, value in flat.items() if name not in _MEMBERS}
