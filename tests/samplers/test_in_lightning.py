"""Samplers in our modules: N is filled in, chains run side by side, resume is exact."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from module_cases import Blobs, network, same, state, trainer

from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.samplers import SGHMC, CyclicalSchedule

pytestmark = pytest.mark.filterwarnings("ignore")


def chains(members=3, **options):
    torch.manual_seed(0)
    return DeepEnsemble(
        network(dropout=0.2, batch_norm=True),
        members=members,
        optimizer=lambda p: SGHMC(p, lr=0.05, prior_precision=1.0, **options),
        lr_scheduler=lambda o: CyclicalSchedule(o, 7),
    )


class Stop(Exception):
    """The end of a run that was killed."""


class StopAfter(L.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 10:
            raise Stop


def test_a_resumed_chain_equals_an_uninterrupted_one(tmp_path):
    def run(*callbacks, ckpt_path=None):
        module = chains()
        going = trainer(*callbacks, enable_checkpointing=bool(callbacks), max_epochs=4)
        going.fit(module, Blobs(), ckpt_path=ckpt_path)
        return state(module)

    whole = run()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=0)
    with pytest.raises(Stop):
        run(keep, StopAfter())
    assert same(run(ckpt_path=tmp_path / "last.ckpt"), whole)


def test_chains_side_by_side_have_noise_of_their_own():
    module = chains()
    with torch.no_grad():
        for p in module.networks.parameters():
            p.copy_(p[:1].expand_as(p).clone())
    trainer(max_epochs=1).fit(module, Blobs())
    weight = module.networks[0].weight
    assert not torch.equal(weight[0], weight[1])
