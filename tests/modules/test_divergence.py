"""What diverges is said when it happens, and what was finite before is kept."""

import warnings

import lightning as L
import pytest
import torch
from module_cases import Blobs, made, network, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import samplers
from lightning_bnn.modules import HMC, SGHMC

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6
"""Of an epoch of `Blobs`."""


class Breaks(L.Callback):
    """Weights of some members stop being numbers after a step."""

    def __init__(self, after, members=slice(None)):
        self.after, self.members = after, members

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.after:
            for p in module.state.parameters():
                p.data[self.members] = torch.nan


def fitted(module, *callbacks, epochs=4, data=None):
    run = trainer(*callbacks, max_epochs=epochs, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, data or Blobs())
    return run, [str(w.message) for w in caught]


def chain(members=1, **options):
    options = {"optimizer": lambda p: samplers.SGHMC(p, lr=0.01), "every_n_steps": 2, **options}
    return SGHMC(network(), members=members, **options)


RULES = {
    "SGHMC": lambda p: samplers.SGHMC(p, lr=1e4),
    "SGLD": lambda p: samplers.SGLD(p, lr=1e4),
    "PreconditionedSGLD": lambda p: samplers.PreconditionedSGLD(p, lr=1e38),
}


@pytest.mark.parametrize(
    ("rule", "cyclical"), [("SGHMC", True), ("SGLD", False), ("PreconditionedSGLD", False)]
)
def test_a_rate_that_is_too_large_is_named_and_ends_the_run(rule, cyclical):
    options = {}
    if cyclical:
        options["lr_scheduler"] = lambda o: samplers.CyclicalSchedule(o, 6, 0.0)
    module = chain(optimizer=RULES[rule], prior_std=0.1, **options)
    run, told = fitted(module, epochs=20)
    found = [text for text in told if "not finite" in text]
    assert len(found) == 1
    assert "learning rate" in found[0]
    assert "data" in found[0]
    assert run.global_step < 20 * STEPS


@pytest.mark.frames
@pytest.mark.parametrize("in_bank", [False, True])
def test_a_chain_keeps_what_was_finite(in_bank, tmp_path, caplog):
    """Broken after step 13: six networks of steps 2 to 12 stay, and are judged."""
    module = chain(bank=str(tmp_path / "bank") if in_bank else None)
    run, told = fitted(module, Breaks(13))
    assert run.global_step == 14
    assert "6 networks of 1 chain were kept" in caplog.text
    networks = module.posterior().networks
    assert len(next(iter(networks.values()))) == 6
    assert all(t.isfinite().all() for t in networks.values())
    run.save_checkpoint(tmp_path / "it.ckpt")
    loaded = SGHMC.load_from_checkpoint(tmp_path / "it.ckpt", network=network(), weights_only=True)
    for one in (module, loaded):
        (found,) = trainer().test(one, DataLoader(TensorDataset(*Blobs().load().test), 16))
        assert 0 < found["test/nll"] < 2


@pytest.mark.parametrize("in_bank", [False, True])
def test_the_other_chains_go_on(in_bank, tmp_path):
    module = chain(members=3, bank=str(tmp_path / "bank") if in_bank else None)
    run, told = fitted(module, Breaks(13, [1]))
    assert run.global_step == 4 * STEPS
    assert [text for text in told if "Members [1] of 3 have weights that are not finite" in text]
    posterior = module.posterior()
    assert set(posterior.chains) == {0, 2}
    assert posterior.size == 2 * 12
    assert all(t.isfinite().all() for t in posterior.networks.values())


@pytest.mark.parametrize("name", ["ensemble", "mfvi", "swag", "bethe", "laplace"])
def test_a_run_in_which_all_have_diverged_ends(name):
    module = made(name)
    run, told = fitted(module, Breaks(8), epochs=10)
    assert run.global_step == 2 * STEPS
    assert len([text for text in told if "learning rate" in text and "not finite" in text]) == 1
    with pytest.raises(ValueError, match="training has diverged"):
        module.posterior()


@pytest.mark.bad_input
def test_hmc_of_data_that_are_not_numbers():
    x, y = Blobs().load().train
    x[3, 2] = torch.nan
    module = HMC(network(), optimizer=lambda p: samplers.HMC(p, 0.03, 3))
    with pytest.raises(ValueError, match=r"energy of chains \[0\] of 1 is not finite.*NaN"):
        fitted(module, data=DataLoader(TensorDataset(x, y), 20))


@pytest.mark.parametrize(("step", "moves"), [(1e3, False), (0.01, True)])
def test_hmc_says_that_a_chain_has_not_moved(step, moves):
    module = HMC(
        nn.Linear(6, 3), members=2, optimizer=lambda p: samplers.HMC(p, step, 3), every_n_steps=1
    )
    _, told = fitted(module, epochs=1)
    found = [text for text in told if "have hardly moved" in text]
    assert len(found) == (not moves)
    assert all("step_size" in text for text in found)
