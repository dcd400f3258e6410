"""The bank holds exactly the weights after the steps that were asked for, whatever happens."""

import os
import time
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from runs import Plain, Recorder, Stacked, built, fit

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.writer import BankWriter
from lightning_bnn.callbacks import CheckpointHarvester, harvester
from lightning_bnn.harvest import Schedule


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


def reading(path):
    return CheckpointBank(path, "r")


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({"every_n_steps": 5}, [5, 10]),
        ({"every_n_steps": 2, "start": 7}, [8, 10, 12]),
        ({"every_n_epochs": 1}, [6, 12]),
        ({"every_n_epochs": 2}, [12]),
        ({}, [6, 12]),
    ],
)
def test_schedules(tmp_path, schedule, steps):
    recorder = Recorder()
    fit(built(Plain), CheckpointHarvester(tmp_path, **schedule), recorder)
    bank = reading(tmp_path)
    assert [r["step"] for r in bank.records] == steps
    for row, step in enumerate(steps):
        close(bank[row], recorder.weights[step])
    assert bank.records[0]["lr"] == 0.3
    assert bank.records[0]["epoch"] == (steps[0] - 1) // 6


def test_steps_that_are_jumped_over():
    schedule = Schedule(every_n_steps=3)
    assert [s for s in range(2, 20, 2) if schedule.after_step(s - 2, s)] == [4, 6, 10, 12, 16, 18]
    assert not schedule.after_step(6, 6)
    assert Schedule(every_n_epochs=2, start=3).after_epoch(4)
    assert not Schedule(every_n_epochs=2, start=5).after_epoch(4)
    assert Schedule(every_n_steps=10).count(100, 3) == 11
    assert Schedule(every_n_epochs=1).count(100, float("inf")) == float("inf")


def test_an_overridden_decision(tmp_path):
    class Primes(CheckpointHarvester):
        def should_harvest(self, before, step):
            return step > before and step in (2, 3, 5, 7, 11)

    fit(built(Plain), Primes(tmp_path, every_n_epochs=99))
    assert [r["step"] for r in reading(tmp_path).records] == [2, 3, 5, 7, 11]


def test_several_networks(tmp_path):
    recorder = Recorder("")
    fit(built(Stacked), recorder, CheckpointHarvester(tmp_path, every_n_steps=4))
    bank, chosen = reading(tmp_path), [0, 1, 2]
    assert [(r["step"], r["member"]) for r in bank.records] == [
        (s, m) for s in (4, 8, 12) for m in chosen
    ]
    count = len(chosen)
    for k, step in enumerate((4, 8, 12)):
        expected = {n: t[chosen] for n, t in recorder.weights[step].items()}
        close(bank[count * k : count * (k + 1)], expected)


def test_metrics_and_type(tmp_path):
    class Logging(Plain):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("loss", loss)
            return loss

    fit(built(Logging), CheckpointHarvester(tmp_path, dtype=torch.float16))
    bank = reading(tmp_path)
    assert 0 < bank.records[1]["metrics"]["loss"] < 5
    assert bank.read("0.weight", slice(0, 1), slice(0, 3)).dtype == torch.float16
    assert bank[0]["0.weight"].dtype == torch.float32


def test_beside_weight_averaging(tmp_path):
    """The iterates are kept, not their average, wherever the callback stands."""
    for order in (1, -1):
        recorder, path = Recorder(), tmp_path / str(order)
        callbacks = [EMAWeightAveraging(decay=0.5), CheckpointHarvester(path)][::order]
        fit(built(Plain), recorder, *callbacks)
        close(reading(path)[-1], recorder.weights[12])


def test_fast_dev_run_writes_nothing(tmp_path):
    fit(built(Plain), CheckpointHarvester(tmp_path / "bank"), fast_dev_run=True)
    assert not (tmp_path / "bank").exists()


def test_default_folder_stays_that_of_the_first_run(tmp_path):
    options = {"logger": L.pytorch.loggers.CSVLogger(tmp_path), "enable_checkpointing": True}
    trainer = fit(built(Plain), CheckpointHarvester(), max_epochs=1, **options)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    options["logger"] = L.pytorch.loggers.CSVLogger(tmp_path)
    again = fit(built(Plain), CheckpointHarvester(), ckpt_path=tmp_path / "x.ckpt", **options)
    assert again.log_dir != trainer.log_dir
    assert [r["step"] for r in reading(f"{trainer.log_dir}/bank").records] == [6, 12]


