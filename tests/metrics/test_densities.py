"""Mixtures of Gaussians and their scores equal numerical integration, scipy, and brute force."""

import math

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy import integrate, optimize, stats

from lightning_bnn import metrics as M
from lightning_bnn.metrics.gaussian_mixture import (
    mean_difference,
    mean_distance,
    mixture_cdf,
    mixture_moments,
    mixture_nll,
    mixture_quantiles,
    thinned,
)
from lightning_bnn.metrics.regression import PITCalibration

G = torch.Generator().manual_seed(0)
MEANS = 2 * torch.randn(4, 3, 2, generator=G, dtype=torch.float64)
STDS = torch.rand(4, 3, 2, generator=G, dtype=torch.float64) + 0.1
OTHERS = torch.randn(3, 3, 2, generator=G, dtype=torch.float64), STDS[:3].flip(0)
Y = 2 * torch.randn(3, 2, generator=G, dtype=torch.float64)
EVERY = [(i, j) for i in range(3) for j in range(2)]


def cdf(x, means, stds):
    return np.mean([stats.norm.cdf(x, m, s) for m, s in zip(means, stds, strict=True)])


def one(tensors, i, j):
    return [t[:, i, j].tolist() for t in tensors]


def integral(function, *breaks):
    edges = [-30.0, *sorted(breaks), 30.0]
    parts = zip(edges, edges[1:], strict=False)
    return sum(integrate.quad(function, a, b, epsabs=1e-9, limit=200)[0] for a, b in parts)


# ------------------------------------------------------------ against scipy
@pytest.mark.parametrize(("i", "j"), EVERY[:3])
def test_scores_are_the_integrals_of_their_definitions(i, j):
    x, others, y = one((MEANS, STDS), i, j), one(OTHERS, i, j), float(Y[i, j])
    means, stds, *beside = (t[:, i : i + 1, j] for t in (MEANS, STDS, *OTHERS))
    wanted = integral(lambda t: (cdf(t, *x) - (t >= y)) ** 2, y)
    assert float(M.crps(means, stds, Y[i : i + 1, j])) == pytest.approx(wanted, abs=1e-7)
    assert float(M.crps(means, stds * 1.1, Y[i : i + 1, j])) != pytest.approx(wanted, abs=1e-4)
    wanted = 2 * integral(lambda t: (cdf(t, *x) - cdf(t, *others)) ** 2, 0.0)
    assert float(M.energy_distance(means, stds, *beside)) == pytest.approx(wanted, abs=1e-7)


def test_transform_density_and_moments_are_those_of_scipy():
    u, nll = M.pit(MEANS, STDS, Y), mixture_nll(MEANS, STDS, Y)
    mean, std = mixture_moments(MEANS, STDS)
    for i, j in EVERY:
        x, y = one((MEANS, STDS), i, j), float(Y[i, j])
        assert float(u[i, j]) == pytest.approx(cdf(y, *x), abs=1e-12)
        density = np.mean([stats.norm.pdf(y, m, s) for m, s in zip(*x, strict=True)])
        assert float(nll[i, j]) == pytest.approx(-math.log(density))
        second = np.mean([m**2 + s**2 for m, s in zip(*x, strict=True)])
        assert float(std[i, j] ** 2 + mean[i, j] ** 2) == pytest.approx(second)


