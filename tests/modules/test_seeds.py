"""Seeds of noise and numbers of data: what decides them, and what a resumed run makes of them."""

from functools import partial

import pytest
import torch
from module_cases import Blobs, made, network, trainer

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
