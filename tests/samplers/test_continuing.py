"""What a sampler of any kind goes on from: weights, its state, and no random numbers of others."""

import copy

import pytest
import torch
from torch import nn

from lightning_bnn.samplers import HMC, IVON, MCLMC, SGHMC, SGLD, SMILE, PreconditionedSGLD

N, STEPS = 10, 40
SAMPLERS = {
    "sgld": lambda p, **o: SGLD(p, 0.05, num_data=N, **o),
    "sghmc": lambda p, **o: SGHMC(p, 0.02, num_data=N, momentum=0.9, **o),
    "preconditioned": lambda p, **o: PreconditionedSGLD(p, 0.003, num_data=N, **o),
    "ivon": lambda p, **o: IVON(p, 0.1, N, prior_precision=1.0, hessian_momentum=0.9, **o),
    "smile": lambda p, **o: SMILE(p, 0.3, N, descent_steps=5, adapt_steps=20, **o),
    "hmc": lambda p, **o: HMC(p, 0.01, 4, adapt_steps=18, **o),
    "mclmc": lambda p, **o: MCLMC(p, 0.05, 3, descent_steps=5, adapt_steps=15, **o),
}
STOPS = 2, 5, 6, 7, 12, 17, 19, 22, 25, 30
"""In the middle and at the end of every phase of those that tune themselves."""


def begun(name, seed=0):
    draws = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    params = [nn.Parameter(draws[:3]), nn.Parameter(draws[3:])]
    groups = {
        "smile": [{"params": params, "stacked": True}],
        "sghmc": [{"params": params[:1], "lr": 0.01}, {"params": params[1:]}],
    }
    return params, SAMPLERS[name](groups.get(name, params), seed=seed)


def step(params, sampler):
    def closure():
        sampler.zero_grad()
        energy = sum((p.square() + p**4).sum(-1) for p in params) / 2
        energy.sum().backward()
        return energy.detach()

    sampler.step(closure)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_state_dict_is_complete(name):
    """In single precision, wherever it is saved; another seed goes elsewhere."""
    (whole, sampler), (other, another) = begun(name), begun(name, seed=1)
    states, before = {}, torch.get_rng_state()
    for k in range(STEPS):
        if k in STOPS:
            states[k] = copy.deepcopy(whole), copy.deepcopy(sampler.state_dict())
        if name == "smile":
            assert sampler.is_tuning == (k <= 25)
        step(whole, sampler)
        step(other, another)
    assert torch.equal(before, torch.get_rng_state())
    for k, (first, state) in states.items():
        resumed, anew = begun(name, seed=5)
        for p, value in zip(resumed, first, strict=True):
            p.data.copy_(value)
        anew.load_state_dict(state)
        torch.manual_seed(k)
        for _ in range(k, STEPS):
            step(resumed, anew)
        assert all(map(torch.equal, resumed, whole))
        torch.testing.assert_close(anew.state_dict(), sampler.state_dict(), rtol=0, atol=0)
        if name in ("smile", "mclmc"):
            assert torch.equal(anew.energy_variances, sampler.energy_variances)
    assert not any(map(torch.equal, whole, other))
