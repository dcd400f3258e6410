"""`lightning-bnn population`: train thousands of independent networks into one bank, in parts."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tqdm.auto import tqdm

import lightning_bnn
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.disk import explain_full_disk
from lightning_bnn.commands.parts import Part, networks_of, train_part
from lightning_bnn.commands.presets import preset_names, preset_text
from weightsym import Outcome
from weightsym.files import read_json, read_settings, settings_of_text, write_whole
from weightsym.params import check_count, check_positive

_PART = 1000
_FOLDER = re.compile(r"(\d{7,8})-(\d{7,8})")
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} [{elapsed}<{remaining}{postfix}]"


def population(
    config: str,
    members: int,
    bank: str,
    first: int = 0,
    part: int = _PART,
    every_n_epochs: int | None = None,
    change: dict[str, Any] | None = None,
    checkpoint_minutes: float = 5.0,
) -> Outcome:
    """Train many independent networks, and store them in one bank.

    Member k is the same network in every population that contains it. If the command was stopped,
    the same command continues where it stopped; with more members it adds the missing ones. If the
    data have `orders`, every member has batches in an order of its own.

    Args:
        config: a configuration as for `lightning-bnn fit`, or the name of a preset.
        members: number of the population's networks, those before ``first`` included.
        bank: folder of the bank.
        first: first member in this bank, where several machines or devices share a population.
            `lightning-bnn bank --add` joins their banks.
        part: number of members that train side by side.
        every_n_epochs: number of epochs between stored networks during training; by default
            networks are stored at the end only.
        change: changes to the configuration, such as '{"trainer.max_epochs": 2}'.
        checkpoint_minutes: minutes between checkpoints, the most work that a crash can lose.
    """
    check_count("first", first, 0)
    check_count("members", members, first + 1)
    check_count("part", part)
    check_count("every_n_epochs", every_n_epochs, optional=True)
    check_positive("checkpoint_minutes", checkpoint_minutes)
    settings = population_settings(Path(config), change or {})
    folder = Path(bank)
    identity = identity_of(settings, every_n_epochs)
    check_identity(folder, identity)  # before anything is written
    with explain_full_disk(folder), CheckpointBank(folder) as target:
        write_identity(folder, settings, identity)
        parts = [
            Part(
                folder / "parts" / f"{start:07d}-{end:07d}",
                part_settings(settings, start, end),
                start,
                end,
                every_n_epochs,
                checkpoint_minutes,
            )
            for start, end in _ranges(folder / "parts", first, members, part)
        ]
        unfinished = sum(len(p) for p in parts if p.summary is None)
        total = sum(map(len, parts))
        done = total - unfinished
        with tqdm(total=total, desc="members", initial=done, bar_format=_BAR) as bar:
            for each in parts:
                if each.summary is None:
                    train_part(each, bar)
                _merge(each, target)
    summaries = [each.summary or {} for each in parts]
    left_out = [member for summary in summaries for member in summary["left_out"]]
    seconds = sum(summary["seconds"] for summary in summaries)
    diverged = f", {len(left_out)} of {total} members have diverged and are left out"
    trained = f"trained in {seconds:.0f} s, {len(parts)} parts"
    print(
        f"{folder}: {len(target)} networks{diverged if left_out else ''}\n"
        f"{trained if unfinished else 'there was nothing left to train'}\n"
        f"`lightning-bnn bank {folder}` looks into it, `lightning-bnn compare` and others read it"
    )
    return Outcome({"networks": len(target), "left_out": left_out, "seconds": seconds})


# ------------------------------------------------------------ what is to be done
def _ranges(folder: Path, start: int, members: int, size: int) -> Iterator[tuple[int, int]]:
    """Return the members of every part: existing parts, and new ones for others from a start."""
    existing = sorted(filter(None, map(_range_of, folder.glob("*-*"))))
    for first, last in [*existing, (members, members)]:
        end = min(first, members)
        yield from ((new, min(new + size, end)) for new in range(start, end, size))
        if first < members:
            yield first, last
        start = max(start, last)


def _range_of(folder: Path) -> tuple[int, int] | None:
    """Read the members of a part from the name of its folder, or return None."""
    name = _FOLDER.fullmatch(folder.name)
    if name is None or int(name[1]) >= int(name[2]):
        return None
    if folder.is_symlink():
        raise ValueError(f"{folder} must be a regular folder, but is a link.")
    return int(name[1]), int(name[2])


def _merge(part: Part, target: CheckpointBank) -> None:
    """Append the missing networks, so that an interruption neither loses nor repeats any."""
    if not part.bank.is_dir():
        return  # its networks are in the bank
    left_out = (part.summary or {})["left_out"]
    stored = {(record.get("member"), record.get("step")) for record in target.records}
    source, records = networks_of(part)
    new: dict[tuple[int, int], int] = {}
    for row, record in enumerate(records):
        network = record["member"], record["step"]
        if record["member"] not in left_out and network not in stored:
            new.setdefault(network, row)
    rows = list(new.values())
    for start in range(0, len(rows), _PART):
        chosen = rows[start : start + _PART]
        target.extend(source[chosen], [records[row] for row in chosen])
    merged = part.bank.with_name("merged")
    shutil.rmtree(merged, ignore_errors=True)
    part.bank.rename(merged)  # at once: half a bank could not be read
    shutil.rmtree(merged)


# ------------------------------------------------------------ settings
_MEMBERS = "model.init_args.members"
_BEGUN = ("networks.bin", "parts/*/part.json", "parts/*/checkpoints/*.ckpt")
"""Files that are not removed when the configuration changes: networks and checkpoints."""


def population_settings(path: Path, change: dict[str, Any]) -> dict[str, Any]:
    """Read a configuration with changes, and refuse one that cannot train a population.

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
    model["members"] = [first, last]
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
    """Expand the three groups, in which a class name may replace a group."""
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
            f"{trainer['devices']}; `first` divides a population among several."
        )


# ------------------------------------------------------------ identity
def identity_of(settings: dict[str, Any], every_n_epochs: int | None) -> dict[str, Any]:
    """Collect the settings that identify a population.

    Args:
        settings: the configuration.
        every_n_epochs: interval between stored networks.
    """
    return {**_by_full_name(settings), "every_n_epochs": every_n_epochs}


def check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder with another population, or with other files.

    Args:
        folder: the bank.
        identity: of the population.
    """
    recorded = _recorded_in(folder)
    if recorded is None:
        if folder.exists() and (not folder.is_dir() or any(map(_is_foreign, folder.iterdir()))):
            raise ValueError(
                f"`bank` {folder} exists and is not a population: choose a new or an empty folder."
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
    path, remedy = folder / "population.json", "restore a copy, or choose another folder"
    if not path.is_file():
        return None
    identity = read_json(path, remedy).get("settings")
    if not isinstance(identity, dict):
        raise ValueError(f"{path} is damaged: {remedy}.")
    return identity


def _is_foreign(path: Path) -> bool:
    """Return whether a file is a user's own, and not the remains of a killed command."""
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
    return {name: value for name, value in flat.items() if name != _MEMBERS}
