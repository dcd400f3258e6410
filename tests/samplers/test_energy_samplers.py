"""MCLMC and HMC: known moments, the dynamics step by step, descent, and how steps adapt."""

import math
from functools import partial

import pytest
import torch
from scipy.integrate import solve_ivp
from torch import nn

from lightning_bnn.samplers import HMC, MCLMC
from lightning_bnn.samplers.isokinetic import bend, refresh
from lightning_bnn.samplers.mclmc import Place, integrate, memory_length
from weightsym.networks.randomness import keyed_generator

D = 30
SCALES = torch.logspace(-0.5, 0.5, D, dtype=torch.float64)


def gaussian(theta):
    return (theta / SCALES).square().sum(-1) / 2


def run(sampler, theta, steps, energy=gaussian):
    def closure():
        value = energy(theta)
        (theta.grad,) = torch.autograd.grad(value.sum(), theta)
        return value

    kept = []
    for _ in range(steps):
        sampler.step(closure)
        kept.append(theta.detach().clone())
    return torch.stack(kept, 1)


def start(chains=128, numbers=D):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(chains, numbers, dtype=torch.float64, generator=generator)
    return nn.Parameter(value * (SCALES if numbers == D else 1))


def second_moments(wanted, temperature=1.0):
    """Of draws, over those of the law."""
    theta = start()
    sampler = MCLMC(
        [theta], 0.5, 4, wanted, descent_steps=0, adapt_steps=60, temperature=temperature
    )
    run(sampler, theta, 60)
    draws = run(sampler, theta, 80)
    assert sampler.energy_variances.median().item() == pytest.approx(wanted, rel=0.5)
    return draws, draws.square().mean((0, 1)) / (temperature * SCALES.square())


# ------------------------------------------------------------ the law of the draws
def test_the_moments_of_a_gaussian():
    """Large energy errors would bias them."""
    draws, ratio = second_moments(1e-4, 0.25)
    assert (second_moments(0.05)[1] - 1).abs().max() > 0.3
    assert ratio.mean().item() == pytest.approx(1, abs=0.02)
    assert ((ratio - 1).abs() < 0.08).all()
    assert (draws.mean((0, 1)).abs() < 0.05 * SCALES).all()


# ------------------------------------------------------------ the dynamics
def bent(force, _, y):
    """Change of a direction and of the kinetic energy, under a constant force."""
    return [*(force - y[:6] * (y[:6] @ force)), 5 * (y[:6] @ force)]


def test_bending_solves_its_differential_equation():
    """By scipy; kinetic energy is gained by moving along the force."""
    generator = torch.Generator().manual_seed(1)
    g = 3 * torch.randn(2, 6, dtype=torch.float64, generator=generator)
    u = nn.functional.normalize(torch.randn(2, 6, dtype=torch.float64, generator=generator), dim=1)
    sizes = torch.tensor([0.7, 2.0], dtype=torch.float64)
    found, gain = bend(u, g, sizes)
    for k, force in enumerate((-g / 5).numpy()):
        motion = partial(bent, force)
        first = [*u[k].tolist(), 0.0]
        end = solve_ivp(motion, (0, sizes[k]), first, rtol=1e-11, atol=1e-12).y[:, -1]
        torch.testing.assert_close(found[k], torch.tensor(end[:6]), rtol=1e-7, atol=1e-8)
        assert gain[k].item() == pytest.approx(end[6], rel=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e6])
def test_bending_is_finite_for_all_gradients(size):
    u = nn.functional.normalize(torch.ones(1, 4).double(), dim=1)
    gradient = size * torch.tensor([[1.0, -2.0, 0.5, 0.0]], dtype=torch.float64)
    direction, _ = bend(u, gradient, torch.ones(1).double())
    assert direction.isfinite().all()
    assert direction.norm().item() == pytest.approx(1, abs=1e-6)
    if size < 1:
        torch.testing.assert_close(direction, u)


def test_energy_errors_are_of_third_order_and_steps_can_be_undone():
    def slope(x):
        return x / SCALES.square()

    def look(x):
        return gaussian(x), slope(x)

    theta = start(4).detach()
    u = nn.functional.normalize(torch.flip(theta, (0,)), dim=1)
    place, errors = Place(theta, u, *look(theta)), []
    for size in (0.2, 0.1):
        sizes = torch.full((4,), size, dtype=torch.float64)
        there, error = integrate(place, sizes, look, slope)
        errors.append(error.abs().mean().item())
        back, again = integrate(there._replace(direction=-there.direction), sizes, look, slope)
        torch.testing.assert_close(back.x, theta)
        torch.testing.assert_close(back.direction, -u)
        torch.testing.assert_close(again, -error, rtol=1e-6, atol=1e-9)
    assert 6 < errors[0] / errors[1] < 10


