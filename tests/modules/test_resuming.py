"""A run that is interrupted twice, wherever that is, ends as if it had not been interrupted."""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from module_cases import Blobs, made, network, trainer
from runs import Plain, Points
from torch.utils.data import DataLoader

from lightning_bnn import _compat, samplers
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.datamodules import TwoGaussians
from lightning_bnn.likelihoods import Bernoulli
from lightning_bnn.models import mlp
from lightning_bnn.modules import IVON, MFVI, DeepEnsemble

pytestmark = pytest.mark.filterwarnings("ignore")


def hooks(seen, stop=None):
    """Notes what is called at the ends of epochs, and interrupts a run before a step."""

    def interrupt(trainer, *_):
        if trainer.global_step == stop:
            raise KeyboardInterrupt

    return LambdaCallback(
        on_train_batch_start=interrupt,
        on_validation_end=lambda t, _: seen.add((t.global_step, "validated")),
        on_train_epoch_end=lambda t, _: seen.add((t.global_step, "ended")),
    )


VALIDATION = {
    "every epoch": {},
    "every other": {"check_val_every_n_epoch": 2},
    "none": {"limit_val_batches": 0},
    "within": {"val_check_interval": 1},
}


def fitted(folder, batch_size, stop=None, newest=None, seen=None, **options):
    """A run that is interrupted before a step; its weights, and its newest checkpoint."""
    torch.manual_seed(0)
    module = DeepEnsemble(
        mlp(2, [2], 1), likelihood=Bernoulli(), members=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=2.0),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )  # fmt: skip
    callbacks = (
        ModelCheckpoint(folder, every_n_train_steps=1),
        hooks(set() if seen is None else seen, stop),
    )
    options = {"max_epochs": 4, "num_sanity_val_steps": 0, "enable_checkpointing": True, **options}
    data = TwoGaussians(size=8, batch_size=batch_size, orders=2)
    try:
        trainer(*callbacks, **options).fit(module, data, ckpt_path=newest, weights_only=False)
    except (KeyboardInterrupt, SystemExit):
        assert stop
    return module.state_dict(), max(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime)


PLACES = itertools.product((8, 4), (1, 3), (1, 2))
CASES = [(*place, v) for place, v in zip(PLACES, itertools.cycle(VALIDATION), strict=False)]
"""Interruptions of epochs of two batches and of four, with every kind of validation."""


@pytest.mark.parametrize(("batch_size", "first", "then", "validation"), CASES)
def test_two_interruptions_change_nothing(tmp_path, batch_size, first, then, validation):
    """Weights, rates, and what is called when."""
    options, one, parts = VALIDATION[validation], set(), set()
    whole, _ = fitted(tmp_path / "whole", batch_size, seen=one, **options)
    steps = 4 * 16 // batch_size
    assert first + then < steps
    newest = None
    for stop in (first + 1, first + then + 1, None):
        again, newest = fitted(tmp_path / "parts", batch_size, stop, newest, parts, **options)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert one == parts


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
        keep, data = (
            ModelCheckpoint(tmp_path, "it", every_n_train_steps=2),
            DataLoader(Points(), 18),
        )
        run = trainer(harvester, keep, enable_checkpointing=True, max_epochs=None, max_steps=2)
        run.fit(Plain(0.0), data, **options)

    run()
    with pytest.warns(UserWarning, match="in the last batch of an epoch"):
        run(ckpt_path=tmp_path / "it.ckpt")


# ------------------------------------------------------------ seeds
def test_the_seed_is_that_of_torch_unless_one_is_given_or_loaded(tmp_path):
    torch.manual_seed(4)
    module = MFVI(network())
    assert (module.seed, MFVI(network(), seed=2).seed) == (4, 2)
    run = trainer(max_epochs=1)
    run.fit(module, Blobs())
    run.save_checkpoint(tmp_path / "it.ckpt")
    torch.manual_seed(5)
    for given, seed in ({}, 4), ({"seed": 2}, 2):
        loaded = MFVI.load_from_checkpoint(
            tmp_path / "it.ckpt", network=network(), weights_only=True, **given
        )
        assert loaded.seed == seed


class Own(DeepEnsemble):
    """Somebody else's optimizer."""

    def configure_optimizers(self):
        return samplers.SGLD(self.parameters(), 1e-3)


@pytest.mark.parametrize("make", [partial(made, "sghmc"), partial(made, "ivon"), Own])
def test_a_resumed_run_counts_its_own_data(make, tmp_path):
    arguments = (network(),) if make is Own else ()
    run = trainer(max_epochs=1)
    run.fit(make(*arguments), Blobs(n=20))
    run.save_checkpoint(tmp_path / "it.ckpt")
    run = trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="a run on 20 training examples, but now there are 40"):
        run.fit(make(*arguments), Blobs(n=40), ckpt_path=tmp_path / "it.ckpt", weights_only=True)
    assert run.optimizers[0].param_groups[0]["num_data"] == 40


def test_a_resumed_run_has_the_temperature_that_it_is_given(tmp_path):
    run = trainer(max_epochs=1)
    run.fit(IVON(network()), Blobs())
    run.save_checkpoint(tmp_path / "it.ckpt")
    cold, run = IVON(network(), temperature=0.1), trainer(max_epochs=2)
    run.fit(cold, Blobs(), ckpt_path=tmp_path / "it.ckpt", weights_only=True)
    assert run.optimizers[0].param_groups[0]["temperature"] == 0.1
