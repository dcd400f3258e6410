import cvxpy
import pytest
import torch
from checked_symmetries import least_by_descent, seeded
from mixing_networks import NETWORKS, WITH_PRODUCTS, known
from torch import nn

from weightsym import discover, mass, min_mass, mix, random_mixings, rescale
from weightsym import params as P
from weightsym.verify import random_element


@pytest.mark.parametrize("name", ["heads", "rotary", "chain", "products"])
def test_no_descent_finds_less(name):
    _, _, sym, params = known(name)
    found = min_mass(params, sym, mixing=True, tolerance=1e-12)
    others = [least_by_descent(params, sym, seed) for seed in range(2)]
    assert min(others) >= found.minimum * (1 - found.gap) * (1 - 1e-14)
    assert min(others) == pytest.approx(float(found.minimum), rel=1e-10)
    assert found.attained
    assert found.gap < 1e-8


@pytest.mark.parametrize("name", [*NETWORKS, *WITH_PRODUCTS])
def test_scales_and_matrices_reach_it(name):
    model, x, sym, params = known(name)
    found = min_mass(params, sym, mixing=True)
    best = mix(rescale(params, sym, found.scales), sym, found.matrices)
    torch.testing.assert_close(mass(best, sym), found.minimum, rtol=1e-10, atol=0)
    torch.testing.assert_close(P.apply(model, best, x), P.apply(model, params, x))
    assert found.minimum <= min_mass(params, sym).minimum * (1 + 1e-12)
    assert found.minimum <= min_mass(params, sym, mixing="only").minimum * (1 + 1e-12)
    other = random_element(params, sym, seeded(5), mixing=True)
    torch.testing.assert_close(
        min_mass(other, sym, mixing=True).minimum, found.minimum, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("name", [*NETWORKS, *WITH_PRODUCTS])
def test_the_bound_holds_wherever_it_is_taken(name):
    _, _, sym, params = known(name)
    best = min_mass(params, sym, mixing=True, tolerance=1e-14).minimum
    for seed in range(2):
        start = random_element(params, sym, seeded(seed), mixing=True)
        for rounds in (1, 3):
            early = min_mass(start, sym, mixing=True, max_iterations=rounds)
            assert early.minimum * (1 - early.gap) <= best * (1 + 1e-13)
            assert early.minimum >= best * (1 - 1e-12)


# ------------------------------------------------------------ closed forms
def heads_of(params, name, count):
    return params[f"layers.0.{name}.weight"].unflatten(0, (count, -1))


def test_heads_alone_are_twice_the_nuclear_norm():
    _, _, sym, params = known("heads")
    q, k, v = (heads_of(params, n, 2) for n in "qkv")
    o = params["layers.0.o.weight"].unflatten(1, (2, -1)).movedim(1, 0)
    inner = sum(torch.linalg.matrix_norm(m, "nuc").sum() for m in (q.mT @ k, o @ v))
    rest = mass(params, sym) - sum(params[f"layers.0.{n}.weight"].square().sum() for n in "qkvo")
    found = min_mass(params, sym, mixing="only")
    torch.testing.assert_close(found.minimum, rest + 2 * inner, rtol=1e-12, atol=0)
    assert found.gap < 1e-12


def test_grouped_queries_are_concatenated_and_planes_have_a_closed_form():
    _, _, sym, params = known("grouped queries")
    q, k = heads_of(params, "q", 2), heads_of(params, "k", 1)[0]
    before = mass(params, sym)
    value = params["layers.0.v.weight"]
    o = params["layers.0.o.weight"].unflatten(1, (2, -1)).movedim(1, 0).flatten(0, 1)
    stacked = torch.cat([q[0], q[1]], 1)
    inner = torch.linalg.matrix_norm(stacked.mT @ k, "nuc")
    inner = inner + torch.linalg.matrix_norm(o @ value, "nuc")
    gone = sum(params[f"layers.0.{n}.weight"].square().sum() for n in "qkvo")
    found = min_mass(params, sym, mixing="only")
    torch.testing.assert_close(found.minimum, before - gone + 2 * inner, rtol=1e-12, atol=0)

    _, _, sym, params = known("rotary")
    q, k = heads_of(params, "q", 2).square().sum(-1), heads_of(params, "k", 1).square().sum(-1)
    a, b = (t.unflatten(-1, (2, 2)).sum((0, 1)) for t in (q, k))
    planes = 2 * (a * b).sqrt().sum()
    value = params["layers.0.v.weight"]
    o = params["layers.0.o.weight"].unflatten(1, (2, -1)).movedim(1, 0).flatten(0, 1)
    inner = 2 * torch.linalg.matrix_norm(o @ value, "nuc")
    gone = sum(params[f"layers.0.{n}.weight"].square().sum() for n in "qkvo")
    found = min_mass(params, sym, mixing="only")
    expected = mass(params, sym) - gone + planes + inner
    torch.testing.assert_close(found.minimum, expected, rtol=1e-12, atol=0)


def test_one_head_against_a_convex_program():
    """Least ||A||^2 + ||B||^2 with A^T B = M is a semidefinite program."""
    a, b = torch.randn(2, 2, 3, dtype=torch.float64, generator=seeded(5))
    m = (a.T @ b).numpy()
    whole = cvxpy.Variable((6, 6), PSD=True)
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.trace(whole)), [whole[:3, 3:] == m])
    least = problem.solve(solver="CLARABEL")
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    model[0].weight.data, model[1].weight.data = b, a.T
    sym = discover(model, torch.randn(4, 3).double())
    found = min_mass(P.of(model), sym, mixing=True)
    assert float(found.minimum) == pytest.approx(least, rel=1e-6)


