"""A disk that is full at any write: the bank is as it was before, training goes on, and is told."""

import builtins
import errno
import io
import os
import shutil
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from runs import Plain, Recorder, built, fit
from small_banks import networks

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import (
    CheckpointHarvester,
    PosteriorDoctor,
    PosteriorFigures,
    TrainingCost,
)

TOLD = "is full: networks are left out until there is room"


class Disk:
    """Every call that writes is counted; some of them find no room.

    What succeeds does not wait for a disk.
    """

    def __init__(self, patch, failing=()):
        self.calls, self.failing, self.armed = 0, failing, True
        opened, own = Path.open, ("ab", "xb", "r+b")
        patch.setattr(os, "fsync", self.counted(lambda fd: None))
        for module, name in ((os, "replace"), (os, "link"), (os, "mkdir"), (shutil, "copyfile")):
            patch.setattr(module, name, self.counted(getattr(module, name)))
        patch.setattr(
            Path,
            "open",
            lambda path, mode="r", *a, **k: (
                HalfWritten(self, path, mode) if mode in own else opened(path, mode, *a, **k)
            ),
        )

    def full(self):
        self.calls += self.armed
        if self.armed and self.calls in self.failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    def counted(self, call):
        return lambda *arguments, **more: self.full() or call(*arguments, **more)


class SmallDisk:
    """A folder for so many bytes: what does not fit is written in part, as by an operating system.

    The error comes with the next write, which finds no room at all.
    """

    def __init__(self, patch, folder, room=10**9):
        self.folder, self.room, self.used = folder, room, 0
        opened = io.open

        def small(path, mode="r", buffering=-1, encoding=None, *more, **options):
            ours = not isinstance(path, int) and folder in Path(path).absolute().parents
            if not ours or not set(mode) & set("wax+"):
                return opened(path, mode, buffering, encoding, *more, **options)
            mode_of_file = mode.replace("b", "").replace("t", "")
            if buffering == 0:
                return PartlyWritten(self, path, mode_of_file)
            file = WithoutNumber(self, path, mode_of_file)
            file = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(file)
            return file if "b" in mode else io.TextIOWrapper(file, encoding)

        for module in (io, builtins):
            patch.setattr(module, "open", small)


class PartlyWritten(io.FileIO):
    def __init__(self, disk, path, mode):
        super().__init__(path, mode)
        self.disk = disk

    def write(self, content):
        room = self.disk.room - self.disk.used
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = super().write(memoryview(content).cast("B")[:room])
        self.disk.used += count
        return count


class WithoutNumber(PartlyWritten):
    """A file that libraries cannot write to behind its back."""

    def fileno(self):
        raise io.UnsupportedOperation


