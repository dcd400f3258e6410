"""HMC: exact moments, acceptance, resume, torch's manners."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn.samplers import HMC

COVARIANCE = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64) / 50
MEAN = torch.tensor([0.4, -0.7], dtype=torch.float64)
CHAINS = 4000


def gaussian(theta):
    z = theta - MEAN
    return (z @ torch.linalg.inv(COVARIANCE) * z).sum(-1) / 2


def run(sampler, theta, steps, energy=gaussian):
    def closure():
        value = energy(theta)
        (theta.grad,) = torch.autograd.grad(value.sum(), theta)
        return value

    for _ in range(steps):
        sampler.step(closure)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_steps_are_varied_evenly_around_their_size(jitter):
    generator = torch.Generator().manual_seed(0)
    sampler = HMC([nn.Parameter(torch.zeros(1))], 0.1, 1, jitter=jitter)
    (group,) = sampler.param_groups
    found = torch.tensor([sampler._jitter(group, generator) for _ in range(2000)])
    assert found.mean().item() == pytest.approx(1, abs=0.02)
    assert found.std().item() == pytest.approx(jitter / 3**0.5, abs=0.01)
    assert found.min() >= 1 - jitter - 1e-6
    assert found.max() <= 1 + jitter + 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_moments_of_a_correlated_gaussian(temperature):
    """From anywhere, with a step size that was adapted from a bad one."""
    torch.manual_seed(0)
    theta = nn.Parameter(torch.randn(CHAINS, 2, dtype=torch.float64))
    sampler = HMC([theta], 1e-3, 8, temperature=temperature, adapt_steps=60)
    run(sampler, theta, 90)
    kept, acceptance = [], []
    for _ in range(10):
        run(sampler, theta, 4)
        kept.append(theta.detach().clone())
        acceptance.append(float(sampler.acceptance.mean()))
    samples = torch.cat(kept)
    assert 0.6 < sum(acceptance) / 10 < 0.95
    scale = COVARIANCE.diagonal().sqrt()
    assert ((samples.mean(0) - MEAN).abs() < 0.03 * scale).all()
    error = (torch.cov(samples.T) - temperature * COVARIANCE).abs()
    assert (error < 0.03 * temperature * scale.prod()).all()


def test_chains_do_not_depend_on_each_other_but_for_the_step_size():
    """Another chain that diverges leaves the others as they were."""
    ends = []
    for other in (0.0, 1e30):
        theta = nn.Parameter(torch.tensor([[0.3], [other]], dtype=torch.float64))
        run(HMC([theta], 0.3, 5), theta, 10, lambda t: t.square().square().sum(-1))
        ends.append(theta.detach().clone())
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[1][1] == 1e30


def test_a_trajectory_is_leapfrog():
    """Three steps by hand, on two tensors, accepted."""
    a, b = (nn.Parameter(torch.full((1, k), 0.5, dtype=torch.float64)) for k in (20, 3))
    sampler = HMC([a, b], 1e-3, 3, jitter=0.0, temperature=2.0, seed=4)

    def closure():
        value = (a.cos().mean(1) + b.square().sum(1)).exp()
        a.grad, b.grad = torch.autograd.grad(value.sum(), (a, b))
        return value

    from weightsym.randomness import keyed_generator

    momentum = torch.empty(23, dtype=torch.float64).normal_(generator=keyed_generator(4, 0))
    q = torch.full((23,), 0.5, dtype=torch.float64)

    def gradient(q):
        q = q.clone().requires_grad_()
        value = (q[:20].cos().mean() + q[20:].square().sum()).exp() / 2
        return torch.autograd.grad(value, q)[0]

    for _ in range(3):
        momentum = momentum - 5e-4 * gradient(q)
        q = q + 1e-3 * momentum
        momentum = momentum - 5e-4 * gradient(q)
    sampler.step(closure)
    torch.testing.assert_close(torch.cat([a[0], b[0]]).detach(), q)


@pytest.mark.parametrize("size", [0.03, 2.0])
def test_adaptation_is_dual_averaging(size):
    """The sums that Hoffman and Gelman (2014) start from, not the recursion that they end with."""
    theta = nn.Parameter(torch.randn(50, 3, dtype=torch.float64))
    sampler = HMC([theta], size, 2, adapt_steps=12, target_acceptance=0.7)
    misses, logs = [], []
    for t in range(1, 13):
        run(sampler, theta, 1, lambda x: x.square().square().sum(-1))
        misses.append(0.7 - float(sampler.acceptance.mean()))
        logs.append(math.log(10 * size) - math.sqrt(t) / 0.05 * sum(misses) / (t + 10))
        if t < 12:
            assert sampler.step_size == pytest.approx(math.exp(logs[-1]))
    shares = [k**-0.75 * math.prod(1 - j**-0.75 for j in range(k + 1, 13)) for k in range(1, 13)]
    assert sum(shares) == pytest.approx(1)  # the first one forgets where it started
    mean = sum(share * log for share, log in zip(shares, logs, strict=True))
    assert sampler.step_size == pytest.approx(math.exp(mean))
    run(sampler, theta, 3, lambda x: x.square().square().sum(-1))
    assert sampler.step_size == pytest.approx(math.exp(mean))  # and stays there


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"target_acceptance": 1.0}, "`target_acceptance` must be between"),
        ({"jitter": 1.0}, "`jitter` must be"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        HMC([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.bad_input
def test_a_closure_is_needed():
    with pytest.raises(ValueError, match="`closure` must be given"):
        HMC([nn.Parameter(torch.zeros(2, 2))]).step()
    theta = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="one energy for each chain"):
        HMC([theta]).step(lambda: theta.square().sum())
    groups = [{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(2)]
    with pytest.raises(ValueError, match="`params` must be one group"):
        HMC(groups)
