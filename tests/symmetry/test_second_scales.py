"""Second scales of products: a factor grows, another one or what reads the product shrinks."""

import math
import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from cases import Forward
from mixing_networks import Products
from test_completeness import JACOBIAN_KERNEL, in_float64, kernel_dimension
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import (
    canonicalise,
    discover,
    mass,
    min_mass,
    random_scales,
    rescale,
)
from lightning_bnn.symmetry.actions import multiply, permute
from lightning_bnn.symmetry.elements import random_permutations
from lightning_bnn.symmetry.integer_kernel import integer_kernel
from lightning_bnn.symmetry.verify import random_element


def gated(forward, bias=True, down=True):
    """Two maps of the input, what is done with them, and a map that reads it."""

    def run(self, x):
        return self.down(forward(self.gate(x), self.up(x)))

    def build():
        maps = {name: nn.Linear(6, 3, bias) for name in ("gate", "up")}
        return Forward(run, down=nn.Linear(3, 5, down), **maps)

    return build


def glu():
    def forward(self, x):
        a, b = self.both(x).chunk(2, -1)
        return self.down(a * b)

    return Forward(forward, both=nn.Linear(6, 6), down=nn.Linear(3, 5))


def three():
    def forward(self, x):
        return self.down(self.a(x) * self.b(x) * self.c(x))

    maps = {name: nn.Linear(4, 2, False) for name in "abc"}
    return Forward(forward, down=nn.Linear(2, 4), **maps)


def pairs():
    """All products of two channels."""

    def forward(self, x):
        h = self.up(x)
        return self.down((h[..., :, None] * h[..., None, :]).flatten(-2))

    return Forward(forward, up=nn.Linear(4, 3), down=nn.Linear(9, 5))


def alone(function):
    """One map of the input, a function of all that it writes, and a map that reads it."""
    return lambda: Forward(
        lambda s, x: s.down(function(s.up(x))), up=nn.Linear(6, 3), down=nn.Linear(3, 5)
    )


def size(h, plus=0.0):
    return h.pow(2).mean(-1, keepdim=True) + plus


NETWORKS = {
    # network, size of inputs, dimension by hand
    "bilinear": (gated(lambda a, b: a * b), (6,), 3 + 3),
    "bilinear without biases": (gated(lambda a, b: a * b, False), (6,), 3 + 3),
    "gated linear units, packed": (glu, (6,), 3 + 3),
    "three factors": (three, (4,), 3 * 2),
    "quotient": (gated(lambda a, b: a / b, False, False), (6,), 3 + 3),
    # a matrix of heads each for scores and values, one number; two numbers of every product
    "linear attention and products": (Products, (4, 4), 2 * 8 + 2 + 6),
    # one nonlinearity takes one scale, but for that which commutes with scales
    "SwiGLU": (gated(lambda a, b: nn.functional.silu(a) * b), (6,), 3),
    "SwiGLU on the other side": (gated(lambda a, b: a * torch.sigmoid(b)), (6,), 3),
    "ReLU gate": (gated(lambda a, b: torch.relu(a) * b), (6,), 3 + 3),
    "a number beside a factor": (gated(lambda a, b: (1 + a) * b, False), (6,), 3),
    "a product beside a factor": (gated(lambda a, b: a * b + a, False), (6,), 3),
    # a square has twice the scale of what is squared, a root half of it
    "squared ReLU": (alone(lambda h: torch.relu(h).square()), (6,), 3),
    "squared ReLU that gates": (gated(lambda a, b: torch.relu(a) ** 2 * b), (6,), 3 + 3),
    "root of two squares": (gated(lambda a, b: (a.relu() ** 2 + b.relu() ** 2).sqrt()), (6,), 3),
    "a number beside a square": (alone(lambda h: (1 + torch.relu(h)) ** 2), (6,), 0),
    # whatever is divided by its own size has one scale, and the rotations of three channels
    "divided by its norm": (alone(lambda h: h / h.norm(dim=-1, keepdim=True)), (6,), 1 + 3),
    "divided by a root": (alone(lambda h: h / size(h) ** 0.5), (6,), 1 + 3),
    "times one over a root": (alone(lambda h: h * size(h).rsqrt()), (6,), 1 + 3),
    "a number beside the size": (alone(lambda h: h * size(h, 0.1).rsqrt()), (6,), 3),
}


