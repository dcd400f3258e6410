"""What every stochastic-gradient sampler must do: moments, temperature, torch's manners."""

import copy
import itertools
import math

import pytest
import torch
from processes import on_ranks
from refusals import refuses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_bnn.samplers import HMC, IVON, MCLMC, SGHMC, SGLD, SMILE, CyclicalSchedule, langevin
from weightsym.networks.randomness import keyed_generator

N, CHAINS = 50, 3000
COVARIANCE = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64) / N
MEAN = torch.tensor([0.4, -0.7], dtype=torch.float64)
SAMPLERS = {
    "sgld": lambda p, **o: SGLD(p, lr=0.05, **o),
    "sghmc": lambda p, **o: SGHMC(p, lr=0.02, momentum=0.9, **o),
    "sghmc, no momentum": lambda p, **o: SGHMC(p, lr=0.05, momentum=0.0, **o),
    "smile": lambda p, **o: SMILE(p, lr=2.0, length=10.0, descent_steps=0, adapt_steps=0, **o),
}
EACH = pytest.mark.parametrize("name", SAMPLERS)
EVERY = SAMPLERS | {
    "ivon": lambda p, **o: IVON(p, 0.1, prior_precision=1.0, hessian_momentum=0.9, **o),
    "hmc": lambda p, num_data=N, lr=1e-3, **o: HMC(p, lr, 8, **{"adapt_steps": 60} | o),
    "mclmc": lambda p, num_data=N, lr=0.05, **o: MCLMC(p, lr, 3, descent_steps=5, **o),
}
"""With those that want the energy of all data, and one that draws where it takes gradients."""


def energy(theta):
    """Mean loss of every chain; times N it is that of a correlated Gaussian."""
    z = theta - MEAN
    return (z @ torch.linalg.inv(COVARIANCE) * z).sum(-1) / (2 * N)


def run(sampler, theta, steps, loss=energy):
    """Steps on a mean loss, or on the energy of each chain."""
    scale = N if isinstance(sampler, HMC | MCLMC) else 1

    def closure():
        sampler.zero_grad()
        value = scale * loss(theta)
        value.sum().backward()
        return value.detach()

    for _ in range(steps):
        sampler.step(closure)


def chains(start=None):
    torch.manual_seed(0)
    spread = torch.linalg.cholesky(COVARIANCE)
    value = MEAN + torch.randn(CHAINS, 2, dtype=torch.float64) @ spread.T
    return nn.Parameter(value if start is None else start)


@pytest.mark.parametrize("name", [*SAMPLERS, "hmc"])
def test_the_moments_of_a_correlated_gaussian(name):
    """Thousands of chains, well after they have forgotten where they came from."""
    temperature = 0.25
    theta = chains()
    sampler = EVERY[name]([theta], num_data=N, temperature=temperature)
    run(sampler, theta, 90 if name == "hmc" else 300)
    kept = []
    for _ in range(10):
        run(sampler, theta, 4 if name == "hmc" else 30)
        kept.append(theta.detach().clone())
    samples = torch.cat(kept)
    scale = COVARIANCE.diagonal().sqrt()
    assert ((samples.mean(0) - MEAN).abs() < 0.05 * scale).all()
    found = torch.cov(samples.T)
    assert ((found - temperature * COVARIANCE).abs() < 0.06 * temperature * scale.prod()).all()


@pytest.mark.parametrize(("momentum", "lr"), [(0.0, 0.5), (0.9, 0.5), (0.5, 1.0)])
def test_the_stationary_law_at_a_finite_rate(momentum, lr):
    """Variance T / (N k) / (1 - lr k / (2 (1 + mu)))."""
    theta = nn.Parameter(torch.zeros(60_000, dtype=torch.float64))
    sampler = SGHMC([theta], lr=lr, momentum=momentum, num_data=N)
    run(sampler, theta, 150, lambda t: t.square() / 2)
    wanted = 1 / N / (1 - lr / (2 * (1 + momentum)))
    assert theta.var().item() == pytest.approx(wanted, rel=0.02)


def test_velocities_start_from_their_stationary_law():
    theta = nn.Parameter(torch.randn(100_000, dtype=torch.float64) / N**0.5)
    sampler = SGHMC([theta], lr=1e-4, momentum=0.9, num_data=N)
    for steps in (1, 200):
        run(sampler, theta, steps, lambda t: t.square() / 2)
        velocity = sampler.state[theta]["velocity"] * 1e-2
        assert velocity.var().item() == pytest.approx(2e-4 / (1.9 * N), rel=0.02)


