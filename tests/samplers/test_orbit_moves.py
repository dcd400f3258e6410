"""Moves along orbits leave functions, the prior and the posterior as they are."""

import numpy as np
import pytest
import torch
from scipy.stats import chi, geninvgauss, kstest
from torch import nn

from lightning_bnn import methods, samplers
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.metrics import rhat
from lightning_bnn.models import mlp
from lightning_bnn.modules import HMC
from lightning_bnn.samplers.orbit_moves import OrbitMoves
from weightsym import discover
from weightsym import params as P

NETS = {
    "perceptron": (lambda: mlp(3, [4, 5], 2), torch.randn(6, 3)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(16, 2),
        ),
        torch.randn(3, 2, 5, 5),
    ),
    "norms": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)).eval(),
        torch.randn(5, 3),
    ),
}  # fmt: skip


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=NETS)
def case(request):
    make, x = NETS[request.param]
    net = make().double()
    return net, x.double(), discover(net, x.double())


def of_prior(net, members, std, seed):
    g = seeded(seed)
    draw = lambda t: std * torch.randn(members, *t.shape, generator=g, dtype=torch.float64)  # noqa: E731
    return {name: draw(p) for name, p in net.named_parameters()}


def test_functions_stay_and_weights_do_not(case):
    net, x, sym = case
    stack = of_prior(net, 3, 0.7, 1)
    moves = OrbitMoves(sym, 0.7)
    moved = moves(stack, seeded())
    torch.testing.assert_close(P.apply(net, moved, x), P.apply(net, stack, x))
    assert not moves.held
    assert all(not torch.allclose(moved[n], t) for n, t in stack.items() if n in sym.touched)


def test_draws_of_the_prior_stay_draws_of_the_prior(case):
    """Every weight, and the balance of every scale, whose law the volumes decide."""
    net, _, sym = case
    std = 0.7
    stack = of_prior(net, 4000, std, 2)
    fresh = of_prior(net, 4000, std, 3)
    for seed in range(3):
        stack = OrbitMoves(sym, std)(stack, seeded(seed))
    for name, t in stack.items():
        assert kstest((t / std).flatten(1)[:, 0].numpy(), "norm").pvalue > 1e-4, name
        sizes = [s[name].flatten(1).norm(dim=1).numpy() for s in (stack, fresh)]
        assert kstest(*sizes).pvalue > 1e-4, name


def test_one_scale_has_the_law_of_an_inverse_gaussian():
    net = mlp(5, [1], 1)
    sym = discover(net, torch.randn(4, 5))
    stack = {n: p.detach().double().expand(4000, *p.shape) for n, p in net.named_parameters()}
    moved = OrbitMoves(sym, 0.5)(stack, seeded())
    factors = (moved["1.bias"] / stack["1.bias"]).square().flatten().numpy()
    up = sum(float(stack[n][0].square().sum()) for n in ("1.weight", "1.bias")) / 0.25
    down = float(stack["3.weight"][0].square().sum()) / 0.25

    def law(p):
        return geninvgauss(p, np.sqrt(up * down), scale=np.sqrt(down / up)).cdf

    assert kstest(factors, law((6 - 1) / 2)).pvalue > 1e-3
    assert kstest(factors, law(0)).pvalue < 1e-6  # without the volumes


# ------------------------------------------------------------ in a module
X = torch.randn(40, 2, generator=seeded())
Y = torch.relu(X[:, :1]) - 0.5 * X[:, 1:] + 0.1 * torch.randn(40, 1, generator=seeded(1))


CHAINS = {
    "hmc": lambda p, t: samplers.HMC(p, 0.01, 20, t, adapt_steps=150, seed=1),
    "sghmc": lambda p, t: samplers.SGHMC(p, 0.02, 0.9, 40, t, seed=1),
    "sgld": lambda p, t: samplers.SGLD(p, 0.02, 40, t, seed=1),
}


def begun(name, net, stack, likelihood, temperature=1.0, **options):
    """The chains of a method, their sampler, and a function that makes steps."""
    method = (methods.HamiltonianMonteCarlo if name == "hmc" else methods.SGMCMC)(**options)
    run, batch = methods.Run(net, likelihood, num_data=40), methods.Batch((X,), Y)
    state = method.init(net, stack)
    sampler = CHAINS[name](state.parameters(), temperature)
    method.configure_optimizer(state, sampler, run)
    method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: [batch]), run)

    def steps(count):
        for k in range(count):
            if name == "hmc":
                method.transition(state, run, sampler.step)
            else:
                sampler.zero_grad()
                method.losses(state, batch, run)["loss"].sum().backward()
                sampler.step()
            method.after_step(state, methods.Progress(k + 1, 0, False, sampler), run)

    return state, sampler, steps


def chains(moves):
    """Draws ``(chains, times, ...)`` of four chains."""
    torch.manual_seed(0)
    net, keeping = mlp(2, [5], 1), methods.Keeping(burn_in=200, every_n_steps=10)
    stack, options = P.populate(net, members=4), {"orbit_moves": moves, "keeping": keeping}
    state, _, steps = begun("sghmc", net, stack, Gaussian(std=0.5), **options)
    steps(3200)
    return net, state.chains()