def test_directions_forget_themselves_over_the_given_length():
    """The correlation after one length is 1 / e, in many dimensions."""
    generator = torch.Generator().manual_seed(0)
    u = first = nn.functional.normalize(torch.randn(50, 400, generator=generator).double(), dim=1)
    for _ in range(20):
        noise = torch.randn(50, 400, generator=generator).double()
        u = refresh(u, noise, torch.full((50,), 0.1), torch.full((50,), 2.0))
    assert (u * first).sum(1).mean().item() == pytest.approx(math.exp(-1), abs=0.02)


# ------------------------------------------------------------ descent and adaptation
def test_the_descent_is_adam_with_a_cosine():
    one, two = start(3), start(3)
    sampler = MCLMC([one], steps=4, descent_steps=5, descent_lr=0.05)
    run(sampler, one, 5)
    adam = torch.optim.Adam([two], 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 40)
    for _ in range(40):
        adam.zero_grad()
        gaussian(two).sum().backward()
        adam.step()
        schedule.step()
    torch.testing.assert_close(one, two)
    assert not sampler.state


def test_memory_is_as_long_as_draws_depend_on_each_other():
    """Autoregressive series of known effective sizes; short ones say nothing."""
    generator, steps = torch.Generator().manual_seed(0), 4000
    series = torch.zeros(2, steps, 3, dtype=torch.float64)
    decay = torch.tensor([0.5, 0.9]).double()[:, None]
    for t in range(1, steps):
        series[:, t] = decay * series[:, t - 1] + torch.randn(2, 3, generator=generator).double()
    found = memory_length(series, torch.tensor([1.0, 2.0]).double())
    apart = (1 + decay[:, 0]) / (1 - decay[:, 0])
    torch.testing.assert_close(found, 0.4 * torch.tensor([1, 2]) * apart, rtol=0.25, atol=0)
    assert memory_length(series[:, :10], torch.ones(2).double()).isnan().all()


@pytest.mark.parametrize("length", [None, 2.5])
def test_the_length_of_memory_is_adapted_unless_it_is_given(length):
    theta = start(8)
    sampler = MCLMC([theta], 0.5, 5, length=length, descent_steps=0, adapt_steps=150)
    run(sampler, theta, 1)
    assert sampler.lengths[0].item() == pytest.approx(length or D**0.5)
    run(sampler, theta, 134)
    spread = SCALES.square().sum().sqrt().item()
    assert sampler.lengths.median().item() == pytest.approx(length or spread, rel=0.3)
    before = sampler.lengths
    run(sampler, theta, 15)
    assert torch.equal(sampler.lengths, before) == (length is not None)
    assert ((sampler.lengths / before - 1).abs() < 1).all()


# ------------------------------------------------------------ one chain beside others, resume
@pytest.mark.parametrize(
    "make",
    [lambda p: MCLMC(p, 0.3, 3, descent_steps=0, adapt_steps=0), lambda p: HMC(p, 0.3, 5)],
    ids=["MCLMC", "HMC"],
)
def test_a_chain_that_leaves_the_finite_numbers_stays(make):
    """The others do not notice."""
    ends = []
    for other in (0.0, 1e200):
        theta = nn.Parameter(torch.tensor([[0.3, 0.1], [other, 0.2]], dtype=torch.float64))
        sampler = make([theta])
        run(sampler, theta, 4, lambda t: t.square().square().sum(-1))
        ends.append(theta.detach().clone())
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[1][1].tolist() == [1e200, 0.2]
    if isinstance(sampler, MCLMC):
        assert sampler.failed_steps.tolist() == [0, 12]


def test_a_chain_turns_around_where_the_energy_ends():
    """In a box without forces, with a direction that is never forgotten."""
    theta = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    sampler = MCLMC([theta], 0.3, 10, length=1e9, descent_steps=0, adapt_steps=0)

    def box(t):
        return torch.where((t.abs() < 1).all(-1), 0.0, torch.nan) + 0 * t.sum(-1)

    draws = run(sampler, theta, 30, box)
    assert (sampler.failed_steps < 150).all()
    assert (draws.amax((1, 2)) - draws.amin((1, 2)) > 1).all()


# ------------------------------------------------------------ HMC
def test_steps_are_varied_evenly_around_their_size():
    generator = torch.Generator().manual_seed(0)
    sampler = HMC([nn.Parameter(torch.zeros(1))], jitter=0.3)
    (group,) = sampler.param_groups
    found = torch.tensor([sampler._jitter(group, generator) for _ in range(2000)])
    assert found.mean().item() == pytest.approx(1, abs=0.02)
    assert found.std().item() == pytest.approx(0.3 / 3**0.5, abs=0.01)
    assert (found - 1).abs().max() < 0.3 + 1e-6


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