@pytest.mark.parametrize(("temperature", "momentum"), [(1.0, 0.0), (1.0, 0.9), (0.3, 0.9)])
def test_the_kinetic_temperature_is_that_of_the_target(temperature, momentum):
    """Where no force acts; tensors of several groups count by their size, not by their number."""
    weights = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (40_000, 3, 20_000)]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "num_data": 10 * N, "lr": 1e-3}]
    sampler = SGHMC(groups, 0.1, momentum, N, temperature)
    assert sampler.kinetic_temperature().isnan()
    for _ in range(3):
        for w in weights:
            w.grad = torch.zeros_like(w)
        sampler.step()
        assert sampler.kinetic_temperature().item() == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_no_noise_is_drawn_that_would_not_be_used(name, temperature, monkeypatch):
    """Plain optimization does not pay for random numbers."""
    keys = []

    def counted(*key, device):
        keys.append(key)
        return keyed_generator(*key, device=device)

    monkeypatch.setattr(langevin, "keyed_generator", counted)
    theta = nn.Parameter(torch.ones(3, dtype=torch.float64))
    run(SAMPLERS[name]([theta], num_data=N, temperature=temperature), theta, 3, torch.square)
    assert bool(keys) == (temperature > 0)


@pytest.mark.parametrize("option", [{"prior_precision": 4.0}, {"weight_decay": 4.0 / N}])
@pytest.mark.parametrize("kind", [SGHMC, SGLD])
def test_a_prior_counts_as_it_should(kind, option):
    """Without data the prior is sampled: variance T / lambda."""
    theta = nn.Parameter(torch.randn(5_000, dtype=torch.float64) / 3)
    sampler = kind([theta], lr=0.5, num_data=N, **option)
    run(sampler, theta, 300, lambda t: 0 * t)
    assert theta.var().item() == pytest.approx(1 / 4, rel=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [None, 0.01])
