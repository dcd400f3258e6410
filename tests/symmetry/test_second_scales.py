"""Second scales of products: a factor grows, another one or what reads the product shrinks."""

import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from checked_symmetries import furthest, least_by_descent
from known_networks import NETWORKS

from weightsym import (
    canonicalise,
    mass,
    min_mass,
    random_scales,
    rescale,
)
from weightsym import params as P
from weightsym.actions import permute
from weightsym.elements import random_permutations
from weightsym.verify import random_element


def test_units_that_meet_at_one_position_multiply_there():
    """A product of a channel with itself has twice its scale."""
    _, _, sym, params = found("all products of two channels")
    (group,) = sym.scalings
    (where,) = [k for k, a in enumerate(sym.axes) if a.tensor == "down.weight" and a.role == "in"]
    powers = {p.exponent: p for p in group.placements if p.axis == where}
    assert powers.keys() == {-1, -2}
    assert powers[-1].meets_itself
    assert not powers[-2].meets_itself
    s = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    moved = rescale(params, sym, [s])
    expected = params["down.weight"] / (s[:, None] * s).flatten()
    torch.testing.assert_close(moved["down.weight"], expected)
    again = pickle.loads(pickle.dumps(sym))  # noqa: S301
    torch.testing.assert_close(rescale(params, again, [s])["down.weight"], expected)


# ------------------------------------------------------------ least mass


def found(name):
    net, (x, *_), sym = NETWORKS[name].known()
    return net, x, sym, P.of(net)


WITH_SECOND_SCALES = [
    "a product",
    "packed gates",
    "three factors",
    "a ReLU gate",
    "linear attention and products",
    "all products of two channels",
    "squared ReLUs",
    "a gate of squared ReLUs",
]


@pytest.mark.parametrize("name", WITH_SECOND_SCALES)
def test_no_descent_finds_less_mass(name):
    net, x, sym, params = found(name)
    least = min_mass(params, sym, tolerance=1e-13)
    for seed in range(2):
        found_by = least_by_descent(params, replace(sym, linear=()), seed)
        assert found_by == pytest.approx(float(least.minimum), rel=1e-12)
    at = rescale(params, sym, least.scales)
    assert float(mass(at, sym)) == pytest.approx(float(least.minimum), rel=1e-13)
    torch.testing.assert_close(P.apply(net, at, x), P.apply(net, params, x), rtol=1e-9, atol=1e-9)
    assert least.attained
    without = [u for k, u in enumerate(sym.scalings) if k != len(sym.scalings) - 1]
    fewer = replace(sym, scalings=tuple(without))
    assert min_mass(params, fewer).minimum > least.minimum * (1 + 1e-6)


@pytest.mark.parametrize("name", WITH_SECOND_SCALES)
def test_the_certificate_holds_wherever_it_is_taken(name):
    _, _, sym, params = found(name)
    best = min_mass(params, sym, tolerance=1e-14).minimum
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        start = rescale(params, sym, random_scales(sym, g, spread=1.5))
        for steps in (1, 6, 8):
            early = min_mass(start, sym, max_iterations=steps)
            assert early.minimum * (1 - early.gap) <= best * (1 + 1e-13)
            assert early.minimum >= best * (1 - 1e-12)
        done = min_mass(start, sym)
        assert done.gap < 1e-10
        assert done.iterations < 40
        torch.testing.assert_close(done.minimum, best, rtol=1e-9, atol=0)


def test_a_quotient_has_no_least_mass():
    """Both factors can vanish if the denominator does so faster: what reads the quotient, too."""
    net, x, sym, params = found("a quotient")
    least = min_mass(params, sym)
    assert not least.attained
    assert float(least.minimum) == 0
    at = rescale(params, sym, least.scales)
    assert mass(at, sym) <= least.mass * (1 + 1e-12)
    torch.testing.assert_close(P.apply(net, at, x), P.apply(net, params, x))


def test_a_stack_is_every_member_and_zeros_are_said():
    net, _, sym, _ = found("a product")
    stack = P.populate(net, 4, torch.Generator().manual_seed(0))
    stack["gate.weight"][1] = 0
    stack["up.weight"][2, 0] = 0
    together = min_mass(stack, sym)
    assert together.attained.tolist() == [True, False, False, True]
    assert together.dead.tolist()[0] == 0
    for k, member in enumerate(P.unstack(stack)):
        alone = min_mass(member, sym)
        torch.testing.assert_close(together.minimum[k], alone.minimum, rtol=1e-9, atol=1e-12)
    # without a gate, what reads the product and the other factor can be driven to nothing
    assert float(together.minimum[1]) == pytest.approx(0, abs=1e-12)
    moved = mass(rescale(stack, sym, together.scales), sym)
    assert (moved <= together.mass * (1 + 1e-12)).all()
    assert all(s.isfinite().all() for s in together.scales)


# ------------------------------------------------------------ canonical forms
NAMES = ("a product", "three factors", "attention by linear", "squared ReLUs")
SCALINGS = ("unit-norm", "unit-std", "min-mass")


@pytest.mark.parametrize(("name", "scaling"), [*product(NAMES, SCALINGS), ("Mamba", "unit-norm")])
def test_one_form_for_the_whole_orbit(name, scaling):
    net, x, sym, params = found(name)
    form = canonicalise(params, sym, scaling)
    torch.testing.assert_close(P.apply(net, form, x), P.apply(net, params, x), rtol=1e-9, atol=1e-9)
    g = torch.Generator().manual_seed(3)
    other = rescale(params, sym, random_scales(sym, g, spread=1.0))
    other = permute(other, sym, random_permutations(sym, g))
    assert furthest(canonicalise(other, sym, scaling), form) < (
        1e-6 if scaling == "min-mass" else 1e-11
    )
    assert furthest(canonicalise(form, sym, scaling), form) < 1e-7
    assert furthest(other, params) > 0.1


@pytest.mark.bad_input
@pytest.mark.parametrize("scaling", ["unit-std", "min-mass"])
def test_signs_that_do_not_lead_to_one_form_are_refused(scaling):
    """Of four random networks of this kind, flips change the form of one."""
    _, _, sym, params = found("Mamba")
    with pytest.raises(ValueError, match="give networks of one orbit different forms of 'skip'"):
        canonicalise(params, sym, scaling)


@pytest.mark.bad_input
def test_norms_that_do_not_fix_all_scales_are_refused():
    net, x, sym, params = found("linear attention and products")
    with pytest.raises(ValueError, match="unit norms do not fix them beside matrices"):
        canonicalise(params, sym, "unit-norm", mixing="balanced")
    form = canonicalise(params, sym, "min-mass", mixing="balanced")
    other = random_element(params, sym, torch.Generator().manual_seed(1), mixing=True)
    assert furthest(canonicalise(other, sym, "min-mass", mixing="balanced"), form) < 1e-6
    torch.testing.assert_close(P.apply(net, form, x), P.apply(net, params, x))
    swapped = replace(sym, scalings=tuple(_with_second_first(sym)))
    with pytest.raises(ValueError, match="give networks of one orbit different forms of"):
        canonicalise(params, swapped, "unit-norm")


def _with_second_first(sym):
    """A basis of the scales of two factors in which each acts on the other's rows, too."""
    for group in sym.scalings:
        places = group.placements
        if group.name == "up.weight":
            rows = next(p for p in sym.scalings if p.name == "gate.weight").placements
            places = (*places, *(replace(p) for p in rows))
        yield replace(group, placements=places)
