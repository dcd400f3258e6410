"""Runs of studies: how often they write checkpoints, and where they continue."""

import lightning as L
import pytest
import torch

from lightning_bnn.commands.presets import preset_text
from lightning_bnn.studies import runs
from lightning_bnn.studies.runs import Job, run_jobs

EPOCHS = 4


class Saves(L.Callback):
    """Notes the epochs that begin, and fails in one of them if it is to."""

    def __init__(self, stop_in=None):
        self.begun, self.stop_in = [], stop_in

    def on_train_epoch_start(self, trainer, pl_module):
        self.begun.append(trainer.current_epoch)
        if trainer.current_epoch == self.stop_in:
            raise RuntimeError("killed")


def job(*callbacks):
    changes = {"trainer.max_epochs": EPOCHS, "model.init_args.members": 2}
    return Job("run", "demo_ensemble", changes, callbacks, preset_text("demo_ensemble"))


def epochs_saved(folder):
    return sorted(int(p.stem.split("-")[0].split("=")[1]) for p in folder.rglob("*.ckpt"))


@pytest.mark.e2e
@pytest.mark.parametrize(("seconds", "continues_with"), [(0.0, 2), (1e6, 0)])
def test_what_an_interruption_costs_is_a_time_and_not_an_epoch(
    tmp_path, monkeypatch, seconds, continues_with
):
    monkeypatch.setattr(runs, "_BETWEEN_CHECKPOINTS", seconds)
    with pytest.raises(RuntimeError, match="killed"):
        run_jobs([job(Saves(stop_in=2))], tmp_path)
    saves = Saves()
    resumed = run_jobs([job(saves)], tmp_path)["run"].module()
    assert saves.begun == list(range(continues_with, EPOCHS))
    assert epochs_saved(tmp_path)[-1] == EPOCHS - 1  # the last epoch is always there
    whole = run_jobs([job()], tmp_path / "other")["run"].module()
    for one, two in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, two)