# ------------------------------------------------------------ limits, stacks, errors
def test_without_full_rank_the_least_mass_is_a_limit():
    model, x, sym, params = known("heads")
    params = {n: t.clone() for n, t in params.items()}
    params["layers.0.o.weight"][:, :4] = 0  # the values of the first head lead nowhere
    found = min_mass(params, sym, mixing="only")
    assert not found.attained
    q, k, v = (heads_of(params, n, 2) for n in "qkv")
    o = params["layers.0.o.weight"].unflatten(1, (2, -1)).movedim(1, 0)
    inner = sum(torch.linalg.matrix_norm(m, "nuc").sum() for m in (q.mT @ k, o @ v))
    gone = sum(params[f"layers.0.{n}.weight"].square().sum() for n in "qkvo")
    expected = mass(params, sym) - gone + 2 * inner
    torch.testing.assert_close(found.minimum, expected, rtol=1e-12, atol=0)
    for which in ("only", True):
        found = min_mass(params, sym, mixing=which)
        near = mix(rescale(params, sym, found.scales), sym, found.matrices)
        assert found.minimum <= mass(near, sym) <= found.mass * (1 + 1e-12)
        assert found.gap < 1e-8
        assert found.dead >= 1
        torch.testing.assert_close(P.apply(model, near, x), P.apply(model, params, x))


@pytest.mark.parametrize("name", ["heads", "rotary", "chain"])
def test_a_stack_is_every_member(name):
    model, _, sym, _ = known(name)
    stack = P.populate(model, 3, seeded(5))
    stack["head.weight" if name != "chain" else "maps.4.weight"][1] = 0
    together = min_mass(stack, sym, mixing=True)
    assert together.attained.tolist() == [True, False, True]
    for k, member in enumerate(P.unstack(stack)):
        alone = min_mass(member, sym, mixing=True)
        torch.testing.assert_close(together.minimum[k], alone.minimum, rtol=1e-9, atol=1e-12)
    moved = mix(rescale(stack, sym, together.scales), sym, together.matrices)
    assert (mass(moved, sym) <= together.mass * (1 + 1e-12)).all()
    last = "head.weight" if name != "chain" else "maps.4.weight"
    stack[last][1] = 1e-14 * stack[last][0]
    nearly = min_mass(stack, sym, mixing=True)
    torch.testing.assert_close(nearly.minimum, together.minimum, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mixing", [False, True])
def test_scales_to_start_from_may_be_those_of_all_or_of_each(mixing):
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    sym, stack = discover(net, torch.randn(1, 3)), P.populate(net, 2)
    given = min_mass(stack, sym, mixing=mixing, start=[torch.full((2, 5), 3.0), torch.ones(4)])
    torch.testing.assert_close(given.minimum, min_mass(stack, sym).minimum)


def test_scales_alone_are_as_before():
    _, _, sym, params = known("heads")
    found = min_mass(params, sym)
    assert found.matrices == ()
    undone = mix(params, sym, random_mixings(sym, seeded(5)))
    assert not torch.isclose(min_mass(undone, sym).minimum, found.minimum, rtol=1e-3)


def test_networks_with_nothing_to_mix():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    sym, params = discover(model, torch.randn(2, 3).double()), P.of(model)
    both = min_mass(params, sym, mixing=True)
    torch.testing.assert_close(both.minimum, min_mass(params, sym).minimum, rtol=1e-10, atol=0)
    assert float(min_mass(params, sym, mixing="only").excess) == 0


@pytest.mark.bad_input
def test_errors():
    _, _, sym, params = known("heads")
    with pytest.raises(ValueError, match="`mixing` must be True, False or 'only', got 'all'"):
        min_mass(params, sym, mixing="all")
