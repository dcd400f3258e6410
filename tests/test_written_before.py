"""Checkpoints and banks that an earlier version has written are read as they were meant."""

import shutil
from pathlib import Path

import pytest
import torch
from module_cases import MODULES, Blobs, made, trainer
from written_before.make import KINDS

from lightning_bnn.bank import CheckpointBank

FILES = Path(__file__).parent / "written_before"
PREDICTED = torch.load(FILES / "predicted.pt", weights_only=True)


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_predicts_as_it_did(name):
    module = made(name, seed=1, width=4, **KINDS[name])
    run = trainer()
    run.validate(module, Blobs(), ckpt_path=FILES / f"{name}.ckpt", weights_only=True)
    found = module(PREDICTED["inputs"])
    torch.testing.assert_close(found, PREDICTED[name])
    untrained = made(name, seed=1, width=4, **KINDS[name])
    untrained.example_input_array = PREDICTED["inputs"]
    assert not torch.allclose(untrained(PREDICTED["inputs"]), PREDICTED[name], atol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_from_a_checkpoint(name):
    module = made(name, seed=1, width=4, **KINDS[name])
    run = trainer(max_epochs=3)
    run.fit(module, Blobs(), ckpt_path=FILES / f"{name}.ckpt", weights_only=True)
    assert run.current_epoch == 3


@pytest.mark.parametrize("name", KINDS)
def test_its_settings_make_the_module(name):
    given = made(name, width=4, **KINDS[name])
    parts = {"network": given.template, "optimizer": given.make_optimizer}
    loaded = type(given).load_from_checkpoint(
        FILES / f"{name}.ckpt", **parts, map_location="cpu", weights_only=True
    )
    torch.testing.assert_close(loaded(PREDICTED["inputs"]), PREDICTED[name])


def test_chains_in_a_bank(tmp_path):
    shutil.copytree(FILES / "chains", tmp_path / "chains")
    module = made("sghmc", seed=1, width=4, bank=str(tmp_path / "chains"))
    trainer().validate(module, Blobs(), ckpt_path=FILES / "in a bank.ckpt", weights_only=True)
    torch.testing.assert_close(module(PREDICTED["inputs"]), PREDICTED["in a bank"])


@pytest.mark.parametrize("name", ["harvested", "chains"])
def test_a_bank(name, tmp_path):
    shutil.copytree(FILES / name, tmp_path / name)
    bank = CheckpointBank(tmp_path / name, "r")
    networks = bank[list(range(len(bank)))]
    torch.testing.assert_close(networks, PREDICTED[f"{name}/networks"], rtol=0, atol=0)
    assert [dict(r) for r in bank.records] == PREDICTED[f"{name}/records"]
    with CheckpointBank(tmp_path / name) as grown:
        grown.extend({n: t[:1] for n, t in networks.items()}, [{"step": 99}])
    assert len(CheckpointBank(tmp_path / name, "r")) == len(bank) + 1


def test_every_kind_of_module_is_here():
    kinds = {type(made(name)).__name__ for name in KINDS}
    assert kinds == {type(made(name)).__name__ for name in MODULES}
