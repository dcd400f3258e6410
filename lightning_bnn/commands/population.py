"""`lightning-bnn population`: thousands of independent networks, in parts, into one bank."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.room import told_if_full
from lightning_bnn.commands.claims import claim, identity_of, refuse_others
from lightning_bnn.commands.parts import Part, networks_of, train_part
from lightning_bnn.commands.presets import preset_names, preset_text
from lightning_bnn.engines import ENGINES, Work
from lightning_bnn.settings_files import read_settings, settings_of_text

__all__ = ["population"]

_PART = 1000
_NAME = re.compile(r"(\d+)-(\d+)")
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} [{elapsed}<{remaining}{postfix}]"


def population(
    config: str,
    members: int,
    bank: str,
    part: int | None = None,
    every_n_epochs: int | None = None,
    engine: Literal["local", "ray", "slurm"] = "local",
    workers: int = 1,
    options: dict[str, Any] | None = None,
    change: dict[str, Any] | None = None,
    checkpoint_minutes: float = 5.0,
) -> None:
    """Train many independent networks of one kind, and keep them in one bank.

    Member k is the same network whatever else is trained with it. The same command goes on where it
    was stopped; with more members it adds those that are missing. If the data have `orders`, every
    member gets batches in an order of its own.

    Args:
        config: a configuration as `lightning-bnn fit` takes it, or the name of a preset.
        members: networks to have in the end.
        bank: folder of the bank.
        part: members that train side by side in one process; by default 1000, or what is left for
            each worker.
        every_n_epochs: keep the members while they train, too; by default only at the end.
        engine: local trains one part after the other, ray and slurm many at once.
        workers: how many parts at once (on Ray without an address: processes on this machine).
        options: for ray: address, num_cpus, num_gpus; for slurm: timeout_min, gpus_per_node, ...
        change: what to change in the configuration, such as '{"trainer.max_epochs": 2}'.
        checkpoint_minutes: how much work a crash may cost.
    """
    _check(members=members, part=part, workers=workers, every_n_epochs=every_n_epochs)
    if not checkpoint_minutes > 0:
        raise ValueError(f"`checkpoint_minutes` must be positive, got {checkpoint_minutes}.")
    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
    settings = _settings(Path(config), change or {})
    folder = Path(bank)
    own = identity_of(settings, every_n_epochs)
    size = part or min(_PART, -(-members // workers))
    kept = {"every_n_epochs": every_n_epochs, "minutes": checkpoint_minutes}
    refuse_others(folder, own)  # before anything is written
    with told_if_full(folder), CheckpointBank(folder) as target:
        claim(folder, settings, own)
        parts = list(_parts(folder, settings, members, size, kept))
        with _Watch(parts, target) as watch:
            unfinished = [p for p in parts if p.summary is None]
            if engine != "local" and unfinished:
                print(f"{len(unfinished)} parts wait for {engine}")
            if unfinished:
                ENGINES[engine](Work(train_part, unfinished, watch, workers, folder, options or {}))
            watch()
    print(_report(target, parts, trained=bool(unfinished)))


# ------------------------------------------------------------ what is to be done
def _check(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")


def _settings(path: Path, change: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with the changes."""
    named = str(path) in preset_names()
    if not path.exists() and not named:
        raise ValueError(
            f"`config`: there is no file {path}, and no preset of that name; "
            "`lightning-bnn presets` lists them."
        )
    held = settings_of_text(preset_text(str(path)), str(path)) if named else read_settings(path)
    if not {"model", "data"} <= held.keys():
        raise ValueError(f"`config`: {path} must have `model` and `data`, as for `fit`.")
    held["trainer"] = held.get("trainer") or {}
    held.pop("ckpt_path", None)
    _spell_out(held)
    for name, value in change.items():
        _put(held, name, value)
    _spell_out(held)
    if held["trainer"].get("fast_dev_run"):
        raise ValueError("`config`: a population cannot be a `fast_dev_run`.")
    if held["trainer"].setdefault("devices", 1) not in (1, [0], "1"):
        raise ValueError(
            "`config`: a part of a population trains on one device, got `trainer.devices` "
            f"{held['trainer']['devices']}; several run side by side by `engine` ray, or in one "
            "run of `fit` with `--trainer.strategy members`."
        )
    return held


def _spell_out(held: dict[str, Any]) -> None:
    """The groups as groups, where a class may stand for itself."""
    for name in ("model", "data", "trainer"):
        classes = name != "trainer"
        if classes and isinstance(held[name], str):
            held[name] = {"class_path": held[name]}
        if not isinstance(held[name], dict):
            raise ValueError(f"`config`: {name} must be a group of settings, got {held[name]!r}.")
        if classes:
            held[name] = {**held[name], "init_args": held[name].get("init_args") or {}}


