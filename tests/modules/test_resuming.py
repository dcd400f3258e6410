"""A run that is interrupted twice, wherever that is, ends as if it had not been interrupted."""

import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from module_cases import Blobs, made, network, same, trainer
from runs import Plain, Points
from torch.utils.data import DataLoader

from lightning_bnn import _compat
from lightning_bnn.callbacks import CheckpointHarvester
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


class Hooks(L.Callback):
    """Notes what is called at the ends of epochs, with the steps before."""

    def __init__(self):
        self.seen = set()

    def on_validation_end(self, trainer, *_):
        self.seen.add((trainer.global_step, "validated"))

    def on_train_epoch_end(self, trainer, *_):
        self.seen.add((trainer.global_step, "ended"))


VALIDATION = {
    "every epoch": {},
    "every other": {"check_val_every_n_epoch": 2},
    "none": {"limit_val_batches": 0},
    "within": {"val_check_interval": 1},
}


def fitted(folder, batch_size, stop=None, newest=None, hooks=None, **options):
    """A run that is interrupted before a step; its weights, and its newest checkpoint."""
    torch.manual_seed(0)
    module = DeepEnsemble(
        mlp(2, [2], 1), likelihood=Bernoulli(), members=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=2.0),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )  # fmt: skip
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=1), StopsBefore(stop or 999)]
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[*callbacks, hooks or Hooks()], **options,
    )  # fmt: skip
    data = TwoGaussians(size=8, batch_size=batch_size, orders=2)
    try:
        trainer.fit(module, data, ckpt_path=newest, weights_only=False)
    except (KeyboardInterrupt, SystemExit):
        assert stop
    return module.state_dict(), max(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime)


PLACES = itertools.product((8, 4), (1, 3, 4), (1, 2))
CASES = [(*place, v) for place, v in zip(PLACES, itertools.cycle(VALIDATION), strict=False)]
"""Interruptions of epochs of two batches and of four, with every kind of validation."""


@pytest.mark.parametrize(("batch_size", "first", "then", "validation"), CASES)
def test_two_interruptions_change_nothing(tmp_path, batch_size, first, then, validation):
    """Weights, rates, and what is called when."""
    options, one, parts = VALIDATION[validation], Hooks(), Hooks()
    whole, _ = fitted(tmp_path / "whole", batch_size, hooks=one, **options)
    steps = 4 * 16 // batch_size
    assert first + then < steps
    newest = None
    for stop in (first + 1, first + then + 1, None):
        again, newest = fitted(tmp_path / "parts", batch_size, stop, newest, parts, **options)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert one.seen == parts.seen


def test_lightning_alone_repeats_batches(tmp_path, monkeypatch):
    """The negative control: the same run, with checkpoints as Lightning reads them."""
    monkeypatch.setattr(_compat, "cuts_epoch", lambda checkpoint: False)
    whole, newest = fitted(tmp_path / "whole", 4)[0], None
    for stop in (4, 5, None):
        again, newest = fitted(tmp_path / "parts", 4, stop, newest)
    assert not all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_modules_of_others_are_warned(tmp_path):
    def run(**options):
        harvester = CheckpointHarvester(tmp_path / "bank", every_n_steps=1)
        callbacks = [harvester, ModelCheckpoint(tmp_path, "it", every_n_train_steps=2)]
        L.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, max_steps=2,
            enable_model_summary=False, callbacks=callbacks,
        ).fit(Plain(0.0), DataLoader(Points(), len(Points()) // 2), **options)  # fmt: skip

    run()
    with pytest.warns(UserWarning, match="in the last batch of an epoch"):
        run(ckpt_path=tmp_path / "it.ckpt")


# ------------------------------------------------------------ other modules, other checkpoints
def from_a_file(folder):
    """A module that starts from weights in a file."""
    path = folder / "weights.pt"
    if not path.exists():
        torch.manual_seed(1)
        torch.save(network().state_dict(), path)
    return made("multi-mfvi", start_from=str(path))


KINDS = {
    "mile": lambda _: made("mile"),
    "hmc": lambda _: made("hmc", orbit_moves=2),
    "from a file": from_a_file,
}


def trained(folder, files, make, stop=None, resumed=None):
    """A run with two callbacks that write checkpoints, one of which names its newest ``last``."""
    callbacks = [
        ModelCheckpoint(folder, every_n_train_steps=1, save_last=True),
        ModelCheckpoint(folder / "second", filename="{step}-second"),
        StopsBefore(stop or 999),
    ]
    module = make(files)
    options = {"enable_checkpointing": True, "limit_train_batches": 3, "max_epochs": 4}
    try:
        trainer(*callbacks, **options).fit(module, Blobs(), ckpt_path=resumed, weights_only=True)
    except (KeyboardInterrupt, SystemExit):
        assert stop
    return module.state_dict()


@pytest.mark.parametrize(
    "kind", ["mile", pytest.param("hmc", marks=pytest.mark.e2e), "from a file"]
)
def test_the_last_of_two_kinds_of_checkpoints_goes_on(tmp_path, kind):
    """The negative control is a run that begins anew where it was interrupted."""
    make = KINDS[kind]
    whole = trained(tmp_path / "whole", tmp_path, make)
    parts = tmp_path / "parts"
    for stop, resumed in ((5, None), (8, "last"), (None, "last")):
        again = trained(parts, tmp_path, make, stop, resumed)
    cut = trained(tmp_path / "cut", tmp_path, make, 8)
    assert same(whole, again)
    assert not same(whole, cut)
