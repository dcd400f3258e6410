"""What diverges is said when it happens, and what was finite before is kept."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from module_cases import Blobs, fitted, made, network, said, saved, trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import samplers
from lightning_bnn.modules import HMC, SGHMC

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6
"""Of an epoch of `Blobs`."""


def breaks(after, members=slice(None)):
    """Weights of some members stop being numbers after a step."""

    def spoil(trainer, module, *_):
        if trainer.global_step == after:
            for p in module.state.parameters():
                p.data[members] = torch.nan

    return LambdaCallback(on_train_batch_end=spoil)


def run_of(module, *callbacks, epochs=4, words="not finite"):
    """The run of a module, and what it says."""
    run = trainer(*callbacks, max_epochs=epochs, limit_val_batches=0)
    return run, said(words, run.fit, module, Blobs())


def chain(members=1, **options):
    options = {"optimizer": lambda p: samplers.SGHMC(p, lr=0.01), "every_n_steps": 2, **options}
    return SGHMC(network(), members=members, **options)


@pytest.mark.frames
@pytest.mark.parametrize("in_bank", [False, True])
def test_chains_keep_what_was_finite(in_bank, tmp_path, caplog):
    """Broken after step 13: six networks of steps 2 to 12 stay, and are judged."""
    bank = {"bank": str(tmp_path / "bank") if in_bank else None}
    module = chain(**bank)
    run, _ = run_of(module, breaks(13))
    assert run.global_step == 14
    assert "6 networks of 1 chain were collected" in caplog.text
    path = saved(run, tmp_path / "it.ckpt")
    loaded = SGHMC.load_from_checkpoint(path, network=network(), weights_only=True)
    for one in (module, loaded):
        networks = one.posterior().networks
        assert all(len(t) == 6 and t.isfinite().all() for t in networks.values())
        (found,) = trainer().test(one, DataLoader(TensorDataset(*Blobs().load().test), 16))
        assert 0 < found["test/nll"] < 2


@pytest.mark.parametrize("in_bank", [False, True])
def test_the_other_chains_go_on(in_bank, tmp_path):
    module = chain(members=3, bank=str(tmp_path / "bank") if in_bank else None)
    run, told = run_of(module, breaks(13, [1]))
    assert run.global_step == 4 * STEPS
    assert [text for text in told if "Members [1] of 3 have weights that are not finite" in text]
    posterior = module.posterior()
    assert set(posterior.chains) == {0, 2}
    assert posterior.size == 2 * 12
    assert all(t.isfinite().all() for t in posterior.networks.values())


@pytest.mark.parametrize("name", ["ensemble", "mfvi", "swag", "bethe", "laplace"])
def test_a_run_in_which_all_have_diverged_ends(name):
    module = made(name)
    run, told = run_of(module, breaks(8), epochs=10)
    assert run.global_step == 2 * STEPS
    assert len([text for text in told if "learning rate" in text]) == 1
    with pytest.raises(ValueError, match="training has diverged"):
        module.posterior()


@pytest.mark.bad_input
def test_hmc_of_data_that_are_not_numbers():
    x, y = Blobs().load().train
    x[3, 2] = torch.nan
    module = HMC(network(), optimizer=lambda p: samplers.HMC(p, 0.03, 3))
    with pytest.raises(ValueError, match=r"energy of chains \[0\] of 1 is not finite.*NaN"):
        fitted(module, DataLoader(TensorDataset(x, y), 20))
