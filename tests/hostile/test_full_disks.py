"""A disk that is full at any write: the bank is as it was before, training goes on, and is told."""

import errno
import io
import os
import shutil
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from runs import Plain, built, fit
from small_banks import networks

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester

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
