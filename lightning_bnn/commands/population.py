"""`lightning-bnn population`: thousands of independent networks, in parts, into one bank."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.disk import explain_full_disk
from lightning_bnn.commands.parts import Part, networks_of, train_part
from lightning_bnn.commands.population_settings import (
    check_identity,
    identity_of,
    part_settings,
    population_settings,
    write_identity,
)
from lightning_bnn.engines import ENGINES, Work
from weightsym.arguments import check_count, check_positive

__all__ = ["population"]

_PART = 1000
_FOLDER = re.compile(r"(\d{7,8})-(\d{7,8})")
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

    Member k is the same network whatever else is trained with it. If the command was stopped, the
    same command continues where it stopped; with more members it adds those that are missing. If
    the data have `orders`, every member gets batches in an order of its own.

    Args:
        config: a configuration as for `lightning-bnn fit`, or the name of a preset.
        members: number of networks that the bank will have in the end.
        bank: folder of the bank.
        part: number of members that train side by side in one process; by default 1000, or what is
            left for each worker.
        every_n_epochs: also keep the members every so many epochs while they train; by default only
            at the end.
        engine: local trains one part after the other; ray and slurm train many at once.
        workers: number of parts that train at once (on Ray without an address: processes on this
            machine).
        options: options of the engine, for ray: address, num_cpus, num_gpus; for slurm:
            timeout_min, gpus_per_node, ...
        change: changes to the configuration, such as '{"trainer.max_epochs": 2}'.
        checkpoint_minutes: minutes between checkpoints, which is how much work a crash may cost.
    """
    check_count("members", members)
    check_count("part", 1 if part is None else part)
    check_count("workers", workers)
    check_count("every_n_epochs", 1 if every_n_epochs is None else every_n_epochs)
    check_positive("checkpoint_minutes", checkpoint_minutes)
    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
    settings = population_settings(Path(config), change or {})
    folder = Path(bank)
    identity = identity_of(settings, every_n_epochs)
    size = part or min(_PART, -(-members // workers))
    check_identity(folder, identity)  # before anything is written
    with explain_full_disk(folder), CheckpointBank(folder) as target:
        write_identity(folder, settings, identity)
        parts = [
            Part(
                folder / "parts" / f"{first:07d}-{last:07d}",
                part_settings(settings, first, last),
                first,
                last,
                every_n_epochs,
                checkpoint_minutes,
            )
            for first, last in _ranges(folder / "parts", members, size)
        ]
        with _merging(parts, target) as merge_finished:
            unfinished = [p for p in parts if p.summary is None]
            if engine != "local" and unfinished:
                print(f"{len(unfinished)} parts wait for {engine}")
            if unfinished:
                work = Work(train_part, unfinished, merge_finished, workers, folder, options or {})
                ENGINES[engine](work)
            merge_finished()
    print(_report(target, parts, trained=bool(unfinished)))


# ------------------------------------------------------------ what is to be done
def _ranges(folder: Path, members: int, size: int) -> Iterator[tuple[int, int]]:
    """The members of every part: those that have a folder, and new ones for whoever has none."""
    existing = sorted(filter(None, map(_range_of, folder.glob("*-*"))))
    start = 0
    for first, last in [*existing, (members, members)]:
        end = min(first, members)
        yield from ((new, min(new + size, end)) for new in range(start, end, size))
        if first < members:
            yield first, last
        start = max(start, last)


def _range_of(folder: Path) -> tuple[int, int] | None:
    """Read the members of a part from the name of its folder, if it is one."""
    name = _FOLDER.fullmatch(folder.name)
    if name is None or int(name[1]) >= int(name[2]):
        return None
    if folder.is_symlink():
        raise ValueError(f"{folder} must be a folder of its own, and is a link.")
    return int(name[1]), int(name[2])


# ------------------------------------------------------------ while it runs
@contextmanager
def _merging(parts: Sequence[Part], target: CheckpointBank) -> Iterator[Callable[[], None]]:
    """Gives a function that moves the bar, and puts finished parts into the bank, in order."""
    waiting = list(parts)
    finished = sum(len(part) for part in parts if part.summary is not None)
    total = sum(map(len, parts))
    with tqdm(total=total, desc="members", initial=finished, bar_format=_BAR) as bar:

        def merge_finished() -> None:
            while waiting and waiting[0].summary is not None:
                _merge(waiting[0], target)
                del waiting[0]
            done = sum(len(part) * part.progress for part in parts)
            bar.update(max(0, done - bar.n))

        yield merge_finished


def _merge(part: Part, target: CheckpointBank) -> None:
    """Add what the bank does not have yet: a kill in between neither loses nor doubles any."""
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


def _report(target: CheckpointBank, parts: Sequence[Part], trained: bool) -> str:
    folder, summaries = target.path, [part.summary or {} for part in parts]
    left_out = sum(len(summary["left_out"]) for summary in summaries)
    seconds = sum(summary["seconds"] for summary in summaries)
    members = sum(map(len, parts))
    diverged = f", {left_out} of {members} members have diverged and are left out"
    work = f"trained in {seconds:.0f} s, {len(parts)} parts"
    return (
        f"{folder}: {len(target)} networks{diverged if left_out else ''}\n"
        f"{work if trained else 'there was nothing left to train'}\n"
        f"`lightning-bnn bank {folder}` looks into it, `lightning-bnn mass --networks {folder}` "
        "and others draw it"
    )
