"""Least masses: against convex programs and closed forms, with a bound wherever a search ends."""

import functools
from dataclasses import replace

import cvxpy
import numpy as np
import pytest
import torch
from cases import Forward, randomise
from checked_symmetries import find, least_by_descent, moved_at_random, seeded
from known_networks import NETWORKS as ROWS
from known_networks.mixing import MIXING as MIXED
from scipy.optimize import linprog
from torch import nn

from lightning_bnn import models
from weightsym import (
    canonicalise,
    discover,
    mass,
    min_mass,
    mix,
    permute,
    random_permutations,
    random_scales,
    rescale,
)
from weightsym import params as P
from weightsym.forms import balancing
from weightsym.forms.balancing import minimise, recession
from weightsym.forms.mass_problem import MatrixTerms, Posynomial, mass_problem


def lin(a, b, **options):
    return nn.Linear(a, b, **options, dtype=torch.float64)


def setup(model, x, **options):
    model = model.double().eval()
    return model, x.double(), discover(model, x.double(), **options), P.of(model)


# ------------------------------------------------------------ networks
def normed():
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))


def recurrent():
    net = nn.RNN(4, 5, nonlinearity="relu", batch_first=True)
    return Forward(lambda s, x: s.head(s.rnn(x[:, None])[0][:, -1]), rnn=net, head=nn.Linear(5, 3))


def residual():
    def forward(s, x):
        h = torch.relu(s.first(x))
        for one, two in ((s.a, s.b), (s.c, s.d)):
            h = torch.relu(h + two(torch.relu(one(h))))
        return s.head(h)

    layers = {name: nn.Linear(6, 6) for name in "abcd"}
    return Forward(forward, first=nn.Linear(4, 6), head=nn.Linear(6, 3), **layers)


SCALED = {
    "one hidden layer": (lambda: models.mlp(4, [5], 3), (2, 4)),
    "deep mlp": (lambda: models.mlp(4, [5, 6, 5, 4], 2), (2, 4)),
    "optunet": (models.optunet, (1, 1, 28, 28)),
    "batch norm carrier": (normed, (2, 2, 6, 6)),
    "batch norm eval": (normed, (2, 2, 6, 6)),
    "recurrent": (recurrent, (2, 4)),
    "residual": (residual, (2, 4)),
}
OF_TABLES = ("self-feeding", "sdpa", "groups of a transposed convolution", "a matrix with numbers",
             "experts of one module, top 2", "a vector of two layers")  # fmt: skip
PRODUCTS = ("a product", "packed gates", "three factors", "a ReLU gate", "squared ReLUs",
            "linear attention and products", "all products of two channels",
            "a gate of squared ReLUs")  # fmt: skip
SEVERAL_AXES = ("products of rows", "quotients of rows",
                "attention of gated units, ReLU", "attention of gated units with biases",
                "normalised tensor", "soft experts")  # fmt: skip
MIXING = (*MIXED, "linear attention and products")


@functools.cache
def problem(name):
    """A network with generic weights, an input, its symmetries and its weights."""
    if name not in SCALED:
        model, x, sym, params = find(name)
        return model, x, sym if name in MIXING else replace(sym, linear=(), shifts=()), params
    torch.manual_seed(0)
    build, shape = SCALED[name]
    options = {"batch_norm": "eval"} if name.endswith("eval") else {}
    return setup(randomise(build()), torch.randn(shape), **options)


# ------------------------------------------------------------ the least mass
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


@pytest.mark.parametrize("name", [*SCALED, *OF_TABLES, *PRODUCTS])
def test_balance_finds_what_cvxpy_finds(name):
    model, x, sym, params = problem(name)
    found = min_mass(params, sym)
    assert float(found.minimum) == pytest.approx(least_by_cvxpy(params, sym), rel=1e-7)
    assert found.attained
    rescaled = rescale(params, sym, found.scales)
    torch.testing.assert_close(mass(rescaled, sym), found.minimum, rtol=1e-10, atol=0)
    torch.testing.assert_close(P.apply(model, rescaled, x), P.apply(model, params, x))