@cache
def found(name):
    build, size, _ = {**NETWORKS, "pairs": (pairs, (4,), None)}[name]
    with in_float64():
        torch.manual_seed(0)
        net, x = build(), torch.randn(80, *size)
        for p in net.parameters():
            p.data += 0.3 * torch.randn_like(p)
        return net, x, discover(net, x), {n: t.detach() for n, t in P.of(net).items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_all_scales_are_found(name):
    net, x, sym, _ = found(name)
    with in_float64():
        kernel = kernel_dimension(net, x)
    assert sym.dimension == kernel == NETWORKS[name][2]
    assert not sym.frozen


@pytest.mark.parametrize("name", [*NETWORKS, "pairs"])
def test_scales_keep_the_function_on_other_inputs(name):
    net, x, sym, params = found(name)
    x = torch.randn(7, *x.shape[1:], dtype=torch.float64)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        other = random_element(params, sym, g, mixing=True)
        other = rescale(other, sym, random_scales(sym, g, spread=1.0))
        torch.testing.assert_close(
            P.apply(net, other, x), P.apply(net, params, x), rtol=1e-10, atol=1e-10
        )
    stack = P.populate(net, 3, g)
    moved = rescale(stack, sym, random_scales(sym, g, members=3))
    torch.testing.assert_close(P.apply(net, moved, x), P.apply(net, stack, x), rtol=1e-9, atol=1e-9)


def test_units_that_meet_at_one_position_multiply_there():
    """A product of a channel with itself has twice its scale."""
    _, _, sym, params = found("pairs")
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
def least_by_descent(params, sym, seed):
    """The mass at a random start, minimised by quasi-Newton over log scales."""
    g = torch.Generator().manual_seed(seed)
    logs = [torch.randn(s.units, generator=g, dtype=torch.float64) for s in sym.scalings]
    logs = [u.requires_grad_() for u in logs]
    optimizer = torch.optim.LBFGS(
        logs, max_iter=2000, tolerance_grad=1e-13, tolerance_change=0, history_size=30,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def value():
        optimizer.zero_grad()
        moved = multiply(params, sym, {"scalings": [u.exp() for u in logs]})
        total = sum(moved[n].square().sum() for n in sym.weights)
        total.backward()
        return total

    optimizer.step(value)
    with torch.no_grad():
        moved = multiply(params, sym, {"scalings": [u.exp() for u in logs]})
        return float(sum(moved[n].square().sum() for n in sym.weights))


WITH_SECOND_SCALES = ["bilinear", "gated linear units, packed", "three factors", "ReLU gate"]
WITH_SECOND_SCALES += ["linear attention and products", "pairs", "squared ReLU"]
WITH_SECOND_SCALES += ["squared ReLU that gates"]


@pytest.mark.parametrize("name", WITH_SECOND_SCALES)
def test_no_descent_finds_less_mass(name):
    net, x, sym, params = found(name)
    least = min_mass(params, sym, tolerance=1e-13)
    for seed in range(2):
        assert least_by_descent(params, sym, seed) == pytest.approx(float(least.minimum), rel=1e-12)
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
    net, x, sym, params = found("quotient")
    least = min_mass(params, sym)
    assert not least.attained
    assert float(least.minimum) == 0
    at = rescale(params, sym, least.scales)
    assert mass(at, sym) <= least.mass * (1 + 1e-12)
    torch.testing.assert_close(P.apply(net, at, x), P.apply(net, params, x))


def test_cvxpy_finds_the_same():
    _, _, sym, params = found("linear attention and products")
    slow, fast = (min_mass(params, sym, solver) for solver in ("cvxpy", "balance"))
    torch.testing.assert_close(slow.minimum, fast.minimum, rtol=1e-7, atol=0)


def test_a_stack_is_every_member_and_zeros_are_said():
    net, _, sym, _ = found("bilinear")
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
@pytest.mark.parametrize("scaling", ["unit-norm", "unit-std", "min-mass"])
@pytest.mark.parametrize(
    "name", ["bilinear", "three factors", "linear attention", "Mamba", "squared ReLU"]
)
def test_one_form_for_the_whole_orbit(name, scaling):
    net, x, sym, params = by_any_name(name)
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


@cache
def by_any_name(name):
    if name in NETWORKS:
        return found(name)
    build, inputs, _ = JACOBIAN_KERNEL[name]
    with in_float64():
        torch.manual_seed(0)
        net, x = build(), inputs()
        return net, *x, discover(net, *x), {n: t.detach() for n, t in P.of(net).items()}


def furthest(a, b):
    return max(float((a[n] - b[n]).abs().max()) for n in a)


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
    with pytest.raises(ValueError, match="unit norms do not fix them one by one"):
        canonicalise(params, swapped, "unit-norm")


def _with_second_first(sym):
    """A basis of the scales of two factors in which each acts on the other's rows, too."""
    for group in sym.scalings:
        places = group.placements
        if group.name == "up.weight":
            rows = next(p for p in sym.scalings if p.name == "gate.weight").placements
            places = (*places, *(replace(p) for p in rows))
        yield replace(group, placements=places)


# ------------------------------------------------------------ the equations
@pytest.mark.parametrize("seed", range(30))
def test_the_kernel_of_integer_equations(seed):
    g = np.random.default_rng(seed)
    table = g.integers(-2, 3, (g.integers(0, 7), g.integers(1, 8)))
    table[g.random(table.shape) < 0.4] = 0
    rows = [dict(enumerate(row)) for row in table.tolist()]
    free = set(g.integers(table.shape[1], size=2).tolist())
    basis = integer_kernel(rows, free)
    used = table.shape[1] if len(table) else 0
    solutions = np.zeros((len(basis), table.shape[1]), int)
    for k, row in enumerate(basis):
        solutions[k, list(row)] = list(row.values())
        assert math.gcd(*row.values()) == 1
    assert not (table @ solutions.T).any()
    rank = np.linalg.matrix_rank(table) if table.size else 0
    assert len(basis) == used - rank == (np.linalg.matrix_rank(solutions) if len(basis) else 0)
