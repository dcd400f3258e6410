"""Which population a folder holds, so that networks of two configurations are not mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

import lightning_bnn
from lightning_bnn.commands.part_files import read_object, write_whole

__all__ = ["check_identity", "identity_of", "write_identity"]

_MEMBERS = ("model.init_args.members", "model.init_args.first_member")
_RATES = "model.init_args.member_rates"
_BEGUN = ("shard-*", "parts/*/part.json", "parts/*/checkpoints/*.ckpt")
"""Files that are not thrown away when the configuration changes: networks, or work on them."""


def identity_of(settings: dict[str, Any], every_n_epochs: int | None) -> dict[str, Any]:
    """What two commands must have in common to be about the same population.

    Args:
        settings: the configuration.
        every_n_epochs: how often members are kept.
    """
    return {**_by_full_name(settings), "every_n_epochs": every_n_epochs}


def check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """A folder holds one population; what was made otherwise is not mixed with it.

    Args:
        folder: the bank.
        identity: what the population is.
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
        shown = (f"{n}: {recorded.get(n)} there, {identity.get(n)} here" for n in names[:3])
        raise ValueError(
            f"`bank` {folder} holds a population of another configuration ({'; '.join(shown)}): "
            "choose another folder."
        )


def write_identity(folder: Path, settings: dict[str, Any], identity: dict[str, Any]) -> None:
    """Note what the population is; the bank is locked, so that nobody else does.

    Args:
        folder: the bank.
        settings: the configuration.
        identity: what the population is.
    """
    check_identity(folder, identity)
    recorded = _recorded_in(folder)
    if recorded is not None and _differing(recorded, identity):
        shutil.rmtree(folder / "parts", ignore_errors=True)  # it came to nothing
    elif recorded is not None and _has_settings(folder) and not _adds_rates(recorded, identity):
        return
    content = {"settings": identity, "version": lightning_bnn.__version__}
    write_whole(folder / "population.json", json.dumps(content, indent=1))
    write_whole(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def _has_settings(folder: Path) -> bool:
    """Whether the configuration is there and whole, for whoever judges the networks."""
    try:
        return isinstance(yaml.safe_load((folder / "config.yaml").read_bytes()), dict)
    except (FileNotFoundError, ValueError, yaml.YAMLError):
        return False


def _adds_rates(recorded: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Whether learning rates of further members have come."""
    before, now = recorded.get(_RATES), identity.get(_RATES)
    return isinstance(now, list) and (not isinstance(before, list) or len(now) > len(before))


def _recorded_in(folder: Path) -> dict[str, Any] | None:
    """What the population in a folder is; None if there is none."""
    path, remedy = folder / "population.json", "put back a copy, or choose another folder"
    if not path.is_file():
        return None
    identity = read_object(path, remedy).get("settings")
    if not isinstance(identity, dict):
        raise ValueError(f"{path} is damaged: {remedy}.")
    return identity


def _is_foreign(path: Path) -> bool:
    """Whether it is nothing that a command leaves here which was killed at its start."""
    return path.name != ".lock" and not path.name.startswith(".population.json.")


def _differing(recorded: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Settings that are not the same; rates of further members may be added."""
    names = [n for n in {**recorded, **identity} if recorded.get(n) != identity.get(n)]
    before, now = recorded.get(_RATES), identity.get(_RATES)
    if isinstance(before, list) and isinstance(now, list):
        both = min(len(before), len(now))
        names = [n for n in names if n != _RATES or before[:both] != now[:both]]
    return names


def _by_full_name(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting under its full name, but those that say which members there are."""
    if not isinstance(settings, dict):
        value = settings is not None if prefix.endswith(".orders.") else settings
        return {prefix[:-1]: json.loads(json.dumps(value, default=str))}
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _by_full_name(value, f"{prefix}{name}.")
    return {name: value for name, value in flat.items() if name not in _MEMBERS}