# ------------------------------------------------------------ crashes
class Crash(L.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise RuntimeError("crash")


def test_resume_after_a_crash(tmp_path):
    """Checkpoint at 5, crash at 8: the resumed run holds every step once."""
    recorder = Recorder()
    fit(built(Plain, 0.0), recorder)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=5, filename="last", save_top_k=-1)
    harvest = CheckpointHarvester(tmp_path / "bank", every_n_steps=1)
    with pytest.raises(RuntimeError, match="crash"):
        fit(built(Plain, 0.0), harvest, Crash(8), keep, enable_checkpointing=True)
    assert len(reading(tmp_path / "bank")) >= 7
    again = CheckpointHarvester(tmp_path / "bank", every_n_steps=1)
    resumed = Recorder()
    with pytest.warns(UserWarning, match="networks from after the checkpoint are dropped"):
        fit(built(Plain, 0.0), again, resumed, ckpt_path=tmp_path / "last.ckpt")
    bank = reading(tmp_path / "bank")
    assert [r["step"] for r in bank.records] == list(range(1, 13))
    expected = recorder.weights[1:6] + resumed.weights[1:]
    for found, weights in zip(bank, expected, strict=True):
        close(found, weights)


def test_a_checkpoint_knows_of_networks_that_are_on_disk(tmp_path, monkeypatch):
    """However slow the disk is: a run that is killed then, and resumed, lacks none of them."""
    extend, known = CheckpointBank.extend, []

    def slow(bank, *arguments):
        time.sleep(0.03)
        extend(bank, *arguments)

    class Checkpoints(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            known.append((harvest.state_dict()["rows"], len(reading(tmp_path))))

    monkeypatch.setattr(CheckpointBank, "extend", slow)
    harvest = CheckpointHarvester(tmp_path, every_n_steps=1)
    fit(built(Plain), harvest, Checkpoints(), max_epochs=1)
    assert known == [(k, k) for k in range(1, 7)]


def test_a_run_that_starts_anew_on_the_bank_of_another_says_so(tmp_path):
    """Killed before the first checkpoint, then started again: both runs are there, in order."""
    with warnings.catch_warnings():  # the negative control: a bank is begun in silence
        warnings.filterwarnings("error", message=".*networks of another run")
        with pytest.raises(RuntimeError, match="crash"):
            fit(built(Plain), CheckpointHarvester(tmp_path, every_n_steps=1), Crash(6))
    told = rf"{tmp_path} has 6 networks of another run \(steps 1 to 6\); .* begins at step 0"
    with pytest.warns(UserWarning, match=told):
        fit(built(Plain), CheckpointHarvester(tmp_path, every_n_steps=1), max_epochs=1)
    steps = [r["step"] for r in reading(tmp_path).records]
    assert steps == [*range(1, 7), *range(1, 7)]


def test_epochs_are_not_lost_when_checkpoints_are_made_in_validation(tmp_path):
    class Validated(Plain):
        def val_dataloader(self):
            return torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(torch.randn(6, 6), torch.zeros(6).long()), 6
            )

    keep = ModelCheckpoint(tmp_path, monitor="val", save_top_k=-1, filename="{epoch}")
    options = {"max_epochs": 3, "default_root_dir": tmp_path, "enable_checkpointing": True}
    with pytest.raises(RuntimeError, match="crash"):
        fit(built(Validated), CheckpointHarvester(tmp_path / "bank"), Crash(9), keep, **options)
    options["ckpt_path"] = tmp_path / "epoch=0.ckpt"
    fit(built(Validated), CheckpointHarvester(tmp_path / "bank"), **options)
    assert [r["epoch"] for r in reading(tmp_path / "bank").records] == [0, 1, 2]


def test_an_error_of_the_disk_ends_harvesting(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(CheckpointBank, "extend", broken)
    with pytest.warns(UserWarning, match="Writing to .* failed: no space left on device"):
        assert fit(built(Plain), CheckpointHarvester(tmp_path, every_n_steps=1)).global_step == 12
    monkeypatch.undo()
    with CheckpointBank(tmp_path) as bank:  # the lock is gone
        writer = BankWriter(bank)
        writer.put({}, [{}])
        with pytest.raises(RuntimeError, match="Writing to"):
            writer.flush()
        writer.close()


def test_a_run_that_ends_before_its_first_epoch(tmp_path):
    with pytest.warns(UserWarning, match="has harvested nothing"):
        fit(built(Plain), CheckpointHarvester(tmp_path), max_steps=3, max_epochs=-1)


# ------------------------------------------------------------ mistakes
def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    free = type("Usage", (), {"free": 3000})
    monkeypatch.setattr(harvester.shutil, "disk_usage", lambda path: free)
    with pytest.raises(ValueError, match=r"13 harvests of .* MB do not fit into the 0.003 MB"):
        fit(built(Plain), CheckpointHarvester(tmp_path, every_n_steps=1))


def test_a_lost_bank_is_reported(tmp_path):
    trainer = fit(built(Plain), CheckpointHarvester(tmp_path / "bank"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    os.rename(tmp_path / "bank", tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="has 0 networks, but the checkpoint expects 1"):
        fit(built(Plain), CheckpointHarvester(tmp_path / "bank"), ckpt_path=tmp_path / "x.ckpt")
