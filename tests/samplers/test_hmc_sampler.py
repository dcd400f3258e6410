"""HMC: chains beside each other, the trajectory, and how its steps adapt."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn.samplers import HMC
from weightsym.randomness import keyed_generator


def run(sampler, theta, steps, energy):
    def closure():
        value = energy(theta)
        (theta.grad,) = torch.autograd.grad(value.sum(), theta)
        return value

    for _ in range(steps):
        sampler.step(closure)


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
