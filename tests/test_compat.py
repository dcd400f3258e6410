"""Private names of Lightning: these tests fail when one of them goes."""

import lightning as L
import pytest
import torch
from runs import QUIET, Plain, Points
from torch.utils.data import DataLoader

from lightning_bnn import _compat
from weightsym.forward import runners_of


def test_made_by_cli():
    from lightning.pytorch.core.mixins import hparams_mixin

    assert not _compat.made_by_cli()
    with hparams_mixin._given_hyperparameters_context({"a": 1}, "x"):
        assert _compat.made_by_cli()


@pytest.mark.filterwarnings("ignore")
def test_whose_loaders_are_tested():
    class Module(Plain):
        seen = None

        def test_step(self, batch, index):
            type(self).seen = _compat.tests_datamodule(self.trainer)

    class Data(L.LightningDataModule):
        def test_dataloader(self):
            return DataLoader(Points(), 6)

    torch.manual_seed(0)
    module, run = Module(), L.Trainer(**QUIET)
    run.test(module, datamodule=Data(), verbose=False)
    assert Module.seen is True
    run.test(module, DataLoader(Points(), 6), verbose=False)
    assert Module.seen is False


def test_what_a_checkpoint_says_would_be_put_above_the_command_line():
    from lightning.pytorch.cli import LightningCLI

    assert callable(LightningCLI._parse_ckpt_path)


def test_the_trainer_of_a_module():
    module, run = Plain(), L.Trainer(**{**QUIET, "max_epochs": 1})
    assert _compat.trainer_of(module) is None
    assert runners_of(module) == (None, None)
    assert runners_of(torch.nn.Linear(1, 1)) == (None, None)
    run.fit(module, DataLoader(Points(), 6))
    assert _compat.trainer_of(module) is run
    assert runners_of(module) == (run, None)
