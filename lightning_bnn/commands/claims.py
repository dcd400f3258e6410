"""What a folder of a population holds, so that two configurations are not mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

import lightning_bnn
from lightning_bnn.commands.part_files import read_object, write_whole

__all__ = ["claim", "identity_of", "refuse_others"]

_MEMBERS = ("model.init_args.members", "model.init_args.first_member")
_RATES = "model.init_args.member_rates"
_BEGUN = ("shard-*", "parts/*/part.json", "parts/*/checkpoints/*.ckpt")
"""What is not thrown away."""


def identity_of(settings: dict[str, Any], every_n_epochs: int | None) -> dict[str, Any]:
    """What two commands must have in common to be about the same population.

    Args:
        settings: the configuration.
        every_n_epochs: how often members are kept.
    """
    return {**_flat(settings), "every_n_epochs": every_n_epochs}


def refuse_others(folder: Path, own: dict[str, Any]) -> None:
    """A folder holds one population; what was made otherwise is not mixed with it.

    Args:
        folder: the bank.
        own: what the population is.
    """
    known = _known(folder)
    if known is None:
        if folder.exists() and (not folder.is_dir() or any(map(_is_foreign, folder.iterdir()))):
            raise ValueError(
                f"`bank` {folder} is there, and no population: choose a folder that is new or "
                "empty."
            )
        return
    begun = any(any(folder.glob(what)) for what in _BEGUN)
    differ = _differences(known, own)
    if differ and begun:
        told = "; ".join(f"{n}: {known.get(n)} there, {own.get(n)} here" for n in differ[:3])
        raise ValueError(
            f"`bank` {folder} holds a population of another configuration ({told}): choose "
            "another folder."
        )


def claim(folder: Path, settings: dict[str, Any], own: dict[str, Any]) -> None:
    """Note what the population is; the bank is locked, so that nobody else does.

    Args:
        folder: the bank.
        settings: the configuration.
        own: what the population is.
    """
    refuse_others(folder, own)
    known = _known(folder)
    if known is not None and _differences(known, own):
        shutil.rmtree(folder / "parts", ignore_errors=True)  # it came to nothing
    elif known is not None and _are_settings(folder) and not _adds_rates(known, own):
        return
    told = {"settings": own, "version": lightning_bnn.__version__}
    write_whole(folder / "population.json", json.dumps(told, indent=1))
    write_whole(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def _are_settings(folder: Path) -> bool:
    """Whether the configuration is there and whole, for whoever judges the networks."""
    try:
        return isinstance(yaml.safe_load((folder / "config.yaml").read_bytes()), dict)
    except (FileNotFoundError, ValueError, yaml.YAMLError):
        return False


def _adds_rates(known: dict[str, Any], own: dict[str, Any]) -> bool:
    one, two = known.get(_RATES), own.get(_RATES)
    return isinstance(two, list) and (not isinstance(one, list) or len(two) > len(one))


def _known(folder: Path) -> dict[str, Any] | None:
    """The settings of the population in a folder."""
    path, remedy = folder / "population.json", "put back a copy, or choose another folder"
    if not path.is_file():
        return None
    settings = read_object(path, remedy).get("settings")
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is damaged: {remedy}.")
    return settings


def _is_foreign(path: Path) -> bool:
    """Whether it is nothing that a command leaves here which was killed at its start."""
    return path.name != ".lock" and not path.name.startswith(".population.json.")


def _differences(known: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Settings that are not the same; rates of further members may be added."""
    differ = [n for n in {**known, **own} if known.get(n) != own.get(n)]
    one, two = known.get(_RATES), own.get(_RATES)
    if isinstance(one, list) and isinstance(two, list):
        both = min(len(one), len(two))
        differ = [n for n in differ if n != _RATES or one[:both] != two[:both]]
    return differ


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting under its full name, but those that say which members there are."""
    if not isinstance(settings, dict):
        whole = settings if not prefix.endswith(".orders.") else settings is not None
        return {prefix[:-1]: json.loads(json.dumps(whole, default=str))}
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{prefix}{name}.")
    return {n: v for n, v in found.items() if n not in _MEMBERS}
