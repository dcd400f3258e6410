"""Scales of products and of several axes: none changes the function, none says what others say."""

import pytest
import torch
from checked_symmetries import least_by_descent
from known_networks import NETWORKS

from weightsym import canonicalise, discover, min_mass, random_scales, rescale
from weightsym.actions import permute
from weightsym.elements import random_permutations

NAMES = [
    "products of rows",
    "products of columns",
    "quotients of rows",
    "attention of gated units, ReLU",
    "attention of gated units",
    "attention of gated units with biases",
    "normalised tensor",
    "soft experts",
    "a stream that feeds itself",
]


def known(name):
    network, _, sym = NETWORKS[name].known()
    return network, sym


def random_weights(sym, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in sym.shapes.items()}


# ------------------------------------------------------------ no wrong group
@pytest.mark.parametrize("name", NAMES)
def test_scales_keep_the_function_without_the_help_of_the_check(name):
    """Zeros as an example show the check little or nothing: what is proposed must be right."""
    network, sym = known(name)
    blind = discover(network, torch.zeros(2, 5, 4).double())
    weights, x = random_weights(blind), torch.randn(2, 5, 4).double()

    def outputs(params):
        return torch.func.functional_call(network, params, (x,))

    g = torch.Generator().manual_seed(1)
    before = outputs(weights)
    assert blind.scaling_dof == sym.scaling_dof
    for moved in (
        rescale(weights, blind, random_scales(blind, g)),
        permute(weights, blind, random_permutations(blind, g)),
    ):
        torch.testing.assert_close(outputs(moved), before)
    if name != "quotients of rows":  # whose sizes do not count
        alike = {n: 2 * t for n, t in weights.items()}
        assert not torch.allclose(outputs(alike), before)


# ------------------------------------------------------------ the least mass
@pytest.mark.parametrize("name", NAMES)
def test_the_least_mass_has_a_certificate(name):
    _, sym = known(name)
    for seed in range(8):
        found = min_mass(random_weights(sym, seed), sym)
        assert found.minimum.isfinite()
        assert found.gap < 1e-8
        assert all(bool((s > 0).all()) for s in found.scales)


def test_no_descent_finds_less_in_a_stream_that_feeds_itself():
    _, sym = known("a stream that feeds itself")
    for seed in range(3):
        weights = random_weights(sym, seed)
        found = min_mass(weights, sym, mixing=True)
        assert found.attained
        assert least_by_descent(weights, sym, 0) == pytest.approx(float(found.minimum), rel=1e-10)


@pytest.mark.bad_input
def test_norms_do_not_fix_scales_of_some_units_only():
    _, sym = known("a symmetric weight")
    with pytest.raises(ValueError, match="give networks of one orbit different forms of"):
        canonicalise(random_weights(sym), sym, scaling="unit-norm")