def test_at_temperature_zero_it_is_sgd_with_momentum(momentum, weight_decay):
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    two, x = copy.deepcopy(one), torch.randn(20, 3).double()
    ours = SGHMC(
        one.parameters(), lr=0.1, momentum=momentum, num_data=20, temperature=0.0,
        weight_decay=weight_decay,
    )  # fmt: skip
    theirs = torch.optim.SGD(
        two.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay or 0.0
    )
    for _ in range(20):
        for net, optimizer in ((one, ours), (two, theirs)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


PLACEMENTS = {
    "copies": (Replicate(), Replicate()),
    "parts": (Shard(0), Shard(1)),
    "copies of parts": (Replicate(), Shard(0)),
    "parts of copies": (Shard(0), Replicate()),
}


def sharded(rank):
    """What one of four processes holds of a parameter, and how its samplers move it."""
    mesh = init_device_mesh("cpu", (2, 2))
    held = {}
    for name, placements in PLACEMENTS.items():
        whole = torch.arange(16, dtype=torch.float64).reshape(4, 4)
        theta = nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
        mine = theta.detach().to_local().clone()
        held[name] = [mine]
        for make in SAMPLERS.values():
            before = theta.detach().to_local().clone()
            theta.grad = torch.zeros_like(theta)
            make([theta], num_data=N).step()
            held[name].append(theta.detach().to_local() - before)
    return held


@pytest.mark.e2e
def test_parts_have_noise_of_their_own_and_copies_share_it():
    """Two processes draw the same noise exactly where they hold the same weights."""
    ranks = on_ranks(sharded, 4)
    for name in PLACEMENTS:
        for one, two in itertools.combinations(ranks, 2):
            alike = torch.equal(one[name][0], two[name][0])
            for a, b in zip(one[name][1:], two[name][1:], strict=True):
                assert a.abs().min() > 0
                same = torch.isclose(a, b, rtol=1e-9, atol=1e-12)
                assert bool(same.all()) if alike else not bool(same.any())


@EACH
def test_closures_unused_parameters_and_several_types(name):
    p, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    sampler = SAMPLERS[name]([p, unused, wide], num_data=10)

    def closure():
        sampler.zero_grad()
        loss = p.square().sum() + wide.square().sum()
        loss.backward()
        return loss

    assert sampler.step(closure) == 6
    assert torch.equal(p.grad, torch.full((3,), 2.0))  # they are left alone
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(p, torch.ones(3))
    assert not torch.equal(wide.float(), p)


def test_cycles():
    p = nn.Parameter(torch.zeros(2))
    sampler = SGHMC([p], lr=0.5, num_data=10, temperature=0.3)
    schedule = CyclicalSchedule(sampler, 10, exploration=0.5)
    rates, temperatures, sampling = [], [], []
    for _ in range(25):
        rates.append(sampler.param_groups[0]["lr"])
        temperatures.append(sampler.param_groups[0]["temperature"])
        sampling.append(schedule.sampling)
        p.grad = torch.zeros(2)
        sampler.step()
        schedule.step()
    wanted = [0.25 * (1 + math.cos(math.pi * (k % 10) / 10)) for k in range(25)]
    assert rates == pytest.approx(wanted)
    assert temperatures == [0.3 if k % 10 >= 5 else 0.0 for k in range(25)]
    assert sampling == [k % 10 >= 5 for k in range(25)]


# ------------------------------------------------------------ going on
STOPS = 2, 5, 6, 7, 12, 17, 19, 22, 25, 30
"""In the middle and at the end of every phase of those that tune themselves."""
TUNED = {"descent_steps": 5, "adapt_steps": 20}
OPTIONS = {"smile": {"lr": 0.3, **TUNED}, "hmc": {"lr": 0.01, "adapt_steps": 18}}
OPTIONS |= {"mclmc": {"adapt_steps": 15}}


def begun(name, seed=0):
    draws = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    params = [nn.Parameter(draws[:3]), nn.Parameter(draws[3:])]
    groups = {
        "smile": [{"params": params, "stacked": True}],
        "sghmc": [{"params": params[:1], "lr": 0.01}, {"params": params[1:]}],
    }
    given = {"num_data": 10, "seed": seed}
    make = {"smile": SMILE}.get(name, EVERY[name])
    return params, make(groups.get(name, params), **given, **OPTIONS.get(name, {}))


def on(params, sampler):
    """A step on a target that is not Gaussian."""

    def closure():
        sampler.zero_grad()
        energies = sum((p.square() + p**4).sum(-1) for p in params) / 2
        energies.sum().backward()
        return energies.detach()

    sampler.step(closure)


@pytest.mark.parametrize("name", [n for n in EVERY if "no momentum" not in n])
def test_a_state_dict_is_complete(name):
    """In single precision, wherever it is saved; another seed goes elsewhere."""
    (whole, sampler), (other, another) = begun(name), begun(name, seed=1)
    states, before = {}, torch.get_rng_state()
    for k in range(40):
        if k in STOPS:
            states[k] = copy.deepcopy(whole), copy.deepcopy(sampler.state_dict())
        assert name != "smile" or sampler.is_tuning == (k <= 25)
        on(whole, sampler)
        on(other, another)
    assert torch.equal(before, torch.get_rng_state())
    for k, (first, state) in states.items():
        resumed, anew = begun(name, seed=5)
        for p, value in zip(resumed, first, strict=True):
            p.data.copy_(value)
        anew.load_state_dict(state)
        torch.manual_seed(k)
        for _ in range(k, 40):
            on(resumed, anew)
        assert all(map(torch.equal, resumed, whole))
        torch.testing.assert_close(anew.state_dict(), sampler.state_dict(), rtol=0, atol=0)
        if name in ("smile", "mclmc"):
            assert torch.equal(anew.energy_variances, sampler.energy_variances)
    assert not any(map(torch.equal, whole, other))


# ------------------------------------------------------------ what is refused
def stepped(kind, numbers=2, **options):
    """A step of a sampler of one chain."""
    p = nn.Parameter(torch.zeros(1, numbers))
    p.grad = torch.ones(1, numbers)
    run(kind([p], **options), p, 1, lambda t: t.square().sum(-1))


test_bad_arguments = refuses(
    (lambda p: SGHMC(p, momentum=1.0), "`momentum` must be at least 0 and below 1"),
    (lambda p: SGHMC(p, prior_precision=1.0, weight_decay=0.1), "are equivalent"),
    (lambda p: CyclicalSchedule(SGLD(p), 5, 1.0), "`exploration` must be"),
    (lambda p: CyclicalSchedule(torch.optim.SGD(p, 0.1), 5), "SGD has no temperature"),
    *((lambda p, k=k: stepped(k), "needs `num_data`") for k in (SGHMC, SGLD, SMILE)),
    (lambda p: stepped(SMILE, 1, num_data=N, descent_steps=0), "at least two entries"),
    (lambda p: stepped(MCLMC, 1, descent_steps=0), "at least two entries"),
    (lambda p: MCLMC(p, temperature=0.0), "`temperature` must be positive"),
    (lambda p: MCLMC(p).step(), "`closure` must be given"),
    (lambda p: HMC(p, temperature=0.0), "`temperature` must be positive"),
    (lambda p: HMC(p, target_acceptance=1.0), "`target_acceptance` must be between"),
    (lambda p: HMC(p, jitter=1.0), "`jitter` must be"),
    (lambda p: HMC([{"params": p}, {"params": []}]), "`params` must be one group"),
    (lambda p: HMC(p).step(), "`closure` must be given"),
    (lambda p: HMC(p).step(lambda: p[0].square().sum()), "one energy for each chain"),
    (lambda p: IVON(p, temperature=0.0), "`temperature` must"),
    (lambda p: IVON(p, hessian_init=0.0), "`hessian_init` must"),
    (lambda p: IVON(p, momentum=1.0), "`momentum` must"),
    (lambda p: IVON(p, hessian_momentum=1.5), "`hessian_momentum` must"),
    given=lambda: ([nn.Parameter(torch.zeros(3, 2))],),
)
