"""Products with the Hessian of the mass against autograd, and directions rough at first."""

import pytest
import torch
from test_min_mass import NETWORKS, setup

from lightning_bnn.symmetry import balancing, min_mass
from lightning_bnn.symmetry.laplacian import Laplacian
from lightning_bnn.symmetry.mass_problem import mass_problem


def problem_of(name):
    build, shape, batch_norm = NETWORKS[name]
    torch.manual_seed(0)
    _, sym, params = setup(build(), torch.randn(shape), batch_norm=batch_norm)
    stack = {n: torch.stack([t, 2 * t + 0.1]) for n, t in params.items()}
    return params, sym, mass_problem(stack, sym)


@pytest.mark.parametrize("name", NETWORKS)
def test_products_with_a_quarter_of_the_hessian(name):
    """Of every member at a point of its own."""
    _, _, problem = problem_of(name)
    u, t = 0.3 * torch.randn(2, *problem.plus.shape, dtype=torch.float64)
    found = Laplacian(problem.flow(u))(t)
    hessian = torch.autograd.functional.hessian(lambda v: problem.value(v).sum(), u) / 4
    torch.testing.assert_close(found, torch.einsum("mukv,kv->mu", hessian, t))


@pytest.mark.parametrize("name", ["self-feeding", "batch norm eval", "two streams"])
def test_rough_directions_take_fewer_products_to_the_same_minimum(name, monkeypatch):
    """And the default tolerance ends within rounding of a minimum to full precision."""
    params, sym, _ = problem_of(name)
    products, multiply = [], Laplacian.__call__
    monkeypatch.setattr(Laplacian, "__call__", lambda *a: products.append(1) or multiply(*a))
    rough, count = min_mass(params, sym), len(products)
    precise = min_mass(params, sym, tolerance=1e-15)
    torch.testing.assert_close(rough.minimum, precise.minimum, rtol=2e-15, atol=0)
    monkeypatch.setattr(balancing, "_ROUGHEST", 1e-13)
    products.clear()
    exact = min_mass(params, sym)
    torch.testing.assert_close(rough.minimum, exact.minimum, rtol=2e-15, atol=0)
    assert count < 0.8 * len(products)
