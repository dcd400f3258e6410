"""MILE in Lightning: a posterior in closed form, energy errors that are stated, bad input."""

import pytest
import torch
from module_cases import Blobs, network, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import params as P
from lightning_bnn import samplers
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.modules import HMC, MILE

pytestmark = pytest.mark.filterwarnings("ignore")


def sampler(descent=2, adapt=3, **options):
    return lambda p: samplers.MCLMC(p, 0.05, 2, descent_steps=descent, adapt_steps=adapt, **options)


def fitted(epochs=10, **options):
    module = MILE(network(), members=2, **{"optimizer": sampler(), "burn_in": 5, **options})
    run = trainer(max_epochs=epochs)
    run.fit(module, Blobs(batch_size=60))
    return module, run


def test_the_posterior_of_a_bayesian_linear_regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64, generator=generator)
    y = x.sum(1, keepdim=True) + 0.7 * torch.randn(40, 1, dtype=torch.float64, generator=generator)
    precision = x.T @ x / 0.7**2 + 4 * torch.eye(4).double()
    mean = torch.linalg.solve(precision, x.T @ y / 0.7**2)[:, 0]
    module = MILE(
        nn.Linear(4, 1, bias=False).double(), members=400, likelihood=Gaussian(std=0.7).double(),
        prior_std=0.5, burn_in=44, every_n_steps=3,
        optimizer=lambda p: samplers.MCLMC(
            p, 0.05, 4, 1e-4, descent_steps=10, descent_lr=0.05, adapt_steps=30
        ),
    )  # fmt: skip
    run = trainer(max_epochs=74, precision="64-true")
    run.fit(module, DataLoader(TensorDataset(x, y), batch_size=40))
    assert run.callback_metrics["train/energy_variance"] < 1e-3
    rows = P.ravel(module.posterior().networks, stacked=True)[0]
    covariance = torch.linalg.inv(precision)
    scale = covariance.diagonal().sqrt()
    assert ((rows.mean(0) - mean).abs() < 0.08 * scale).all()
    error = (torch.cov(rows.T) - covariance).abs() / scale[:, None] / scale
    assert (error < 0.08).all()


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


def test_chains_start_from_trained_networks(tmp_path):
    torch.save(network().state_dict(), tmp_path / "it.pt")
    module = MILE(network(), start_from=str(tmp_path / "it.pt"))
    wanted = torch.load(tmp_path / "it.pt")
    assert torch.equal(module.member_stack()["0.weight"][0], wanted["0.weight"])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MILE(network(0.2)), "`network` has dropout"),
        (
            lambda: MILE(network(), optimizer=samplers.HMC).configure_optimizers(),
            "`optimizer` HMC is not lightning_bnn.samplers.MCLMC",
        ),
        (
            lambda: HMC(network(), optimizer=samplers.MCLMC).configure_optimizers(),
            "`optimizer` MCLMC is not lightning_bnn.samplers.HMC",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
