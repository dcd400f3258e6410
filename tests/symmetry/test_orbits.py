"""Projections onto orbits: of stacks, of gradients, and what they refuse."""

import pytest
import torch
from checked_symmetries import find
from torch import nn

from weightsym import discover
from weightsym import params as P
from weightsym.groups.orbits import orbit_directions

NETS = ("mlp", "T5 table", "low rank", "norms of padding")
MORE = ("rotary half", "grouped convolutions", "cells in a loop, GRU")


@pytest.fixture(params=NETS)
def case(request):
    return find(request.param)[:3]


def drawn(params, orbit, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(params[n].shape, generator=g, dtype=torch.float64) for n in orbit.names}


def close(one, other, **tolerance):
    for name, t in one.items():
        torch.testing.assert_close(t, other[name], **tolerance or {"rtol": 1e-9, "atol": 1e-10})


@pytest.mark.parametrize("name", [*NETS, *MORE])
def test_the_matrix_of_tangents_has_the_products_of_derivatives(name, monkeypatch):
    net, _, sym, _ = find(name)
    params = P.of(net)
    matrix = orbit_directions(params, sym)
    monkeypatch.setattr("weightsym.groups.orbits.sparse_tangents", lambda *_: None)
    wanted = orbit_directions(params, sym)
    assert (matrix._sparse, wanted._sparse) != (None, None)
    assert matrix.names == wanted.names
    vector, generators = drawn(params, wanted), torch.randn(wanted.size).double()
    close(matrix.times(generators), wanted.times(generators))
    torch.testing.assert_close(matrix.adjoint(vector), wanted.adjoint(vector))
    close(matrix.off(vector), wanted.off(vector))


def test_members_of_a_stack_are_projected_each_by_itself(case):
    net, _, sym = case
    stack = {n: t.double() if t.is_floating_point() else t for n, t in P.populate(net, 3).items()}
    every = orbit_directions(stack, sym)
    vectors = drawn(stack, every)
    onto, products = every.onto(vectors), every.adjoint(vectors)
    for k in range(3):
        alone = orbit_directions({n: t[k] for n, t in stack.items()}, sym)
        close(alone.onto({n: t[k] for n, t in vectors.items()}), {n: t[k] for n, t in onto.items()})
        torch.testing.assert_close(
            alone.adjoint({n: t[k] for n, t in vectors.items()}), products[k]
        )


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_tangents_of_any_length_are_projected_alike(factor):
    net, x = mlp_of_two(), torch.randn(5, 3).double()
    net[0].weight.data[1] *= factor
    net[0].bias.data[1] *= factor
    net[2].weight.data[:, 1] *= factor
    orbit = orbit_directions(P.of(net), discover(net, x))
    vector = drawn(P.of(net), orbit)
    rest, size = orbit.off(vector), sum(t.square().sum() for t in vector.values()).sqrt()
    for unit in torch.eye(orbit.size, dtype=torch.float64):
        tangent = orbit.times(unit)
        length = sum(t.square().sum() for t in tangent.values()).sqrt()
        assert abs(sum((rest[n] * t).sum() for n, t in tangent.items())) < 1e-9 * length * size


@pytest.mark.parametrize("name", ["T5 table", "mlp"])
def test_weights_that_are_no_numbers_are_given_up_at_once(name, recwarn):
    net, _, sym, _ = find(name)
    stack = P.populate(net, 2)
    first = sym.weights[0]
    stack[first] = stack[first].clone()
    stack[first][0] = torch.nan
    vectors = {n: torch.ones_like(t) for n, t in stack.items()}
    rest = orbit_directions(stack, sym).off(vectors)
    alone = orbit_directions({n: t[1] for n, t in stack.items()}, sym)
    close(alone.off({n: t[1] for n, t in vectors.items()}), {n: t[1] for n, t in rest.items()})
    orbit_directions({n: t[0] for n, t in stack.items()}, sym).off(
        {n: t[0] for n, t in vectors.items()}
    )
    assert not [w for w in recwarn if "have not converged" in str(w.message)]


def mlp_of_two():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("seed", range(2))
def test_what_is_all_along_the_orbit_has_no_rest(seed, recwarn):
    torch.manual_seed(seed)
    cell, x = nn.GRU(3, 4, batch_first=True).double(), torch.randn(2, 5, 3).double()
    orbit = orbit_directions(P.of(cell), discover(cell, x))
    along = orbit.times(torch.randn(orbit.size))
    assert max(t.abs().max() for t in orbit.off(along).values()) < 1e-12
    assert not [w for w in recwarn if "have not converged" in str(w.message)]


def test_projections_in_inference_mode_and_of_vectors_with_a_history():
    net, x = mlp_of_two(), torch.randn(5, 3).double()
    sym, params = discover(net, x), P.of(net)
    vector = drawn(params, orbit_directions(params, sym))
    wanted = orbit_directions(params, sym).off(vector)
    with torch.inference_mode():
        own = {n: t.clone() for n, t in params.items()}
        close(orbit_directions(own, sym).off({n: t.clone() for n, t in vector.items()}), wanted)
    live = {n: t.clone().requires_grad_() for n, t in vector.items()}
    found = orbit_directions(params, sym).off(live)
    assert not any(found[n].requires_grad for n in orbit_directions(params, sym).names)


def test_logits_may_be_shifted_too():
    net, x = nn.Linear(3, 4).double(), torch.randn(9, 3).double()
    sym, names = discover(net, x), ("weight", "bias")
    losses = net(x).log_softmax(-1)[:, 0].sum(), net(x)[:, 0].sum()
    gradient, other = (
        dict(zip(names, torch.autograd.grad(loss, net.parameters()), strict=True))
        for loss in losses
    )
    orbit = orbit_directions(P.of(net), sym, softmax_shift=True)
    assert orbit.size == 4
    assert orbit.adjoint(gradient).abs().max() < 1e-12
    assert orbit.adjoint(other).abs().max() > 1e-3
    assert orbit_directions(P.of(net), sym).size == 0