@pytest.mark.parametrize(
    ("name", "mixing"),
    [*((n, True) for n in ("heads", "rotary heads", "chain", "linear attention and products")),
     ("self-feeding", False)],
)  # fmt: skip
def test_no_descent_finds_less(name, mixing):
    _, _, sym, params = problem(name)
    found = min_mass(params, sym, mixing=mixing, tolerance=1e-12)
    others = [least_by_descent(params, sym, seed) for seed in range(2)]
    assert min(others) >= found.minimum * (1 - found.gap) * (1 - 1e-14)
    assert min(others) == pytest.approx(float(found.minimum), rel=1e-10)
    assert found.attained


@pytest.mark.parametrize("name", MIXING)
def test_scales_and_matrices_reach_it(name):
    model, x, sym, params = find(name)
    found = min_mass(params, sym, mixing=True)
    best = mix(rescale(params, sym, found.scales), sym, found.matrices)
    torch.testing.assert_close(mass(best, sym), found.minimum, rtol=1e-10, atol=0)
    torch.testing.assert_close(P.apply(model, best, x), P.apply(model, params, x))
    assert found.minimum <= min_mass(params, sym).minimum * (1 + 1e-12)
    assert found.minimum <= min_mass(params, sym, mixing="only").minimum * (1 + 1e-12)


ONLY_SCALES = (*SCALED, *OF_TABLES, *PRODUCTS, *SEVERAL_AXES)
EARLY = [(name, size) for name in ONLY_SCALES for size in (0, 2**16)]
EARLY += [(name, None) for name in MIXING]


@pytest.mark.parametrize(("name", "largest"), EARLY)
def test_the_bound_holds_wherever_a_search_ends(name, largest, monkeypatch):
    """From anywhere on the orbit, solved as it is or by conjugate gradients."""
    mixing = largest is None
    monkeypatch.setattr(balancing, "_LARGEST", 2**16 if mixing else largest)
    _, _, sym, params = problem(name)
    best = min_mass(params, sym, mixing=mixing, tolerance=1e-14)
    start = moved_at_random(params, sym, seeded(1)) if mixing else None
    start = start or rescale(params, sym, random_scales(sym, seeded(1), spread=1.5))
    for steps in (1, 3, 6):
        early = min_mass(start, sym, mixing=mixing, max_iterations=steps)
        assert early.minimum * (1 - early.gap) <= best.minimum * (1 + 1e-13)
        assert early.minimum >= best.minimum * (1 - 1e-12)
    done = min_mass(start, sym, mixing=mixing)
    assert done.gap < 1e-8
    assert all(bool((s > 0).all()) for s in done.scales)
    torch.testing.assert_close(done.minimum, best.minimum, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["deep mlp", "residual", "self-feeding"])
def test_it_stops_where_the_certificate_allows_it(name):
    """A looser tolerance takes fewer steps, and one that rounding forbids does not take all."""
    _, _, sym, params = problem(name)
    steps = []
    for tolerance in (1e-1, 1e-5, 1e-10, 1e-300):
        found = min_mass(params, sym, tolerance=tolerance)
        assert found.gap <= max(tolerance, 1e-12)
        steps.append(found.iterations)
    assert steps == sorted(steps)
    assert steps[0] < steps[2] <= steps[3] < 40


@pytest.mark.parametrize("largest", [0, 2**16], ids=["conjugate gradients", "dense"])
@pytest.mark.parametrize("name", ["deep mlp", "residual", "optunet"])
def test_layers_and_weights_of_all_sizes_have_a_certificate(name, largest, monkeypatch):
    """A first layer of 1e-15 and a last of 1e-3, layers and weights over twelve decades."""
    monkeypatch.setattr(balancing, "_LARGEST", largest)
    _, _, sym, params = problem(name)
    g = seeded()
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


@pytest.mark.parametrize("mixing", [False, True])
def test_it_may_start_from_scales_of_all_or_of_each(mixing):
    _, _, sym, params = setup(models.mlp(20, [16, 12], 4), torch.randn(1, 20))
    first = min_mass(params, sym)
    nudged = {n: t * (1 + 1e-6 * torch.randn_like(t)) for n, t in params.items()}
    again, cold = min_mass(nudged, sym, start=first.scales), min_mass(nudged, sym)
    assert again.iterations < cold.iterations
    torch.testing.assert_close(again.minimum, cold.minimum, rtol=1e-9, atol=0)
    stack, start = P.stack([params, nudged]), [torch.full((2, 16), 3.0), torch.ones(12)]
    given = min_mass(stack, sym, mixing=mixing, start=start)
    torch.testing.assert_close(given.minimum, torch.stack([first.minimum, cold.minimum]))


