import functools

import cvxpy
import pytest
import torch
from cases import CASES, Forward, SelfFeeding, randomise
from torch import nn

from lightning_bnn import models
from weightsym import balancing, discover, mass, min_mass, rescale
from weightsym import params as P
from weightsym.mass_problem import mass_problem


def setup(model, x, **options):
    model = model.double().eval()
    return model, discover(model, x.double(), **options), P.of(model)


def masses(params, names):
    return torch.stack([params[n].square().sum() for n in names])


# ------------------------------------------------------------ closed forms
def test_two_layers_have_a_closed_form():
    """m* = 2 sum |in| |out|, scale^2 = |out| / |in|."""
    _, sym, params = setup(models.mlp(7, [6], 3), torch.randn(1, 7))
    found = min_mass(params, sym)
    a, c = params["1.weight"].norm(dim=1), params["3.weight"].norm(dim=0)
    torch.testing.assert_close(found.minimum, 2 * (a * c).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.scales[0] ** 2, c / a, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mass, a.square().sum() + c.square().sum(), rtol=1e-12, atol=0)


def test_optunet_has_a_closed_form_for_a_whole_stack():
    model, sym, _ = setup(models.optunet(), torch.randn(1, 1, 28, 28))
    stack = P.populate(model, 20)
    found = min_mass(stack, sym)
    m1 = stack["0.weight"].square().sum((2, 3, 4))
    m2 = stack["3.weight"].square().sum((2, 3, 4)).reshape(-1, 2, 5)
    mf = stack["7.weight"].square().sum(1).reshape(-1, 2, 5)
    closed = 3 * (m1 ** (1 / 3) * (m2 * mf).sqrt().sum(-1) ** (2 / 3)).sum(-1)
    torch.testing.assert_close(found.minimum, closed, rtol=1e-12, atol=0)
    assert (found.gap < 1e-10).all()


@pytest.mark.parametrize(
    ("act", "free"), [(nn.Tanh, False), (nn.ReLU, True)], ids=["nothing to scale", "ReLU"]
)
def test_where_nothing_can_be_scaled_the_mass_is_least(act, free):
    model = nn.Sequential(nn.Linear(3, 4), act(), nn.Linear(4, 2)).double()
    _, sym, params = setup(model, torch.randn(1, 3))
    for weights in (params, P.populate(model, 5)):
        found = min_mass(weights, sym)
        assert bool((found.minimum < found.mass).all()) == bool(found.scales) == free
        assert (found.excess > -1e-10).all()


# ------------------------------------------------------------ the oracle
def grouped():
    layers = [nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3, groups=4), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Conv1d(8, 8, 1, groups=8), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)
    )


def two_streams():
    def forward(s, x):
        h = torch.relu(s.a(x))
        h = h + s.c(torch.relu(s.b(h)))
        g = torch.relu(s.d(torch.relu(h)))
        return s.f(torch.relu(g + s.e(g)))

    sizes = {"a": (5, 6), "b": (6, 7), "c": (7, 6), "d": (6, 4), "e": (4, 4), "f": (4, 2)}
    return Forward(forward, **{k: nn.Linear(*v) for k, v in sizes.items()})


def normed():
    layers = [
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        nn.BatchNorm2d(5),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))


def recurrent():
    return Forward(
        lambda s, x: s.b(s.a(x)[0][-1]), a=nn.RNN(4, 5, nonlinearity="relu"), b=nn.Linear(5, 2)
    )


def latents():
    net = Forward(lambda s, x: s.b(torch.relu(s.latents)) + x, b=nn.Linear(7, 3))
    net.latents = nn.Parameter(torch.randn(1, 5, 7))
    return net


NETWORKS = {
    "latents": (latents, (2, 5, 3), "carrier"),
    "mlp": (lambda: models.mlp(6, [5, 4], 3), (2, 6), "carrier"),
    "deep mlp": (lambda: models.mlp(4, [5, 6, 5, 4], 2), (2, 4), "carrier"),
    "optunet": (models.optunet, (1, 1, 28, 28), "carrier"),
    "grouped": (grouped, (2, 3, 7), "carrier"),
    "self-feeding": (SelfFeeding, (2, 5), "carrier"),
    "two streams": (two_streams, (2, 5), "carrier"),
    "batch norm carrier": (normed, (2, 2, 6, 6), "carrier"),
    "batch norm eval": (normed, (2, 2, 6, 6), "eval"),
    "recurrent": (recurrent, (3, 2, 4), "carrier"),
    "sdpa": (next(c for c in CASES if c.name == "sdpa").build, (2, 6, 8), "carrier"),
}


