"""Least masses that no finite scales reach: the bound, finite scales, and that it is said."""

import math

import numpy as np
import pytest
import torch
from cases import Forward
from scipy.optimize import linprog
from torch import nn

from lightning_bnn import models
from weightsym import balancing, canonicalise, discover, mass, min_mass, rescale
from weightsym import params as P
from weightsym.balancing import minimise, recession
from weightsym.mass_problem import Matrix, Posynomial, mass_problem


def lin(a, b, **options):
    return nn.Linear(a, b, **options, dtype=torch.float64)


def residual():
    def forward(self, x):
        h = torch.relu(self.first(x))
        for one, two in ((self.a, self.b), (self.c, self.d)):
            h = torch.relu(h + two(torch.relu(one(h))))
        return self.head(h)

    layers = {name: lin(6, 6) for name in "abcd"}
    return Forward(forward, first=lin(4, 6), head=lin(6, 3), **layers)


def recurrent():
    net = nn.RNN(4, 5, nonlinearity="relu", batch_first=True).double()
    return Forward(lambda s, x: s.head(s.rnn(x[:, None])[0][:, -1]), rnn=net, head=lin(5, 3))


ZEROS = {
    # network, tensors set to zero, whether the least mass is reached
    "as it is": (residual, (), True),
    "head": (residual, ("head.weight",), False),
    "first layer": (residual, ("first.weight",), False),
    "a branch": (residual, ("b.weight",), False),
    "both ends": (residual, ("first.weight", "head.weight"), True),
    "everything": (residual, ("first.", "a.", "b.", "c.", "d.", "head."), True),
    "input of a recurrent net": (recurrent, ("rnn.weight_ih_l0",), False),
    "head of a plain net": (lambda: models.mlp(4, [5], 3).double(), ("3.weight",), False),
}


def with_zeros(kind):
    torch.manual_seed(0)
    build, zeros, attained = ZEROS[kind]
    net = build()
    sym = discover(net, torch.randn(2, 4).double())
    params = {n: t * (not n.startswith(zeros or "-")) for n, t in P.of(net).items()}
    return params, sym, attained


@pytest.mark.parametrize("kind", ZEROS)
def test_scales_are_finite_and_the_bound_is_the_limit(kind):
    params, sym, attained = with_zeros(kind)
    found = min_mass(params, sym)
    assert bool(found.attained) == attained
    assert all(s.isfinite().all() and (s.log().abs() < 20).all() for s in found.scales)
    assert float(found.gap) < 1e-9
    assert math.isfinite(float(found.minimum))
    at = mass(rescale(params, sym, found.scales), sym)
    if attained:
        torch.testing.assert_close(at, found.minimum, rtol=1e-9, atol=1e-12)
    assert found.minimum - 1e-12 <= at <= found.mass * (1 + 1e-9)
    far = mass(rescale(params, sym, _far_along(params, sym, found)), sym)
    torch.testing.assert_close(far, found.minimum, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [1e-40, 1e-12, 1e-3, 1e12])
