"""What a run costs is what was computed: a network, an epoch, a leapfrog step."""

import json

import pytest
import torch
from module_cases import Blobs, adam, network, trainer
from runs import Plain

from lightning_bnn import samplers
from lightning_bnn.callbacks import TrainingCost
from lightning_bnn.modules import HMC, MFVI, MILE, DeepEnsemble

pytestmark = [pytest.mark.filterwarnings("ignore")]


def hmc(parameters):
    return samplers.HMC(parameters, 1e-3, leapfrog_steps=4, adapt_steps=0)


def mclmc(parameters):
    return samplers.MCLMC(parameters, 1e-3, steps=3, descent_steps=2, adapt_steps=2)


EPOCHS = 4
CASES = {
    "ensemble": (lambda: DeepEnsemble(network(), members=3, optimizer=adam), 10, 3 * EPOCHS),
    "two draws": (
        lambda: MFVI(network(), members=3, optimizer=adam, elbo_samples=2), 10, 6 * EPOCHS
    ),
    "hmc": (lambda: HMC(network(), members=2, optimizer=hmc), 60, 2 * 5 * EPOCHS),
    "mile": (lambda: MILE(network(), members=2, optimizer=mclmc), 60, 2 * (2 * 6 + 2 * 7)),
}  # fmt: skip


def cost(module, batch, folder):
    trainer(TrainingCost(), max_epochs=EPOCHS, default_root_dir=folder).fit(
        module, Blobs(batch_size=batch)
    )
    return json.loads((folder / "cost.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_counted_whatever_the_method_does(case, tmp_path):
    make, batch, expected = CASES[case]
    torch.manual_seed(0)
    found = cost(make(), batch, tmp_path)
    assert found["gradients"] == pytest.approx(expected)
    assert found["seconds"] > 0


def test_modules_of_others_have_seconds_only(tmp_path):
    assert set(cost(Plain(), 10, tmp_path)) == {"seconds"}