# ------------------------------------------------------------ closed forms
def test_two_layers_have_a_closed_form_and_dead_units_are_left_out():
    """m* = 2 sum |in| |out|, scale^2 = |out| / |in|."""
    _, _, sym, params = setup(models.mlp(7, [6], 3), torch.randn(1, 7))
    found = min_mass(params, sym)
    a, c = params["1.weight"].norm(dim=1), params["3.weight"].norm(dim=0)
    torch.testing.assert_close(found.minimum, 2 * (a * c).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.scales[0] ** 2, c / a, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mass, a.square().sum() + c.square().sum(), rtol=1e-12, atol=0)
    params = {n: t.clone() for n, t in params.items()}
    params["1.weight"][2] = 0
    params["3.weight"][:, 4] = 0
    found, alive = min_mass(params, sym), torch.tensor([0, 1, 3, 5])
    torch.testing.assert_close(found.minimum, 2 * (a * c)[alive].sum(), rtol=1e-12, atol=0)
    left = mass(rescale(params, sym, found.scales), sym) - found.minimum
    torch.testing.assert_close(left, a[4] ** 2 + c[2] ** 2, rtol=1e-12, atol=0)
    assert (bool(found.attained), int(found.dead)) == (False, 2)
    assert (found.scales[0][[2, 4]] == 1).all()


def test_optunet_has_a_closed_form_for_a_whole_stack():
    model, _, sym, _ = problem("optunet")
    stack = P.populate(model, 20)
    found = min_mass(stack, sym)
    m1 = stack["0.weight"].square().sum((2, 3, 4))
    m2 = stack["3.weight"].square().sum((2, 3, 4)).reshape(-1, 2, 5)
    mf = stack["7.weight"].square().sum(1).reshape(-1, 2, 5)
    closed = 3 * (m1 ** (1 / 3) * (m2 * mf).sqrt().sum(-1) ** (2 / 3)).sum(-1)
    torch.testing.assert_close(found.minimum, closed, rtol=1e-12, atol=0)
    assert (found.gap < 1e-10).all()


@pytest.mark.parametrize("mixing", [False, True, "only"])
def test_where_nothing_can_be_moved_the_mass_is_least(mixing):
    model, _, sym, params = setup(models.mlp(3, [4], 2, nn.Tanh), torch.randn(1, 3))
    for weights in (params, P.populate(model, 5)):
        assert (min_mass(weights, sym, mixing=mixing).excess == 0).all()