@functools.cache
def case(name):
    """A network with generic weights, its symmetries and its weights."""
    build, shape, batch_norm = NETWORKS[name]
    torch.manual_seed(0)
    return setup(randomise(build()), torch.randn(shape), batch_norm=batch_norm)


def least_by_cvxpy(params, sym):
    """The problem as P1 states it: one exponential per weight, whose powers `rescale` tells."""
    scales = torch.eye(sym.scaling_dof, dtype=torch.float64).exp()
    ones = {n: torch.ones(len(scales), *t.shape, dtype=torch.float64) for n, t in params.items()}
    ones = rescale(ones, sym, scales.split([g.units for g in sym.scalings], -1))
    powers = torch.cat([ones[n].log().round().flatten(1) for n in sym.weights], 1).T.numpy()
    squares = torch.cat([params[n].double().square().flatten() for n in sym.weights]).numpy()
    u = cvxpy.Variable(sym.scaling_dof)
    terms = cvxpy.multiply(squares / squares.sum(), cvxpy.exp(2 * powers @ u))
    return cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(terms))).solve() * squares.sum()


@pytest.mark.parametrize("name", NETWORKS)
def test_balance_finds_what_cvxpy_finds(name):
    model, sym, params = case(name)
    ours = min_mass(params, sym)
    assert float(ours.minimum) == pytest.approx(least_by_cvxpy(params, sym), rel=1e-8)
    assert ours.gap < 1e-9
    rescaled = rescale(params, sym, ours.scales)
    torch.testing.assert_close(mass(rescaled, sym), ours.minimum, rtol=1e-10, atol=0)
    x = torch.randn(NETWORKS[name][1]).double()
    torch.testing.assert_close(P.apply(model, rescaled, x), P.apply(model, params, x))


