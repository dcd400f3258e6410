"""A part that is interrupted twice, wherever that is, ends as if it had not been interrupted."""

from datetime import timedelta

import lightning as L
import pytest
import torch

from lightning_bnn.commands.parts import CheckpointsBeforeTheEnd
from lightning_bnn.datamodules import TwoGaussians
from lightning_bnn.likelihoods import Bernoulli
from lightning_bnn.models import mlp
from lightning_bnn.modules import DeepEnsemble


class StopsBefore(L.Callback):
    """Interrupts a run before a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step >= self.step:
            raise KeyboardInterrupt


def fitted(folder, batch_size, stop=None, newest=None):
    """A run that is interrupted before a step; its weights, and its newest checkpoint."""
    torch.manual_seed(0)
    module = DeepEnsemble(
        mlp(2, [2], 1), likelihood=Bernoulli(), members=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=2.0),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )  # fmt: skip
    checkpoints = CheckpointsBeforeTheEnd(folder, save_top_k=1, train_time_interval=timedelta(0))
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[checkpoints, StopsBefore(stop or 999)],
    )  # fmt: skip
    data = TwoGaussians(size=8, batch_size=batch_size, orders=2)
    try:
        trainer.fit(module, data, ckpt_path=newest, weights_only=False)
    except (KeyboardInterrupt, SystemExit):
        assert stop
    return module.state_dict(), max(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime)


@pytest.mark.parametrize("batch_size", [8, 4], ids=["an epoch is a batch", "four batches"])
@pytest.mark.parametrize("first", [1, 3, 4])
@pytest.mark.parametrize("then", [1, 2])
def test_two_interruptions_change_nothing(tmp_path, batch_size, first, then):
    whole, _ = fitted(tmp_path / "whole", batch_size)
    steps = 4 * 16 // batch_size
    assert first + then < steps
    once = fitted(tmp_path / "parts", batch_size, first + 1)[1]
    twice = fitted(tmp_path / "parts", batch_size, first + then + 1, once)[1]
    again, _ = fitted(tmp_path / "parts", batch_size, None, twice)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