def inner(params, heads, groups):
    """Twice the nuclear norms of the products of values with outputs, and queries with keys."""
    q, k, v = (params[f"layers.0.{n}.weight"].unflatten(0, (groups, -1)) for n in "qkv")
    q = q.unflatten(1, (heads // groups, -1)).movedim(1, -1).flatten(-2)
    o = params["layers.0.o.weight"].unflatten(1, (groups, heads // groups, -1))
    o = o.permute(1, 2, 0, 3).flatten(1, 2)
    return [2 * torch.linalg.matrix_norm(m, "nuc").sum() for m in (o @ v, q.mT @ k)]


def beside(params, sym):
    """The mass of all weights that are not in the attention."""
    attention = sum(params[f"layers.0.{n}.weight"].square().sum() for n in "qkvo")
    return mass(params, sym) - attention


@pytest.mark.parametrize(
    ("name", "groups"), [("heads", 2), ("grouped heads", 1), ("rotary heads", 1)]
)
def test_heads_alone_are_twice_the_nuclear_norm(name, groups):
    _, _, sym, params = find(name)
    values, scores = inner(params, 2, groups)
    if name == "rotary heads":  # planes of numbers have a closed form, too
        q, k = (params[f"layers.0.{n}.weight"].unflatten(0, (-1, 4)).square().sum(-1) for n in "qk")
        a, b = (t.unflatten(-1, (2, 2)).sum((0, 1)) for t in (q, k))
        scores = 2 * (a * b).sqrt().sum()
    found = min_mass(params, sym, mixing="only")
    expected = beside(params, sym) + values + scores
    torch.testing.assert_close(found.minimum, expected, rtol=1e-12, atol=0)
    assert found.gap < 1e-12


def test_one_head_against_a_convex_program():
    """Least ||A||^2 + ||B||^2 with A^T B = M is a semidefinite program."""
    a, b = torch.randn(2, 2, 3, dtype=torch.float64, generator=seeded(5))
    whole = cvxpy.Variable((6, 6), PSD=True)
    constraint = whole[:3, 3:] == (a.T @ b).numpy()
    program = cvxpy.Problem(cvxpy.Minimize(cvxpy.trace(whole)), [constraint])
    model = nn.Sequential(lin(3, 2, bias=False), lin(2, 3, bias=False))
    model[0].weight.data, model[1].weight.data = b, a.T
    found = min_mass(P.of(model), discover(model, torch.randn(4, 3).double()), mixing=True)
    assert float(found.minimum) == pytest.approx(program.solve(solver="CLARABEL"), rel=1e-6)


def test_biases_are_excluded_and_gains_included():
    _, _, sym, params = problem("batch norm carrier")
    assert sym.weights == ("0.weight", "1.weight", "3.weight", "4.weight", "7.weight")
    total = sum(params[n].square().sum() for n in sym.weights)
    torch.testing.assert_close(mass(params, sym), total)
    raw = Forward(lambda s, x: torch.relu(x @ s.w + s.b) @ s.o)
    raw.w, raw.b, raw.o = (nn.Parameter(torch.randn(s)) for s in ((5, 4), (4,), (4, 2)))
    assert discover(raw, torch.randn(2, 5)).weights == ("w", "o")


# ------------------------------------------------------------ limits
ZEROS = {
    # network, tensors set to zero, whether the least mass is reached
    "as it is": ("residual", (), True),
    "head": ("residual", ("head.weight",), False),
    "first layer": ("residual", ("first.weight",), False),
    "a branch": ("residual", ("b.weight",), False),
    "both ends": ("residual", ("first.weight", "head.weight"), True),
    "everything": ("residual", ("first.", "a.", "b.", "c.", "d.", "head."), True),
    "input of a recurrent net": ("recurrent", ("rnn.weight_ih_l0",), False),
    "head of a plain net": ("one hidden layer", ("3.weight",), False),
}


def with_zeros(kind):
    name, zeros, attained = ZEROS[kind]
    model, x, sym, params = problem(name)
    return model, x, sym, {n: t * (not n.startswith(zeros or "-")) for n, t in params.items()}


@pytest.mark.parametrize("largest", [0, 2**16], ids=["conjugate gradients", "dense"])
@pytest.mark.parametrize("kind", ZEROS)
def test_scales_are_finite_and_the_bound_is_the_limit(kind, largest, monkeypatch):
    monkeypatch.setattr(balancing, "_LARGEST", largest)
    products, multiply = [], Posynomial.laplacian
    monkeypatch.setattr(Posynomial, "laplacian", lambda *a: products.append(1) or multiply(*a))
    model, x, sym, params = with_zeros(kind)
    found = min_mass(params, sym)
    assert bool(found.attained) == ZEROS[kind][2]
    assert len(products) < 1200
    assert all(s.isfinite().all() and (s.log().abs() < 20).all() for s in found.scales)
    assert float(found.gap) < 1e-9
    at = mass(rescale(params, sym, found.scales), sym)
    if found.attained:
        torch.testing.assert_close(at, found.minimum, rtol=1e-9, atol=1e-12)
    assert found.minimum - 1e-12 <= at <= found.mass * (1 + 1e-9)
    far = mass(rescale(params, sym, _far_along(params, sym, found)), sym)
    torch.testing.assert_close(far, found.minimum, rtol=1e-6, atol=1e-9)
    form = canonicalise(params, sym, "min-mass")
    assert all(t.isfinite().all() for t in form.values())
    torch.testing.assert_close(P.apply(model, form, x), P.apply(model, params, x))


@pytest.mark.parametrize("size", [1e-40, 1e-12, 1e12])
@pytest.mark.parametrize("kind", ["head", "first layer", "a branch"])
def test_terms_of_any_size_may_vanish(kind, size):
    """Below rounding, scales may reach the limit as far as numbers can tell."""
    _, _, sym, params = with_zeros(kind)
    for name in ("first.weight", "head.weight", "c.weight"):
        weights = {**params, name: size * params[name]}
        found = min_mass(weights, sym)
        assert found.gap < 1e-9
        at = mass(rescale(weights, sym, found.scales), sym)
        assert found.minimum * (1 - 1e-12) <= at <= found.mass * (1 + 1e-12)
        if found.attained:
            torch.testing.assert_close(at, found.minimum, rtol=1e-9, atol=0)


def _far_along(params, sym, found):
    """Scales far along a direction in which no term grows, found by linear programming."""
    direction = steepest(mass_problem(params, sym))
    start = torch.cat([s.log() for s in found.scales])
    return torch.exp(start + 10 * torch.as_tensor(direction)).split([g.units for g in sym.scalings])


def exponents(terms):
    """The exponent of every term with a positive coefficient, as a dense row."""
    unit, several = np.eye(terms.variables), terms.powers.to_dense().numpy()
    table = np.concatenate([unit, 0 * unit[:1], -unit, several])
    rows = [table[(terms.single[0] > 0).numpy()]]
    for m in terms.matrices:
        for b, r, c in (m.terms[0] > 0).nonzero().tolist():
            rows.append((table[m.rows[b, r]] + table[m.columns[b, c]])[None])
    return np.concatenate(rows)


def steepest(terms):
    """A direction along which as many terms as possible fall, and none grows."""
    a = np.unique(exponents(terms), axis=0)
    n, k = terms.variables, len(a)
    objective = np.concatenate([np.zeros(n), -np.ones(k)])  # slack of every term, at most one
    upper = np.concatenate([a, np.eye(k)], 1)
    bounds = [(-20, 20)] * n + [(0, 1)] * k
    found = linprog(objective, upper, np.zeros(k), bounds=bounds)
    assert found.status == 0
    return found.x[:n]


def random_problem(seed, units=4, several=0):
    """Sparse terms of all kinds, also those in which two scales grow together, or several."""
    generator, density = seeded(seed), 0.04 + 0.005 * seed
    n, size = units, 2 * units + 1 + several
    keep = lambda *shape: (torch.rand(*shape, generator=generator) < density).double()  # noqa: E731
    everything = torch.arange(size)[None]
    m = MatrixTerms(keep(1, 1, size, size), everything, everything)
    full = MatrixTerms(keep(1, 1, 1, 1).expand(1, 1, 3, 2), everything[:, 3:6], everything[:, -2:])
    at = torch.randint(n, (2 * several,), generator=generator)
    power = torch.randint(1, 3, (2 * several,), generator=generator)
    power = power * (1 - 2 * torch.randint(2, (2 * several,), generator=generator))
    entries = torch.stack([torch.arange(several).repeat(2), at])
    options = {"check_invariants": True}
    powers = torch.sparse_coo_tensor(entries, power.double(), (several, n), **options).coalesce()
    return Posynomial(keep(1, size), (m, full) if several else (m,), powers)


@pytest.mark.parametrize("several", [0, 3])
@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_terms_vanish_exactly_where_linear_programming_says(seed, several):
    terms = random_problem(seed, several=several)
    found = minimise(terms, torch.zeros_like(terms.inflow), 1e-10, 100)
    for direction in (recession(terms), found.fall):
        for rows, falls in ((exponents(terms), True), (exponents(found.problem), False)):
            slopes, expected = rows @ direction[0].numpy(), rows @ steepest(terms) < -1e-6
            assert ((slopes < -0.5) == expected).all()
            assert ((abs(slopes) < 1e-9) == ~expected).all()
            assert falls or not expected.any()
    assert found.gap < 1e-9
    assert bool((found.problem.moved(found.logs).value - found.value).abs() < 1e-12)


def test_both_outcomes_occur():
    """The negative control of the test above."""
    found = [bool((recession(random_problem(k)) == 0).all()) for k in range(40)]
    assert 5 < sum(found) < 35


@pytest.mark.parametrize("seed", range(4))
def test_values_and_derivatives_are_those_of_a_sum_of_exponentials(seed):
    given = random_problem(seed + 20, several=3)
    terms = torch.from_numpy(exponents(given)).double()
    u = torch.randn(1, 4, generator=seeded(seed), dtype=torch.float64)
    value = lambda v: (2 * v @ terms.T).exp().sum()  # noqa: E731
    there, t = given.moved(u), torch.ones_like(u).cumsum(1)
    gradient = torch.autograd.functional.jacobian(value, u)
    torch.testing.assert_close(there.value[0], value(u))
    torch.testing.assert_close(2 * (there.inflow - there.outflow), gradient)
    hessian = torch.autograd.functional.hvp(value, u, t)[1]
    torch.testing.assert_close(4 * there.laplacian(t), hessian)
    entering, leaving = there.slopes
    torch.testing.assert_close(4 * ((entering - leaving) @ t[..., None])[..., 0], hessian)
    assert given.degree >= int(terms.abs().sum(1).max())


def test_sparse_networks_never_gain_mass():
    _, _, sym, _ = setup(net := models.mlp(3, [4, 4], 2), torch.randn(2, 3))
    stack, generator = P.populate(net, 200, seeded()), seeded()
    stack = {n: t * 10 * (torch.rand(t.shape, generator=generator) < 0.4) for n, t in stack.items()}
    found = min_mass(stack, sym)
    after = mass(rescale(stack, sym, found.scales), sym)
    assert (after <= found.mass * (1 + 1e-9)).all()
    assert (after >= found.minimum * (1 - 1e-9)).all()
    assert found.iterations < 200


def test_without_full_rank_the_least_mass_is_a_limit():
    model, x, sym, params = find("heads")
    params = {n: t.clone() for n, t in params.items()}
    params["layers.0.o.weight"][:, :4] = 0  # the values of the first head lead nowhere
    found = min_mass(params, sym, mixing="only")
    torch.testing.assert_close(
        found.minimum, beside(params, sym) + sum(inner(params, 2, 2)), rtol=1e-12, atol=0
    )
    for which in ("only", True):
        found = min_mass(params, sym, mixing=which)
        near = mix(rescale(params, sym, found.scales), sym, found.matrices)
        assert not found.attained
        assert found.minimum <= mass(near, sym) <= found.mass * (1 + 1e-12)
        assert found.gap < 1e-8
        assert found.dead >= 1
        torch.testing.assert_close(P.apply(model, near, x), P.apply(model, params, x))


def test_a_quotient_has_no_least_mass():
    """Both factors can vanish if the denominator does so faster: what reads the quotient, too."""
    net, x, sym, params = problem("a quotient")
    least = min_mass(params, sym)
    assert (bool(least.attained), float(least.minimum)) == (False, 0)
    at = rescale(params, sym, least.scales)
    assert mass(at, sym) <= least.mass * (1 + 1e-12)
    torch.testing.assert_close(P.apply(net, at, x), P.apply(net, params, x))


STACKS = {  # names of tensors that are zero in the second network
    "heads": ("head.weight", True), "rotary heads": ("head.weight", True),
    "chain": ("maps.4.weight", True), "a product": ("gate.weight", False),
    "residual": ("first.weight", False),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_every_member(name):
    zero, mixing = STACKS[name]
    model, _, sym, _ = problem(name)
    stack = P.populate(model, 3, seeded(5))
    stack[zero][1] = 0
    together = min_mass(stack, sym, mixing=mixing)
    assert together.attained.tolist() == [True, False, True]
    for k, member in enumerate(P.unstack(stack)):
        alone = min_mass(member, sym, mixing=mixing)
        torch.testing.assert_close(together.minimum[k], alone.minimum, rtol=1e-9, atol=1e-12)
    moved = rescale(stack, sym, together.scales)
    moved = mix(moved, sym, together.matrices) if mixing else moved
    assert (mass(moved, sym) <= together.mass * (1 + 1e-12)).all()
    stack[zero][1] = 1e-14 * stack[zero][0]
    nearly = min_mass(stack, sym, mixing=mixing)
    torch.testing.assert_close(nearly.minimum, together.minimum, rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------ scales without the help of the check
@pytest.mark.parametrize("name", SEVERAL_AXES)
def test_scales_keep_the_function_without_the_help_of_the_check(name):
    """Zeros as an example show the check little or nothing: what is proposed must be right."""
    network, _, sym = ROWS[name].known()
    blind = discover(network, torch.zeros(2, 5, 4).double())
    g, x = seeded(1), torch.randn(2, 5, 4).double()
    weights = {n: torch.randn(s, generator=g).double() for n, s in sym.shapes.items()}
    before = torch.func.functional_call(network, weights, (x,))
    assert blind.scaling_dof == sym.scaling_dof
    for moved in (
        rescale(weights, blind, random_scales(blind, g)),
        permute(weights, blind, random_permutations(blind, g)),
    ):
        torch.testing.assert_close(torch.func.functional_call(network, moved, (x,)), before)
