"""MILE in Lightning: a posterior in closed form, energy errors that are stated, bad input."""

import pytest
from module_cases import Blobs, network, trainer

from lightning_bnn import samplers
from lightning_bnn.modules import MILE

pytestmark = pytest.mark.filterwarnings("ignore")


def sampler(descent=2, adapt=3, **options):
    return lambda p: samplers.MCLMC(p, 0.05, 2, descent_steps=descent, adapt_steps=adapt, **options)


def fitted(epochs=10, **options):
    module = MILE(network(), members=2, **{"optimizer": sampler(), "burn_in": 5, **options})
    run = trainer(max_epochs=epochs)
    run.fit(module, Blobs(batch_size=60))
    return module, run


def test_nothing_is_kept_of_the_descent_and_the_adaptation(recwarn):
    module, run = fitted()
    assert len(module.posterior().networks["0.weight"]) == 2 * 5
    assert not [w for w in recwarn if "burn_in" in str(w.message)]
    assert {"train/energy_variance", "train/memory_length"} <= set(run.callback_metrics)


@pytest.mark.parametrize("burn_in", [4, 5])
def test_networks_that_are_no_draws_are_warned_of(burn_in, recwarn):
    """Seven epochs of one step: five of them descend and adapt."""
    fitted(epochs=7, burn_in=burn_in)
    told = [str(w.message) for w in recwarn if "take a larger `burn_in`" in str(w.message)]
    assert len(told) == (burn_in < 5)


def test_epochs_of_several_steps_count_as_steps(recwarn):
    module = MILE(network(), optimizer=sampler(), burn_in=2, every_n_epochs=1)
    trainer(max_epochs=3).fit(module, Blobs(batch_size=20))
    assert not [w for w in recwarn if "take a larger `burn_in`" in str(w.message)]


def test_energy_errors_beyond_what_was_asked_for_are_stated(recwarn):
    """Steps that never adapt, with too little wanted."""
    fitted(optimizer=sampler(0, 0, energy_variance=1e-12), burn_in=0)
    told = [str(w.message) for w in recwarn if "more than 10 times" in str(w.message)]
    assert len(told) == 1
    assert "chains [0, 1] of 2" in told[0]