@pytest.mark.parametrize("largest", [0, 2**16], ids=["conjugate gradients", "dense"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_certificate_holds(name, largest, monkeypatch):
    """No rescaling is better than the bound says, at whatever point it is taken."""
    monkeypatch.setattr(balancing, "_LARGEST", largest)
    _, sym, params = case(name)
    best = min_mass(params, sym, tolerance=1e-14).minimum
    for steps in range(1, 9):
        early = min_mass(params, sym, max_iterations=steps)
        assert (early.minimum - best) / early.minimum <= early.gap + 1e-13
    assert min_mass(params, sym).gap < 1e-9


@pytest.mark.parametrize("name", NETWORKS)
def test_the_bound_holds_for_any_direction_and_is_near_for_the_right_one(name):
    _, sym, params = case(name)
    problem = mass_problem(params, sym)
    best = balancing.balance(problem, torch.zeros_like(problem.inflow), 1e-14, 100)
    for size in (0.3, 0.03, 0.003):
        noise = torch.randn(50, problem.variables, dtype=torch.float64)
        many = problem.members(torch.zeros(50, dtype=torch.long))
        here = many.moved(best.logs + size * noise)
        excess, newton = here.value - best.terms.value, -2 * size * noise
        near = balancing.bound(here)
        for bound in (near, *(balancing.bound(here, k * newton) for k in (0, 0.5, 1, 1.5))):
            assert (excess <= bound + 1e-13 * here.value).all()
        assert size > 0.01 or (near < 8 * excess).all()


@pytest.mark.parametrize("name", ["grouped", "two streams", "self-feeding"])
def test_it_stops_where_the_certificate_allows_it(name):
    """A looser tolerance takes fewer steps, and one that rounding forbids does not take all."""
    _, sym, params = case(name)
    steps = []
    for tolerance in (1e-1, 1e-5, 1e-10, 1e-300):
        found = min_mass(params, sym, tolerance=tolerance)
        assert found.gap <= max(tolerance, 1e-12)
        steps.append(found.iterations)
    assert steps == sorted(steps)
    assert steps[0] < steps[2] <= steps[3] < 40


@pytest.mark.parametrize("name", ["self-feeding", "batch norm eval", "two streams"])
def test_both_ways_to_a_step_lead_to_the_same_minimum(name, monkeypatch):
    """Solved as they are or by conjugate gradients, and those only as far as a step needs."""
    _, sym, params = case(name)
    stack = {n: torch.stack([t, 2 * t + 0.1]) for n, t in params.items()}
    first = min_mass(stack, sym)
    monkeypatch.setattr(balancing, "_LARGEST", 0)
    products, multiply = [], balancing.Posynomial.laplacian
    monkeypatch.setattr(
        balancing.Posynomial, "laplacian", lambda *a: products.append(1) or multiply(*a)
    )
    rough, count = min_mass(stack, sym), len(products)
    monkeypatch.setattr(balancing, "_ROUGHEST", 1e-13)
    products.clear()
    exact = min_mass(stack, sym)
    torch.testing.assert_close(rough.minimum, first.minimum, rtol=1e-14, atol=0)
    torch.testing.assert_close(rough.minimum, exact.minimum, rtol=1e-14, atol=0)
    assert count < 0.9 * len(products)


@pytest.mark.parametrize("largest", [0, 2**16], ids=["conjugate gradients", "dense"])
@pytest.mark.parametrize("name", ["mlp", "deep mlp", "two streams", "grouped", "self-feeding"])
def test_layers_and_weights_of_all_sizes_have_a_certificate(name, largest, monkeypatch):
    """A first layer of 1e-15 and a last of 1e-3, layers and weights over twelve decades."""
    monkeypatch.setattr(balancing, "_LARGEST", largest)
    _, sym, params = case(name)
    g = torch.Generator().manual_seed(0)
    decades = lambda *size: 10 ** (12 * torch.rand(size, generator=g).double() - 9)  # noqa: E731
    sizes = {sym.weights[0]: 1e-15, sym.weights[-1]: 1e-3}
    networks = [{n: t * sizes.get(n, 1) for n, t in params.items()}]
    networks += [{n: t * decades() for n, t in params.items()} for _ in range(4)]
    networks += [{n: t * decades(*t.shape) for n, t in params.items()} for _ in range(4)]
    for weights in (*networks, P.stack(networks)):
        found = min_mass(weights, sym)
        assert (found.gap < 1e-9).all()
        assert found.attained.all()
        assert found.iterations < 60
        at = mass(rescale(weights, sym, found.scales), sym)
        torch.testing.assert_close(at, found.minimum, rtol=1e-9, atol=0)


def test_warm_start_is_faster_and_the_same():
    _, sym, params = setup(models.mlp(20, [16, 12, 8], 4), torch.randn(1, 20))
    first = min_mass(params, sym)
    nudged = {n: t * (1 + 1e-6 * torch.randn_like(t)) for n, t in params.items()}
    again, cold = min_mass(nudged, sym, start=first.scales), min_mass(nudged, sym)
    assert again.iterations < cold.iterations
    torch.testing.assert_close(again.minimum, cold.minimum, rtol=1e-9, atol=0)


def test_dead_units_are_reported_and_the_rest_is_solved():
    _, sym, params = setup(models.mlp(7, [6], 3), torch.randn(1, 7))
    params = {n: t.clone() for n, t in params.items()}
    params["1.weight"][2] = 0
    params["3.weight"][:, 4] = 0
    found = min_mass(params, sym)
    a, c = params["1.weight"].norm(dim=1), params["3.weight"].norm(dim=0)
    alive = torch.tensor([0, 1, 3, 5])
    torch.testing.assert_close(found.minimum, 2 * (a * c)[alive].sum(), rtol=1e-12, atol=0)
    left = mass(rescale(params, sym, found.scales), sym) - found.minimum
    torch.testing.assert_close(left, a[4] ** 2 + c[2] ** 2, rtol=1e-12, atol=0)
    assert not found.attained
    assert found.dead == 2
    assert (found.scales[0][[2, 4]] == 1).all()
    assert found.gap < 1e-10


def test_biases_are_excluded_and_gains_included():
    _, sym, params = setup(normed(), torch.randn(2, 2, 6, 6))
    assert sym.weights == ("0.weight", "1.weight", "3.weight", "4.weight", "7.weight")
    torch.testing.assert_close(mass(params, sym), masses(params, sym.weights).sum())
    raw = Forward(lambda s, x: torch.relu(x @ s.w + s.b) @ s.o)
    raw.w, raw.b, raw.o = (nn.Parameter(torch.randn(s)) for s in ((5, 4), (4,), (4, 2)))
    assert discover(raw, torch.randn(2, 5)).weights == ("w", "o")