class HalfWritten(io.FileIO):
    """A file of which only the first half of what does not fit is written."""

    def __init__(self, disk, path, mode):
        super().__init__(path, mode)
        self.disk = disk

    def write(self, content):
        try:
            self.disk.full()
        except OSError:
            super().write(content[: len(content) // 2])
            raise
        return super().write(content)


# ------------------------------------------------------------ the bank
def operations(folder):
    """What is done to a bank, and what it does to the steps that it holds."""
    stack = networks(9)

    def append(bank, step):
        bank.append({n: t[step] for n, t in stack.items()}, step=step)

    def absorb(bank):
        bank.absorb(CheckpointBank(folder / "other", "r"))

    def appended(step):
        return lambda bank: append(bank, step), lambda steps: [*steps, step]

    with CheckpointBank(folder / "other") as other:
        for step in (6, 7):
            append(other, step)
    return stack, [
        *map(appended, range(5)),
        (lambda bank: bank.truncate(min(4, len(bank))), lambda steps: steps[:4]),
        appended(5),
        (absorb, lambda steps: [*steps, 6, 7]),
        appended(8),
    ]


def carried_out(folder, stack, chain, disk):
    """Every operation happens, or raises and leaves all as it was; how many of each."""
    steps, failed = [], 0
    with CheckpointBank(folder) as bank:
        disk.armed = True
        for act, result in chain:
            try:
                act(bank)
                steps = result(steps)
            except OSError as error:
                failed += error.errno == errno.ENOSPC
                held = [r["step"] for r in bank.records]
                assert held in (steps, result(steps)[: len(held)])  # a part of what is absorbed
                steps = held
            assert [r["step"] for r in bank.records] == steps
        disk.armed = False
    for mode in "ar":
        with CheckpointBank(folder, mode) as bank:
            assert [r["step"] for r in bank.records] == steps
            assert not steps or all(torch.equal(bank[:][n], stack[n][steps]) for n in stack)
    assert {p.name for p in folder.iterdir()} <= {".lock", "manifest.jsonl", "networks.bin"}
    return failed


@pytest.mark.parametrize("length", [1, 6])
def test_a_bank_on_a_disk_that_is_full_at_any_call(length, tmp_path, monkeypatch):
    stack, chain = operations(tmp_path)
    disk = Disk(monkeypatch)

    def failed(*calls):
        disk.armed, disk.calls, disk.failing = False, 0, calls
        return carried_out(tmp_path / str(calls[:1]), stack, chain, disk)

    assert failed() == 0  # the control
    every = range(1, disk.calls + 1, length)
    counts = [failed(*range(first, first + length)) for first in every]
    assert len(counts) > 30 / length
    assert sum(counts) > 0
    assert max(counts) >= length // 2


# ------------------------------------------------------------ training


@pytest.mark.parametrize("room", [0, 1, 100, 400, 700, 1500, 2500])
def test_a_disk_that_fills_up_does_not_end_a_run(room, tmp_path, monkeypatch):
    """Training goes on as it would have, with one warning, and the bank holds what fitted."""
    whole = Recorder()
    fit(built(Plain), CheckpointHarvester(tmp_path / "whole", every_n_steps=1), whole)
    disk = SmallDisk(monkeypatch, tmp_path / "small", room)
    recorder, harvest = Recorder(), CheckpointHarvester(tmp_path / "small", every_n_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(built(Plain), harvest, recorder)
    assert disk.used == room
    assert sum(TOLD in str(w.message) for w in told) == 1
    for found, weights in zip(recorder.weights, whole.weights, strict=True):
        assert all(torch.equal(found[n], weights[n]) for n in weights)
    if (tmp_path / "small" / "manifest.jsonl").exists():
        bank = CheckpointBank(tmp_path / "small", "r")
        bank.verify()
        assert len(bank) < 12
        for row, record in enumerate(bank.records):
            found = bank[row]
            assert all(torch.equal(found[n], t) for n, t in whole.weights[record["step"]].items())


@pytest.mark.parametrize("seen", ["before it is written", "while it is written"])
def test_a_full_disk_has_one_outcome_whenever_it_is_seen(seen, tmp_path, monkeypatch):
    """Full after the second network, free again after the fourth."""

    class Filled(L.Callback):
        full = False

        def on_train_batch_end(self, trainer, *_):
            harvest._writer.flush()
            type(self).full = trainer.global_step in (2, 3)

    free, extend = shutil.disk_usage, CheckpointBank.extend

    def usage(path):
        full = Filled.full and seen == "before it is written"
        return free(path)._replace(free=900) if full else free(path)

    def extended(bank, *arguments):
        if Filled.full:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        extend(bank, *arguments)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(CheckpointBank, "extend", extended)
    harvest = CheckpointHarvester(tmp_path, every_n_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(built(Plain), harvest, Filled(), max_epochs=1)
    assert [r["step"] for r in CheckpointBank(tmp_path, "r").records] == [1, 2, 5, 6]
    assert sum(TOLD in str(w.message) for w in told) == 1


@pytest.mark.parametrize("room", [0, 10])
@pytest.mark.parametrize("callback", [PosteriorFigures, PosteriorDoctor, TrainingCost])
def test_figures_and_reports_without_room_do_not_end_a_run(
    callback, room, tmp_path, monkeypatch, undrawn
):
    """They are missing, with one warning, and nothing torn is in their place."""
    whole, recorder = Recorder(), Recorder()
    fit(built(Plain), callback(), whole, default_root_dir=tmp_path / "whole")
    assert any(path.is_file() for path in (tmp_path / "whole").rglob("*"))  # the control
    SmallDisk(monkeypatch, tmp_path / "small", room)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(built(Plain), callback(), recorder, default_root_dir=tmp_path / "small")
    assert sum("No space left" in str(w.message) for w in told) == 1
    for found, weights in zip(recorder.weights, whole.weights, strict=True):
        assert all(torch.equal(found[n], weights[n]) for n in weights)
    assert not any(path.is_file() for path in (tmp_path / "small").rglob("*"))
