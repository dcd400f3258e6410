"""Samplers on posteriors that are known: a logistic regression by quadrature."""

import pytest
import torch
from torch import nn

from lightning_bnn.samplers import HMC, MCLMC

G = torch.Generator().manual_seed(0)
MIXED = torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.3], [0.0, 0.0, 1.0]], dtype=torch.float64)
INPUTS = torch.randn(30, 3, generator=G, dtype=torch.float64) @ MIXED
CENTRE = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
ONES = torch.rand(30, generator=G, dtype=torch.float64) < torch.sigmoid(INPUTS @ CENTRE)
SIGNS = torch.where(ONES, 1.0, -1.0).double()


def logistic(theta, prior_std=2.0):
    """Negative log-posterior of three coefficients, for any number of chains."""
    misfit = -nn.functional.logsigmoid(theta @ INPUTS.T * SIGNS).sum(-1)
    return misfit + theta.square().sum(-1) / (2 * prior_std**2)


def quadrature(prior_std):
    """Means and standard deviations, to four digits: the grid goes seven deviations far."""
    steps = torch.linspace(-6, 6, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(*(c + steps for c in CENTRE))
    energies = logistic(grid, prior_std)
    shares = (energies.min() - energies).softmax(0)
    mean = shares @ grid
    return mean, (shares @ (grid - mean).square()).sqrt()


def chain(sampler, theta, energy, transitions):
    def closure():
        value = energy(theta)
        (theta.grad,) = torch.autograd.grad(value.sum(), theta)
        return value

    kept = []
    for _ in range(transitions):
        sampler.step(closure)
        kept.append(theta.detach().clone())
    return torch.stack(kept)


def matches(draws, prior_std):
    """Means within 0.05 standard deviations, and these within five per cent."""
    mean, std = quadrature(prior_std)
    shift = ((draws.mean(0) - mean) / std).abs()
    ratio = draws.std(0) / std
    return bool((shift < 0.05).all()) and bool(((ratio - 1).abs() < 0.05).all())


SAMPLERS = {
    "MCLMC": lambda theta: MCLMC([theta], 0.3, 5, 5e-4, descent_steps=0, adapt_steps=30),
    "HMC": lambda theta: HMC([theta], 0.3, 6, adapt_steps=20, jitter=0.5),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_logistic_regression_is_sampled_as_quadrature_has_it(name):
    """Both have its moments, and so each other's; those of another prior are told apart."""
    first = torch.randn(400, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theta = nn.Parameter(first)
    sampler = SAMPLERS[name](theta)
    chain(sampler, theta, logistic, 40)
    draws = chain(sampler, theta, logistic, 25).flatten(0, 1)
    assert matches(draws, 2.0)
    assert not matches(draws, 1.8)
