"""ScalaBL: the objective in closed form, the start, and the posterior of a linear adapter."""

import math

import pytest
import torch
from test_tfb import IN, RANK, Adapted, told_by
from torch import nn
from torch.distributions import Normal, kl_divergence

from lightning_bnn import likelihoods, methods, params
from lightning_bnn.methods import Batch, Run
from lightning_bnn.methods.scalabl import scaled_matrices


def state_of(net, members=1, **options):
    method = methods.ScalaBL(**options)
    return method, method.init(net, params.stack([params.of(net)] * members))


def test_the_start_is_the_adapter():
    net = Adapted()
    _, state = state_of(net, 3)
    for name, w in params.of(net).items():
        torch.testing.assert_close(state.stack()[name], w.expand(3, *w.shape))
    lengths = state.trained_stack()["down"].norm(dim=2)
    torch.testing.assert_close(lengths, torch.ones(3, RANK))


def test_divergence_is_that_of_normal_distributions():
    _, state = state_of(Adapted(), 2)
    state.log_std.data.uniform_(-2, 1)
    q = Normal(state.mean, state.log_std.exp())
    for std in (1.0, 0.3):
        torch.testing.assert_close(state.kl(std), kl_divergence(q, Normal(0.0, std)).sum(1))
    reverse = kl_divergence(Normal(0.0, 1.0), q).sum(1)
    assert (state.kl(1.0) - reverse).abs().min() > 0.1


def test_it_learns_the_exact_posterior_of_the_scales_of_a_linear_adapter():
    """With its matrices fixed, scales are the weights of a Bayesian linear regression."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(IN, RANK, False), nn.Linear(RANK, 5, False))
    x, noise = torch.randn(30, IN), 0.5
    y = net(x).detach() + noise * torch.randn(30, 5)
    method, state = state_of(net, elbo_samples=4)
    run = Run(net, likelihoods.Gaussian(std=noise), num_data=30)
    optimizer = torch.optim.Adam([state.mean, state.log_std], 0.05)
    steps = 500
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        method.losses(state, Batch((x,), y), run)["loss"].sum().backward()
        optimizer.step()
        schedule.step()
    unit = state.trained_stack()["0.weight"][0].detach()
    features = (x @ unit.mT)[:, None, :] * net[1].weight.detach()  # (examples, outputs, scales)
    design = features.reshape(-1, RANK).double()
    precision = design.mT @ design / noise**2 + torch.eye(RANK).double()
    mean = torch.linalg.solve(precision, design.mT @ y.reshape(-1).double() / noise**2)
    std = precision.diagonal().rsqrt()  # the best independent Gaussians
    found = method.posterior(state, run)
    torch.testing.assert_close(found.mean.detach().double(), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(found.log_std.detach().double(), std.log(), atol=0.1, rtol=0)
    assert (std.log() - math.log(method.init_std)).abs().min() > 0.2  # not the start


def test_a_row_of_the_first_factor_has_one_random_number():
    net = Adapted()
    method, state = state_of(net)
    batch = told_by(net)
    run = Run(net, num_data=batch.examples)
    drawn = method.posterior(state, run).sample(50)
    ratios = drawn["down"] / params.of(net)["down"]
    torch.testing.assert_close(ratios, ratios[..., :1].expand_as(ratios))
    assert ratios.std(0).min() > 0.01
    assert all((drawn[n] == drawn[n][0]).all() for n in ("up", "head.weight", "base.weight"))


class Low(nn.Module):
    """Two adapters under one name, and a head that is trained beside them."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleDict({"one": nn.Linear(8, 2), "two": nn.Linear(8, 3)})
        self.b = nn.ModuleDict({"one": nn.Linear(2, 9), "two": nn.Linear(3, 9)})
        self.head = nn.Linear(9, 4)


def test_first_factors_are_found_by_names_and_shapes():
    assert scaled_matrices(Low()) == {"a.one.weight": 2, "a.two.weight": 3}
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert scaled_matrices(plain) == {"0.weight": 4, "2.weight": 2}


def test_a_network_without_trained_matrices_is_refused():
    with pytest.raises(ValueError, match="is_trainable=True"):
        state_of(Adapted().requires_grad_(False))


def test_a_row_of_zeros_keeps_a_finite_scale():
    net = Adapted()
    net.down.data[0] = 0
    _, state = state_of(net)
    assert state.mean[0, 0] == 1
    torch.testing.assert_close(state.stack()["down"][0], params.of(net)["down"])