@pytest.mark.parametrize("kind", ["head", "first layer", "a branch"])
def test_terms_of_any_size_may_vanish(kind, size):
    """Below rounding, scales may reach the limit as far as numbers can tell."""
    params, sym, _ = with_zeros(kind)
    for name in ("first.weight", "head.weight", "c.weight"):
        weights = {**params, name: size * params[name]}
        found = min_mass(weights, sym)
        assert found.gap < 1e-9
        at = mass(rescale(weights, sym, found.scales), sym)
        assert found.minimum * (1 - 1e-12) <= at <= found.mass * (1 + 1e-12)
        if found.attained:
            torch.testing.assert_close(at, found.minimum, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", ZEROS)
def test_conjugate_gradients_find_the_same_limit_and_do_not_wander(kind, monkeypatch):
    params, sym, attained = with_zeros(kind)
    expected = min_mass(params, sym).minimum
    monkeypatch.setattr(balancing, "_LARGEST", 0)
    products, multiply = [], Posynomial.laplacian
    monkeypatch.setattr(Posynomial, "laplacian", lambda *a: products.append(1) or multiply(*a))
    found = min_mass(params, sym)
    torch.testing.assert_close(found.minimum, expected, rtol=1e-10, atol=1e-12)
    assert bool(found.attained) == attained
    assert found.gap < 1e-9
    assert len(products) < 1200


def _far_along(params, sym, found):
    """Scales far along a direction in which no term grows, found by linear programming."""
    direction = steepest(mass_problem(params, sym))
    start = torch.cat([s.log() for s in found.scales])
    return torch.exp(start + 10 * torch.as_tensor(direction)).split([g.units for g in sym.scalings])


def exponents(problem):
    """The exponent of every term with a positive coefficient, as a dense row."""
    unit, several = np.eye(problem.variables), problem.powers.to_dense().numpy()
    table = np.concatenate([unit, 0 * unit[:1], -unit, several])
    rows = [table[(problem.single[0] > 0).numpy()]]
    for m in problem.matrices:
        for b, r, c in (m.terms[0] > 0).nonzero().tolist():
            rows.append((table[m.rows[b, r]] + table[m.columns[b, c]])[None])
    return np.concatenate(rows)


def steepest(problem):
    """A direction along which as many terms as possible fall, and none grows."""
    a = np.unique(exponents(problem), axis=0)
    n, k = problem.variables, len(a)
    objective = np.concatenate([np.zeros(n), -np.ones(k)])  # slack of every term, at most one
    upper = np.concatenate([a, np.eye(k)], 1)
    bounds = [(-20, 20)] * n + [(0, 1)] * k
    found = linprog(objective, upper, np.zeros(k), bounds=bounds)
    assert found.status == 0
    return found.x[:n]


def random_problem(seed, units=4, several=0):
    """Sparse terms of all kinds, also those in which two scales grow together, or several."""
    generator, density = torch.Generator().manual_seed(seed), 0.04 + 0.005 * seed
    n, size = units, 2 * units + 1 + several
    keep = lambda *shape: (torch.rand(*shape, generator=generator) < density).double()  # noqa: E731
    everything = torch.arange(size)[None]
    m = Matrix(keep(1, 1, size, size), everything, everything)
    full = Matrix(keep(1, 1, 1, 1).expand(1, 1, 3, 2), everything[:, 3:6], everything[:, -2:])
    at = torch.randint(n, (2 * several,), generator=generator)
    power = torch.randint(1, 3, (2 * several,), generator=generator)
    power = power * (1 - 2 * torch.randint(2, (2 * several,), generator=generator))
    entries = torch.stack([torch.arange(several).repeat(2), at])
    options = {"check_invariants": True}
    powers = torch.sparse_coo_tensor(entries, power.double(), (several, n), **options).coalesce()
    return Posynomial(keep(1, size), (m, full) if several else (m,), powers)


@pytest.mark.parametrize("several", [0, 3])
@pytest.mark.parametrize("seed", range(20))
def test_terms_vanish_exactly_where_linear_programming_says(seed, several):
    problem = random_problem(seed, several=several)
    found = minimise(problem, torch.zeros_like(problem.inflow), 1e-10, 100)
    for direction in (recession(problem), found.fall):
        for terms, falls in ((exponents(problem), True), (exponents(found.problem), False)):
            slopes, expected = terms @ direction[0].numpy(), terms @ steepest(problem) < -1e-6
            assert ((slopes < -0.5) == expected).all()
            assert ((abs(slopes) < 1e-9) == ~expected).all()
            assert falls or not expected.any()
    assert found.gap < 1e-9
    assert bool((found.problem.moved(found.logs).value - found.value).abs() < 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_values_and_derivatives_are_those_of_a_sum_of_exponentials(seed):
    problem, terms = random_problem(seed + 20, several=3), None
    terms = torch.from_numpy(exponents(problem)).double()
    u = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    value = lambda v: (2 * v @ terms.T).exp().sum()  # noqa: E731
    there, t = problem.moved(u), torch.ones_like(u).cumsum(1)
    gradient = torch.autograd.functional.jacobian(value, u)
    torch.testing.assert_close(there.value[0], value(u))
    torch.testing.assert_close(2 * (there.inflow - there.outflow), gradient)
    hessian = torch.autograd.functional.hvp(value, u, t)[1]
    torch.testing.assert_close(4 * there.laplacian(t), hessian)
    entering, leaving = there.slopes
    torch.testing.assert_close(4 * ((entering - leaving) @ t[..., None])[..., 0], hessian)
    assert problem.degree >= int(terms.abs().sum(1).max())


def test_balancing_never_adds_mass():
    """Balanced scales alone would make the edges heavy that only lead out."""
    net = nn.Sequential(*(lin(a, b, bias=False) for a, b in ((1, 2), (2, 2), (2, 1))))
    net.insert(1, nn.ReLU())
    net.insert(3, nn.ReLU())
    sym = discover(net, torch.randn(4, 1).double())
    values = ([[4.9856], [1.4186]], [[4.5954, 19.8796], [0.3552, 0.0]], [[0.0, 0.28243]])
    params = {n: torch.tensor(v).double() for n, v in zip(P.of(net), values, strict=True)}
    found = min_mass(params, sym)
    assert not found.attained
    assert mass(rescale(params, sym, found.scales), sym) <= found.mass


def test_sparse_networks_never_gain_mass():
    generator = torch.Generator().manual_seed(0)
    net = models.mlp(3, [4, 4], 2).double()
    sym = discover(net, torch.randn(2, 3).double())
    stack = P.populate(net, 200, generator)
    stack = {n: t * 10 * (torch.rand(t.shape, generator=generator) < 0.4) for n, t in stack.items()}
    found = min_mass(stack, sym)
    after = mass(rescale(stack, sym, found.scales), sym)
    assert (after <= found.mass * (1 + 1e-9)).all()
    assert (after >= found.minimum * (1 - 1e-9)).all()
    assert found.iterations < 200


def test_both_outcomes_occur():
    """The negative control of the test above."""
    found = [bool((recession(random_problem(k)) == 0).all()) for k in range(40)]
    assert 5 < sum(found) < 35


@pytest.mark.parametrize("kind", ZEROS)
def test_canonical_forms_are_finite_and_keep_the_function(kind):
    params, sym, _ = with_zeros(kind)
    net, x = ZEROS[kind][0](), torch.randn(3, 4).double()
    form = canonicalise(params, sym, "min-mass")
    assert all(t.isfinite().all() for t in form.values())
    torch.testing.assert_close(P.apply(net, form, x), P.apply(net, params, x))


def test_members_of_a_stack_are_told_apart():
    cases = [with_zeros(kind) for kind in ("as it is", "head", "first layer", "both ends")]
    sym = cases[0][1]
    together = min_mass(P.stack([params for params, _, _ in cases]), sym)
    for k, (params, _, attained) in enumerate(cases):
        alone = min_mass(params, sym)
        assert bool(together.attained[k]) == attained
        torch.testing.assert_close(together.minimum[k], alone.minimum, rtol=1e-8, atol=0)