@pytest.mark.e2e
def test_chains_mix_over_copies_and_their_functions_have_the_same_law():
    points = torch.linspace(-2, 2, 5)[:, None].expand(-1, 2).contiguous()
    laws, raw = [], []
    for moves in (None, 10):
        net, draws = chains(moves)
        stack = {n: t.flatten(0, 1) for n, t in draws.items()}
        values = P.apply(net, stack, points)[..., 0].unflatten(0, (4, -1)).double()
        errors = values.mean(1).std(0) / 2
        laws.append((values.mean((0, 1)), values.std((0, 1)), errors))
        weights = torch.cat([t.flatten(2) for n, t in draws.items() if n != "3.bias"], 2)
        raw.append(max(float(rhat(weights[..., k].double())) for k in range(weights.shape[-1])))
    (mean, std, error), (other_mean, other_std, other_error) = laws
    assert ((mean - other_mean).abs() < 4 * (error + other_error) + 0.005).all()
    torch.testing.assert_close(std, other_std, rtol=0.2, atol=0)
    assert raw[1] < 1.04 < 1.08 < raw[0]


class Flat(nn.Module):
    """A likelihood that says nothing."""

    def log_prob(self, outputs, targets):
        return 0 * outputs[..., 0]


def moved(name, temperature):
    net = mlp(2, [3], 1)
    stack = {n: t.float() for n, t in of_prior(net, 3000, 1.0, 4).items()}
    options = {"orbit_moves": 2, "prior_std": 0.5, "keeping": methods.Keeping(burn_in=99)}
    state, sampler, steps = begun(name, net, stack, Flat(), temperature, **options)
    steps(5)
    return state.stack(), sampler


@pytest.mark.parametrize("name", CHAINS)
def test_draws_of_a_tempered_prior_stay_draws_of_it(name):
    stack, sampler = moved(name, 4.0)
    for weight, t in stack.items():
        assert kstest(t.flatten(1).norm(dim=1).numpy(), chi(t[0].numel()).cdf).pvalue > 1e-4, weight
    if name == "sghmc":
        assert sampler.kinetic_temperature() == pytest.approx(4.0, rel=0.03)
    other, _ = moved(name, 1.0)
    sizes = other["1.bias"].norm(dim=1).numpy()
    assert kstest(sizes, chi(3).cdf).pvalue < 1e-6


def test_momenta_follow_their_weights():
    """Without noise and scales, a chain that moves has the functions of one that does not."""

    def functions(moves, forget=False):
        net = mlp(2, [5, 4], 1, nn.Tanh)
        torch.manual_seed(1)
        options = {"temperature": 1e-20, "orbit_moves": moves}
        state, sampler, steps = begun("sghmc", net, P.populate(net, 3), Gaussian(), **options)
        for _ in range(3):
            steps(4)
            if forget:
                for p in list(sampler.state):
                    del sampler.state[p]
        return P.apply(net, state.stack(), X), state.stack()["1.bias"]

    (plain, bias), (moved, other) = functions(None), functions(4)
    torch.testing.assert_close(moved, plain, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(bias, other)
    assert not torch.allclose(functions(4, forget=True)[0], plain, rtol=1e-2)


def frozen():
    net = mlp(2, [5, 4], 1)
    net[1].requires_grad_(False)
    return net


def normed():
    """Its statistics belong to all chains: what they are of stays where it is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU())
    net.append(nn.Linear(4, 1))
    for _ in range(20):
        net.train()(X)
    return net.eval()


@pytest.mark.parametrize(
    ("make", "held", "moved"), [(frozen, None, "5.weight"), (normed, "1.running_var", "3.weight")]
)
def test_what_is_not_trained_stays(make, held, moved):
    net = make()
    module = HMC(net, members=2, orbit_moves=1, likelihood=Gaussian())
    optimizer = samplers.HMC(module.state.parameters(), step_size=1e-9, leapfrog_steps=1)
    run, before = module.run, {n: t.clone() for n, t in module.state.stack().items()}
    run.num_data = 40
    fit = methods.Fit(optimizer=optimizer, batches=lambda: [methods.Batch((X,), Y)])
    module.method.before_fit(module.state, fit, run)
    module.method.transition(module.state, run, optimizer.step)
    after = module.state.stack()
    assert bool(module.state.moves.held) == (held is not None)
    assert held is None or torch.equal(after[held], before[held])
    assert held or "1.weight" not in after
    assert not torch.allclose(after[moved], before[moved])
    one, other = (P.apply(run.network, stack, X) for stack in (before, after))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_chains_that_cannot_move_stay():
    """Those that are not finite, and units of which one side is zero and has no law."""
    net = mlp(2, [3], 9)
    moves = OrbitMoves(discover(net, X))
    stack = {n: t.clone() for n, t in P.populate(net, 3).items()}
    stack["1.weight"][0] = torch.nan
    stack["1.bias"][1] = torch.inf
    stack["3.weight"][2] = 0
    moved = moves(stack, seeded())
    assert moved["1.weight"][0].isnan().all()
    assert (moved["1.weight"][2].sort(0).values == stack["1.weight"][2].sort(0).values).all()


@pytest.mark.bad_input
def test_what_moves_refuse():
    with pytest.raises(ValueError, match="`orbit_moves` must be"):
        methods.HamiltonianMonteCarlo(orbit_moves=0)
    with pytest.raises(ValueError, match="`prior_std` must be positive"):
        OrbitMoves(discover(mlp(2, [2], 1), torch.randn(3, 2)), 0)
    with pytest.raises(ValueError, match="`orbit_moves` must be"):
        methods.SGMCMC(orbit_moves=0)
    weights, run = [nn.Parameter(torch.zeros(2, 3))], methods.Run(mlp(2, [2], 1))
    for method, sampler, message in (
        (methods.StochasticMILE(orbit_moves=1), samplers.SMILE(weights), "not SMILE: omit it"),
        (methods.SGMCMC(None, orbit_moves=1), samplers.SGLD(weights), "a prior: set `prior_std`"),
        (
            methods.SGMCMC(orbit_moves=1),
            samplers.SGLD([{"params": weights}, {"params": [nn.Parameter(torch.zeros(2))]}]),
            "a sampler with a single parameter group",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            method.configure_optimizer(None, sampler, run)
