"""Large networks are matched tensor by tensor, by sketches: the same elements are found."""

import sys

import numpy as np
import pytest
import torch
from checked_symmetries import find, seeded
from known_networks import ORDERED, marked
from scipy.optimize import linear_sum_assignment
from torch import nn

from weightsym import (
    Element,
    discover,
    flip,
    match,
    match_all,
    permute,
    random_mixings,
    random_permutations,
    random_signs,
)
from weightsym import params as P
from weightsym.matching.channels import distance
from weightsym.matching.moved import Recent, gram, inner_products
from weightsym.matching.sketches import Sketches

SETTINGS = {
    "ascent": {"LARGE": 0, "SMALL": 0, "MANY": 2},
    "match": {"LARGE": 0, "SMALL": 0},
    "channels": {"LARGE": 0, "_EXACT": 0},
    "moved": {"_AT_ONCE": 7, "_KEPT": 200},
}
some = pytest.mark.parametrize("name", map(marked, ORDERED[::6]))


def count_as_large(monkeypatch):
    """All networks count as large ones, and next to nothing is held at once."""
    for module, settings in SETTINGS.items():
        for name, value in settings.items():
            monkeypatch.setattr(sys.modules[f"weightsym.matching.{module}"], name, value)


@pytest.fixture
def as_large(monkeypatch):
    count_as_large(monkeypatch)


def furthest(a, b, names):
    return max((float((a[n] - b[n]).abs().max()) for n in names), default=0.0)


def moved(params, sym, signs=True):
    g = seeded(3)
    params = flip(params, sym, random_signs(sym, g)) if signs else params
    return permute(params, sym, random_permutations(sym, g))


# ------------------------------------------------------------ moving
def test_what_no_longer_fits_is_let_go_of():
    recent = Recent[str](100)
    for k, size in enumerate((5, 4, 10, 40, 10)):
        recent[str(k)] = torch.zeros(size)
        assert recent.size == sum(4 * t.numel() for t in recent.values()) <= 100
    assert list(recent) == ["1", "2", "4"]


def test_sums_over_columns_are_those_of_the_whole(as_large):
    a, b = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    assert torch.allclose(gram(a, b, torch.float64), a @ b.mT)
    assert torch.allclose(inner_products(a, b, torch.float64), (a * b).sum((1, 2)))
    assert torch.allclose(distance({"w": a}, {"w": b[0]}, ["w"]), (a - b[0]).flatten(1).norm(dim=1))


# ------------------------------------------------------------ sketches
def units(count, noise, seed=0):
    """Two layers with the same units in another order, their symmetries, and the places."""
    net = nn.Sequential(nn.Linear(60, count), nn.Tanh(), nn.Linear(count, 40))
    sym, goal = discover(net, torch.randn(2, 60)), P.of(net)
    order = torch.randperm(count, generator=seeded(seed))
    noisy = {
        n: t + noise * t.std() * torch.randn(t.shape, generator=seeded(seed))
        for n, t in goal.items()
    }
    moving = {n: t[None] for n, t in permute(noisy, sym, [order]).items()}
    return sym, moving, goal, list(sym.permutations[0].placements)


def table(sym, moving, goal, views):
    def rows(params):
        both = params["0.weight"], params["0.bias"][:, None], params["2.weight"].T
        return torch.cat(both, 1).double()

    return (rows(goal) @ rows({n: t[0] for n, t in moving.items()}).T).numpy()


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3, 0.6])
def test_partners_are_those_of_the_exact_assignment(noise):
    sym, moving, goal, views = units(200, noise)
    found = Sketches(sym, moving, goal).partners(views, flips=False)
    values = table(sym, moving, goal, views)
    assert found is not None
    assert np.array_equal(found.order, linear_sum_assignment(values, maximize=True)[1])
    assert np.allclose(found.products.numpy(), values[np.arange(200), found.order], rtol=1e-4)


def test_partners_with_other_signs_are_found():
    sym, moving, goal, views = units(200, 0.1)
    signs = random_signs(sym, seeded(2))
    flipped = flip(moving, sym, signs)
    plain = Sketches(sym, moving, goal).partners(views, flips=False)
    found = Sketches(sym, flipped, goal).partners(views, flips=True)
    assert np.array_equal(found.order, plain.order)
    assert torch.equal(found.products.sign(), signs[0][torch.from_numpy(found.order)])


def test_units_that_nearly_agree_are_told_apart_by_exact_products():
    sym, moving, goal, views = units(100, 0.0)
    moving, goal = ({n: t.clone() for n, t in w.items()} for w in (moving, goal))
    order = linear_sum_assignment(table(sym, moving, goal, views), maximize=True)[1]
    for n in ("0.weight", "0.bias", "2.weight"):  # two units that differ by a hundredth
        units_of, there = (w.T if n == "2.weight" else w for w in (goal[n], moving[n][0]))
        noise = torch.randn(units_of[0].shape, generator=seeded(4))
        units_of[1] = units_of[0] + 0.01 * noise
        there[order[1]] = units_of[1]
    found = Sketches(sym, moving, goal).partners(views, flips=False)
    assert not found.sure
    values = table(sym, moving, goal, views)
    assert np.array_equal(found.order, linear_sum_assignment(values, maximize=True)[1])


def test_units_with_nothing_in_common_are_left_to_exact_products():
    sym, moving, _, views = units(200, 0.0)
    other = {n: torch.randn(t.shape[1:], generator=seeded(7)) for n, t in moving.items()}
    assert Sketches(sym, moving, other).partners(views, flips=False) is None


# ------------------------------------------------------------ matching
@some
def test_large_networks_end_where_small_ones_do(name, monkeypatch):
    _, _, sym, params = find(name)
    if not sym.permutations:
        pytest.skip("nothing can be permuted")
    copy = moved(params, sym, signs=False)
    small = match(copy, params, sym, method="ascent")
    count_as_large(monkeypatch)
    large = match(copy, params, sym, method="ascent")
    assert float(large.objective) >= float(small.objective) * (1 - 1e-5) - 1e-9


def test_nothing_else_is_tried_where_every_unit_has_its_partner(as_large, monkeypatch):
    """Channels inside heads are sure with their heads; another network takes Frank-Wolfe."""
    _, _, sym, params = find("sdpa")
    tried = []
    joint = sys.modules["weightsym.matching.match"].frank_wolfe
    monkeypatch.setattr(
        "weightsym.matching.match.frank_wolfe", lambda *args: tried.append(1) or joint(*args)
    )
    found = match(moved(params, sym, signs=False), params, sym)
    assert (found.method, tried) == ("ascent", [])
    g = seeded(5)
    other = {n: torch.randn(t.shape, generator=g).to(t) for n, t in params.items()}
    match(other, params, sym)
    assert tried


@pytest.mark.parametrize(
    "name", ["attention", "rotary half", "rotary, grouped", "low rank", "a stream of layer norms"]
)
def test_matrices_of_large_networks_are_found(name, as_large):
    _, _, sym, params = find(name)
    element = Element.of_groups(
        sym,
        permutations=random_permutations(sym, seeded(1)),
        matrices=random_mixings(sym, seeded(2)),
    )
    copy = element(params)
    found = match_all(copy, params, sym)
    assert float(found.before) > 0.1
    assert float(found.after) < 1e-3 * float(found.before)
