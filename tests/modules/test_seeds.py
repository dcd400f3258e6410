"""Seeds of noise and numbers of data: what decides them, and what a resumed run makes of them."""

import pytest
import torch
from module_cases import Blobs, made, network, trainer
from processes import on_devices

from lightning_bnn import samplers
from lightning_bnn.modules import IVON, MFVI, SGHMC, DeepEnsemble

pytestmark = pytest.mark.filterwarnings("ignore")


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


def drawn(seed, module_seed=None):
    torch.manual_seed(0)
    net = network()
    torch.manual_seed(seed)
    module = SGHMC(net, optimizer=lambda p: samplers.SGHMC(p, 1e-3), seed=module_seed)
    trainer(max_epochs=1).fit(module, Blobs())
    return torch.nn.utils.parameters_to_vector(module.parameters())


def test_runs_after_other_seeds_have_other_noise():
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(drawn(1, 3), drawn(2, 3))


@pytest.mark.parametrize("name", ["sghmc", "ivon"])
def test_a_resumed_run_counts_its_own_data(name, tmp_path):
    run = trainer(max_epochs=1)
    run.fit(made(name), Blobs(n=20))
    run.save_checkpoint(tmp_path / "it.ckpt")
    run = trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="a run on 20 training examples, and now there are 40"):
        run.fit(made(name), Blobs(n=40), ckpt_path=tmp_path / "it.ckpt", weights_only=True)
    assert run.optimizers[0].param_groups[0]["num_data"] == 40


def test_a_resumed_run_has_the_temperature_that_it_is_given(tmp_path):
    run = trainer(max_epochs=1)
    run.fit(IVON(network()), Blobs())
    run.save_checkpoint(tmp_path / "it.ckpt")
    cold, run = IVON(network(), temperature=0.1), trainer(max_epochs=2)
    run.fit(cold, Blobs(), ckpt_path=tmp_path / "it.ckpt", weights_only=True)
    assert run.optimizers[0].param_groups[0]["temperature"] == 0.1


def noisy(folder, seed):
    """Members of two processes, in one run and in two."""

    def run(epochs, checkpoint=None):
        torch.manual_seed(0)
        module = DeepEnsemble(
            network(), members=4, optimizer=lambda p: samplers.SGLD(p, 1e-3, seed=seed)
        )
        options = {"strategy": "members", "devices": 2}
        fitted = trainer(max_epochs=epochs, num_sanity_val_steps=0, **options)
        fitted.fit(module, Blobs(), ckpt_path=checkpoint, weights_only=True)
        fitted.save_checkpoint(folder + "/it.ckpt")
        return torch.cat([p.detach().flatten(1) for p in module.state.parameters()], 1)

    whole = run(2)
    run(1)
    return whole.tolist(), run(2, folder + "/it.ckpt").tolist()


@pytest.mark.e2e
@pytest.mark.parametrize("seed", [None, 5])
def test_members_of_processes_go_on_with_noise_of_their_own(seed, tmp_path):
    whole, resumed = on_devices(2, noisy, str(tmp_path), seed)[0]
    assert whole == resumed