def test_quantiles_are_roots_of_the_distribution_function():
    levels = torch.tensor([1e-8, 0.05, 0.5, 0.95], dtype=torch.float64)
    found = mixture_quantiles(MEANS, STDS, levels)
    for k, q in enumerate(levels.tolist()):
        torch.testing.assert_close(
            mixture_cdf(MEANS, STDS, found[k]), levels[k].expand(3, 2), rtol=1e-11, atol=0
        )
        for i, j in EVERY[:2]:
            x = one((MEANS, STDS), i, j)
            root = optimize.brentq(lambda t, x=x, q=q: cdf(t, *x) - q, -40, 40, xtol=1e-13)
            assert float(found[k, i, j]) == pytest.approx(root, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_quantiles_of_one_gaussian_and_of_far_modes(scale):
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    one_mode = mixture_quantiles(torch.zeros(2), torch.full((2,), scale), levels)
    wanted = scale * torch.tensor(stats.norm.ppf(levels.numpy()))
    torch.testing.assert_close(one_mode, wanted, rtol=1e-6, atol=1e-15 * scale)
    far = scale * torch.tensor([[-1e6, 1e6], [1.0, 1.0]], dtype=torch.float64)
    low, _, high = mixture_quantiles(*far, levels) / scale
    assert float(low) == pytest.approx(-1e6 + stats.norm.ppf(0.2), rel=1e-9)
    assert float(high) == pytest.approx(1e6 + stats.norm.ppf(0.8), rel=1e-9)


def test_chunks_do_not_matter(monkeypatch):
    levels = torch.tensor([0.3, 0.6], dtype=torch.float64)

    def everything():
        both = *OTHERS, *(t[:, :, :] for t in (MEANS, STDS))
        return [
            mixture_quantiles(MEANS, STDS, levels), mean_distance(*both),
            mean_difference(MEANS, STDS), mean_distance(MEANS, STDS, MEANS, STDS),
        ]  # fmt: skip

    whole = everything()
    monkeypatch.setattr("lightning_bnn.metrics.gaussian_mixture._AT_ONCE", 7)
    for a, b in zip(everything(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(whole[2], whole[3])


# ------------------------------------------------------------ intervals
def test_intervals_by_quantiles_and_by_transforms_are_the_same():
    tails = torch.tensor([0.05, 0.95], dtype=torch.float64)
    low, high = mixture_quantiles(MEANS, STDS, tails)
    held = ((low < Y) & (high > Y)).double().mean()
    assert float(M.interval_coverage(MEANS, STDS, Y)) == float(held)
    assert float(M.interval_width(MEANS, STDS)) == pytest.approx(float((high - low).mean()))


def test_a_perfect_forecaster_and_an_overconfident_one():
    n = 4000
    means, stds = torch.randn(n, generator=G), torch.rand(n, generator=G) + 0.5
    y = means + stds * torch.randn(n, generator=G)
    perfect, sure = (means[None], stds[None]), (means[None], stds[None] / 2)
    assert float(M.interval_coverage(*perfect, y)) == pytest.approx(0.9, abs=0.02)
    assert float(M.interval_coverage(*sure, y)) < 0.7
    floor = M.quantile_calibration_floor(n)
    assert float(M.quantile_calibration(*perfect, y)) < 3 * floor
    assert float(M.quantile_calibration(*sure, y)) > 10 * floor
    assert float(M.crps(*perfect, y)) < float(M.crps(*sure, y))


@pytest.mark.parametrize("n", [1, 7, 100, 1000])
def test_the_floor_is_the_mean_deviation_of_binomial_shares(n):
    counts, levels = np.arange(n + 1), np.arange(1, 20) / 20
    wanted = [np.sum(stats.binom.pmf(counts, n, q) * np.abs(counts / n - q)) for q in levels]
    assert M.quantile_calibration_floor(n) == pytest.approx(np.mean(wanted))


# ------------------------------------------------------------ conventions
ALL = {
    "crps": (M.crps, (MEANS, STDS, Y)),
    "sharpness": (M.sharpness, (MEANS, STDS)),
    "coverage": (M.interval_coverage, (MEANS, STDS, Y)),
    "width": (M.interval_width, (MEANS, STDS)),
    "calibration": (M.quantile_calibration, (MEANS, STDS, Y)),
    "energy": (M.energy_distance, (MEANS, STDS, *OTHERS)),
}


@pytest.mark.parametrize("name", ALL)
def test_several_targets_are_averaged_and_scores_have_the_unit_of_the_target(name):
    function, args = ALL[name]
    alone = [float(function(*(t[..., k] for t in args))) for k in range(2)]
    assert float(function(*args)) == pytest.approx(sum(alone) / 2)
    assert name == "coverage" or alone[0] != pytest.approx(alone[1])
    factor = 1 if name in ("coverage", "calibration") else 7  # shares have none
    assert float(function(*(7 * t for t in args))) == pytest.approx(factor * float(function(*args)))


def test_more_networks_than_are_compared_in_pairs_are_thinned_evenly():
    means, stds = torch.randn(500, 2, generator=G), torch.ones(500, 2)
    kept = thinned(means, stds, 200)
    assert len(kept[0]) == 200
    assert torch.equal(kept[0][[0, -1]], means[[0, -1]])
    y = torch.zeros(2)
    assert float(M.crps(means, stds, y)) == float(M.crps(*kept, y))
    assert float(M.crps(means, stds, y)) == pytest.approx(
        float(M.crps(means, stds, y, 500)), rel=0.05
    )


BAD = {
    "`means` and `stds` must have the same shape": (MEANS, STDS[:2], Y),
    "`means` must be a float tensor": (MEANS.long(), STDS, Y),
    "`stds` must be": (MEANS, STDS - 1, Y),
    "must be finite": (MEANS / 0, STDS, Y),
    "`targets` must have shape": (MEANS, STDS, Y[:, 0]),
    "`targets` must be finite": (MEANS, STDS, Y / 0),
    "of at least one sample": (MEANS[:0], STDS[:0], Y),
    "`stds` must be a tensor, got float": (MEANS, 1.0, Y),
    "`targets` must be a tensor, got ndarray": (MEANS, STDS, Y.numpy()),
}


@pytest.mark.parametrize("function", ["crps", "pit", "interval_coverage", "quantile_calibration"])
def test_one_number_may_come_without_a_batch(function):
    one = MEANS[:, 0, 0], STDS[:, 0, 0], Y[0, 0]
    batch = (t.unsqueeze(-1) for t in one)
    score = getattr(M, function)
    torch.testing.assert_close(score(*one), score(*batch).squeeze())


def other_columns():
    metric = PITCalibration()
    metric.update(M.pit(MEANS, STDS, Y))
    metric.update(M.pit(MEANS[..., 0], STDS[..., 0], Y[..., 0]))


test_errors = refuses(
    *((lambda f=f, m=m: f(*BAD[m]), m)
      for m in BAD for f in (M.crps, M.interval_coverage, M.quantile_calibration)),
    *((lambda f=f, a=a, level=level: f(*a, level), "`level` must be between 0 and 1")
      for f, a in ((M.interval_coverage, (MEANS, STDS, Y)), (M.interval_width, (MEANS, STDS)))
      for level in (0, 1, math.nan, "0.9", True)),
    (lambda: mixture_quantiles(MEANS, STDS, torch.tensor([0.0, 0.5])), "`levels` must be numbers"),
    (lambda: M.quantile_calibration_floor(0), "`examples` must be at least 1"),
    (lambda: M.CRPS(0), "`samples` must be at least 1"),
    (lambda: M.energy_distance(MEANS, STDS, MEANS[:, :2], STDS[:, :2]), "over the same values"),
    (other_columns, "must have 2 columns as in earlier"),
)  # fmt: skip
