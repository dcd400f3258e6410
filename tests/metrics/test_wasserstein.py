"""Wasserstein distance of draws equals that of the cheapest assignment, and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.special import ndtri

from lightning_bnn import metrics as M
from lightning_bnn.metrics.regression import wasserstein_of_each

G = torch.Generator().manual_seed(0)
X = torch.randn(6, 3, 2, generator=G, dtype=torch.float64)
Y = 2 * torch.randn(4, 3, 2, generator=G, dtype=torch.float64) + 1


def cheapest(x, y):
    """By brute force: both repeated until there are equally many, then assigned."""
    count = math.lcm(len(x), len(y))
    x, y = (np.repeat(t, count // len(t)) for t in (x, y))
    costs = (x[:, None] - y[None]) ** 2
    return math.sqrt(costs[linear_sum_assignment(costs)].mean())


@pytest.mark.parametrize(("n", "m"), [(6, 4), (4, 6), (4, 4), (5, 3), (1, 4), (6, 1)])
def test_it_is_the_cheapest_way_to_move_one_to_the_other(n, m):
    x, y = (X, Y) if n >= 4 or m == 4 else (Y, X)
    x, y = x[:n], y[:m]
    found = wasserstein_of_each(x, y)
    for i in range(3):
        for j in range(2):
            wanted = cheapest(x[:, i, j].numpy(), y[:, i, j].numpy())
            assert float(found[i, j]) == pytest.approx(wanted, abs=1e-12)
            unsorted = float((x[: min(n, m), i, j] - y[: min(n, m), i, j]).square().mean().sqrt())
            assert n != m or wanted <= unsorted
    assert float(M.wasserstein(x, y)) == pytest.approx(float(found.mean()))
    assert found[0, 0] != pytest.approx(float(found[1, 0]))


def test_of_normal_laws_it_is_the_closed_form():
    quantiles = torch.from_numpy(ndtri((np.arange(20_000) + 0.5) / 20_000))[:, None]
    found = float(M.wasserstein(3 + 2 * quantiles, quantiles[::4] - 1))
    assert found == pytest.approx(math.hypot(4, 1), rel=1e-3)
    assert float(M.energy_distance(*(3 + 2 * quantiles, 0 * quantiles) * 2)) == 0


@pytest.mark.parametrize(("n", "floor"), [(50, 0.31), (100, 0.22), (1000, 0.08)])
def test_draws_of_one_law_have_the_floor_that_is_stated(n, floor):
    x, y = torch.randn(2, n, 200, generator=G, dtype=torch.float64)
    assert float(M.wasserstein(x, y)) == pytest.approx(floor, abs=0.02)
    assert float(M.wasserstein(x, y + 0.5)) > floor + 0.2


def test_it_has_the_unit_of_the_values_and_no_order():
    whole = float(M.wasserstein(X, Y))
    assert float(M.wasserstein(7 * X, 7 * Y)) == pytest.approx(7 * whole)
    assert float(M.wasserstein(X.flip(0), Y)) == pytest.approx(whole)
    assert float(M.wasserstein(Y, X)) == pytest.approx(whole)
    assert float(M.wasserstein(X, X.flip(0))) == 0


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("values", "reference", "message"),
    [
        (X, Y[:, :2], r"same examples, got shapes \(3, 2\) and \(2, 2\)"),
        (X[:, 0, 0], Y, r"`values` must be a float tensor \(samples, batch, ...\)"),
        (X, Y.long(), "`reference` must be a float tensor"),
        (X[:0], Y, "`values` must be .* of at least one sample"),
        (X, Y / 0, "`reference` must be finite"),
    ],
)
def test_what_is_no_draw_is_refused(values, reference, message):
    with pytest.raises(ValueError, match=message):
        M.wasserstein(values, reference)
