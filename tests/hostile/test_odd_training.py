"""What only training does: random numbers, and what a forward leaves behind for the next one."""

import copy
import functools

import pytest
import torch
from cases import Forward
from torch import nn

from weightsym import (
    canonicalise,
    discover,
    flip,
    mass,
    min_mass,
    permute,
    random_permutations,
    random_scales,
    random_signs,
    rescale,
)
from weightsym import params as P
from weightsym.verify import random_element


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def three_layers(forward, persistent=True, **buffers):
    layers = {name: nn.Linear(a, b) for name, a, b in (("a", 4, 8), ("b", 8, 8), ("c", 8, 3))}
    net = Forward(forward, **layers)
    for name, tensor in buffers.items():
        net.register_buffer(name, tensor, persistent)
    return net.double()


# ---------------------------------------------------------------------- what is written
def recurrent(s, x):
    h = torch.tanh(s.a(x) + s.b(s.h))
    s.h = h.mean(0, keepdim=True).detach()
    return s.c(h)


def covariance(s, x):
    h = torch.relu(s.a(x))
    y = s.c(h @ s.t)
    if s.training:
        s.t.mul_(0.9).add_(0.1 * (h.T @ h / len(h)).detach())
    return y


def of_another_layer(s, x):
    h = torch.relu(s.a(x))
    y = s.c(torch.relu(s.b(h)) - s.t)
    if s.training:
        s.t.copy_(0.9 * s.t + 0.1 * h.mean(0).detach())
    return y


def of_the_step_before(s, x):
    h = torch.relu(s.a(x))
    y = s.c(h / s.t)
    if s.training:
        s.t.copy_(0.9 * s.t + 0.1 * h.abs().mean(0).detach())
    return y


def of_one_unit(s, x):
    h = torch.relu(s.a(x))
    y = s.c(h / s.t)
    if s.training:
        s.t.mul_(0.9).add_(0.1 * h[:, 0].abs().mean().detach())
    return y


def never_read(s, x):
    h = torch.relu(s.a(x))
    if s.training:
        s.t.mul_(0.9).add_(0.1 * h.mean(0).detach())
    return s.c(h)


WRITTEN = {
    # network, exchangeable units and scales of its first layer
    "state": (lambda: three_layers(recurrent, h=torch.zeros(1, 8)), 8, 0),
    "hidden state": (lambda: three_layers(recurrent, False, h=torch.zeros(1, 8)), 0, 0),
    "covariance": (lambda: three_layers(covariance, t=torch.eye(8)), 8, 0),
    "statistic of another layer": (lambda: three_layers(of_another_layer, t=torch.zeros(8)), 8, 8),
    "statistic of the step before": (
        lambda: three_layers(of_the_step_before, t=torch.ones(8)),
        8,
        8,
    ),
    "statistic of one unit": (lambda: three_layers(of_one_unit, t=torch.ones(())), 7, 8),
    "statistic that is not read": (lambda: three_layers(never_read, t=torch.zeros(8)), 8, 8),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_a_forward_leaves_behind_moves_with_its_units(kind):
    """The law: act, then run in training, then compare in evaluation."""
    build, units, scales = WRITTEN[kind]
    net, x = build(), torch.randn(6, 4).double()
    sym = discover(net, x)
    assert sum(g.units for g in sym.permutations) == units
    assert sym.scaling_dof == scales
    orders, scales, flips = random_permutations(sym), random_scales(sym), random_signs(sym)

    def moved(params):
        return flip(rescale(permute(params, sym, orders), sym, scales), sym, flips)

    other = copy.deepcopy(net)
    other.load_state_dict({n: t.clone() for n, t in moved(P.of(net)).items()})
    for one in (net, other):
        one.train()
        for k in range(3):
            one(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)).double())
    torch.testing.assert_close(other.eval()(x), net.eval()(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(P.of(other), moved(P.of(net)), rtol=1e-10, atol=1e-12)
    if "t" in sym.touched:  # a negative control
        assert not torch.allclose(P.of(other)["t"], P.of(net)["t"])


def without_scale(s, x):
    h = torch.relu(s.a(x))
    if s.training:
        s.t.copy_((h.mean(0) / (1 + h.norm())).detach())
    return s.c(h)


def test_statistics_that_nothing_reads_take_no_scale_away():
    sym = discover(three_layers(without_scale, t=torch.zeros(8)), torch.randn(6, 4).double())
    assert "t" not in sym.touched
    assert sym.scaling_dof == 8


def test_counters_and_unread_buffers_are_no_constants():
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 2)
    )
    net.register_buffer("shadow", torch.zeros(8, 4))
    sym = discover(net, torch.randn(5, 4))
    assert not sym.constants
    net.train()(torch.randn(5, 4))
    net.shadow += 1
    canonicalise(P.of(net), sym)


# ---------------------------------------------------------------------- numbers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0])
def test_masses_of_half_precision(dtype, size):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sym = discover(net, torch.randn(2, 64))
    params = {n: (size * t).to(dtype) for n, t in P.of(net).items()}
    exact = {n: t.double() for n, t in params.items()}
    torch.testing.assert_close(mass(params, sym), mass(exact, sym), rtol=1e-6, atol=0)
    found, true = min_mass(params, sym), min_mass(exact, sym)
    torch.testing.assert_close(found.minimum, true.minimum, rtol=1e-6, atol=0)


@functools.cache
def small():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    return net, discover(net, torch.randn(2, 3))


@pytest.mark.parametrize("seed", [55, 114, 126, 335, *range(20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_permutations_of_each_other(seed, dtype):
    net, sym = small()
    generator = torch.Generator().manual_seed(seed)
    params = {n: t.to(dtype) for n, t in P.of(net).items()}
    row = torch.randn(3, generator=generator)
    rows = [row[torch.randperm(3, generator=generator)] for _ in range(8)]
    params["0.weight"] = torch.stack(rows).to(dtype)
    other = random_element(params, sym, generator)
    for by in ("norm", "max"):
        one, two = (canonicalise(p, sym, permutation=by) for p in (params, other))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
