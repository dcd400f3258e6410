"""Derivatives of the mass against autograd, and the two ways to Newton's steps."""

import pytest
import torch
from test_min_mass import NETWORKS, setup

from weightsym import balancing, mass, min_mass, rescale
from weightsym.mass_problem import mass_problem


def problem_of(name):
    build, shape, batch_norm = NETWORKS[name]
    torch.manual_seed(0)
    _, sym, params = setup(build(), torch.randn(shape), batch_norm=batch_norm)
    stack = {n: torch.stack([t, 2 * t + 0.1]) for n, t in params.items()}
    return params, stack, sym


@pytest.mark.parametrize("name", NETWORKS)
def test_products_with_a_quarter_of_the_hessian(name):
    """Of every member at a point of its own."""
    _, stack, sym = problem_of(name)
    problem = mass_problem(stack, sym)
    u, t = 0.3 * torch.randn(2, *problem.inflow.shape, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda v: problem.moved(v).value.sum(), u) / 4
    expected, there = torch.einsum("mukv,kv->mu", hessian, t), problem.moved(u)
    torch.testing.assert_close(there.laplacian(t), expected)
    entering, leaving = there.slopes
    torch.testing.assert_close(((entering - leaving) @ t[..., None])[..., 0], expected)
    scales = u.exp().split([g.units for g in sym.scalings], -1)
    torch.testing.assert_close(there.value, mass(rescale(stack, sym, scales), sym))


@pytest.mark.parametrize("name", ["self-feeding", "batch norm eval", "two streams"])
def test_both_ways_to_a_step_lead_to_the_same_minimum(name, monkeypatch):
    """Solved as they are or by conjugate gradients, and those only as far as a step needs."""
    _, stack, sym = problem_of(name)
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