def _put(held: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for key in path:
        held = held.setdefault(key, {})
        if not isinstance(held, dict):
            raise ValueError(f"`change`: {name} does not fit, {key} is no group of settings.")
    held[last] = value


def _parts(
    folder: Path, settings: dict[str, Any], members: int, size: int, kept: dict[str, Any]
) -> Iterator[Part]:
    """Those that are there, finished or not, and new ones for the members that no part has."""
    known = sorted(filter(None, map(_members_of, (folder / "parts").glob("*-*"))))
    start = 0
    for first, last in [*known, (members, members)]:
        for new in range(start, min(first, members), size):
            stop = min(new + size, first, members)
            yield _part(folder, settings, new, stop, kept)
        if first < members:
            yield _part(folder, settings, first, last, kept)
        start = max(start, last)


def _members_of(path: Path) -> tuple[int, int] | None:
    """Which members a folder is for; None if it is for none."""
    name = _NAME.fullmatch(path.name)
    if name is None or int(name[1]) >= int(name[2]):
        return None
    if path.is_symlink():
        raise ValueError(f"{path} must be a folder of its own, and is a link.")
    return int(name[1]), int(name[2])


def _part(
    folder: Path, settings: dict[str, Any], first: int, last: int, kept: dict[str, Any]
) -> Part:
    config = copy.deepcopy(settings)
    _put(config, "model.init_args.members", last - first)
    _put(config, "model.init_args.first_member", first)
    if config["data"]["init_args"].get("orders") is not None:
        _put(config, "data.init_args.orders", list(range(first, last)))
    rates = config["model"]["init_args"].get("member_rates")
    if rates is not None:
        if not isinstance(rates, list) or len(rates) < last:
            raise ValueError(f"`member_rates` must be one for each member, got {rates}.")
        _put(config, "model.init_args.member_rates", rates[first:last])
    path = folder / "parts" / f"{first:07d}-{last:07d}"
    return Part(path, config, first, last, **kept)


# ------------------------------------------------------------ while it runs
class _Watch:
    """Moves the bar, and puts finished parts into the bank, in order.

    Args:
        parts: of the population, in order.
        target: the bank.
    """

    def __init__(self, parts: Sequence[Part], target: CheckpointBank) -> None:
        self.parts, self.target = parts, target
        self._merged = 0
        self._bar = tqdm(
            total=sum(map(len, parts)),
            desc="members",
            initial=sum(len(part) for part in parts if part.summary is not None),
            bar_format=_BAR,
        )

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self) -> None:
        """Look once."""
        while self._merged < len(self.parts) and self.parts[self._merged].summary is not None:
            _merge(self.parts[self._merged], self.target)
            self._merged += 1
        self._bar.update(max(0, self._done() - self._bar.n))

    def _done(self) -> float:
        return sum(len(part) * part.progress for part in self.parts)


def _merge(part: Part, target: CheckpointBank) -> None:
    """Add what the bank does not have yet: a kill in between neither loses nor doubles any."""
    if not part.bank.is_dir():
        return  # its networks are in the bank
    summary = part.summary or {}
    source, records = networks_of(part)
    there = {(r.get("member"), r.get("step")) for r in target.records}
    out = set(summary["left_out"])
    rows = []
    for k, record in enumerate(records):
        which = record["member"], record["step"]
        if record["member"] not in out and which not in there:
            rows.append(k)
            there.add(which)
    for start in range(0, len(rows), _PART):
        chosen = rows[start : start + _PART]
        target.extend(source[chosen], [records[k] for k in chosen])
    rubbish = part.bank.with_name("merged")
    shutil.rmtree(rubbish, ignore_errors=True)
    part.bank.rename(rubbish)  # at once: half a bank could not be read
    shutil.rmtree(rubbish)


def _report(target: CheckpointBank, parts: Sequence[Part], trained: bool) -> str:
    folder, summaries = target.path, [part.summary or {} for part in parts]
    out = sorted(m for s in summaries for m in s["left_out"])
    seconds = sum(s["seconds"] for s in summaries)
    members = sum(map(len, parts))
    lines = [
        f"{folder}: {len(target)} networks"
        + (f", {len(out)} of {members} members have diverged and are left out" if out else ""),
        f"trained in {seconds:.0f} s, {len(parts)} parts"
        if trained
        else "there was nothing left to train",
        f"`lightning-bnn bank {folder}` looks into it, `lightning-bnn mass --networks {folder}` "
        "and others draw it",
    ]
    return "\n".join(lines)
