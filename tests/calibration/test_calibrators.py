"""Calibrators against brute force, scikit-learn and closed forms; data that they must survive."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm

from lightning_bnn.calibration import fit_spread, fit_temperature, fit_vector, pooled
from lightning_bnn.calibration.calibrators import joint_log_prob

FITS = {"temperature": fit_temperature, "vector": fit_vector}


def examples(n=300, classes=4, samples=3, sharp=2.5, seed=0):
    """Networks that are surer than they are right."""
    g = torch.Generator().manual_seed(seed)
    truth = 1.5 * torch.randn(n, classes, generator=g, dtype=torch.float64)
    labels = torch.multinomial(truth.softmax(-1), 1, generator=g)[:, 0]
    noise = torch.randn(samples, n, classes, generator=g, dtype=torch.float64)
    return sharp * (truth + 0.7 * noise), labels


def nll(probs, labels):
    return -float(probs[torch.arange(len(labels)), labels].log().mean())


# ------------------------------------------------------------ temperature
def brute_force(logits, labels):
    """On a fine grid, in numpy, from the formula."""
    z, y = logits.numpy(), labels.numpy()
    grid = np.exp(np.linspace(math.log(0.05), math.log(20), 4001))

    def of(temperature):
        p = np.exp(z / temperature - np.log(np.exp(z / temperature).sum(-1, keepdims=True)))
        return -np.log(p.mean(0)[np.arange(len(y)), y]).mean()

    return grid[np.argmin([of(t) for t in grid])]


@pytest.mark.parametrize("pool", [False, True])
def test_temperature_is_where_the_nll_of_the_average_is_least(pool):
    logits, labels = examples(120)
    given = pooled(logits) if pool else logits
    found = fit_temperature(given, labels)
    assert found.value == pytest.approx(brute_force(given, labels), rel=2e-3)
    assert found.value > 1.5
    assert not found.at_bound
    best = nll(found(given), labels)
    assert best < nll(given.softmax(-1).mean(0), labels) - 0.1
    for factor in (0.98, 1.02):
        assert nll((given / (found.value * factor)).softmax(-1).mean(0), labels) > best


@pytest.mark.parametrize(("sign", "bound", "word"), [(1, 0.05, "right"), (-1, 20.0, "wrong")])
def test_temperature_at_its_bound_says_so(sign, bound, word):
    logits = 3.0 * sign * torch.eye(3)
    with pytest.warns(UserWarning, match=f"at its bound, {bound:g} .* so {word}"):
        found = fit_temperature(logits, torch.arange(3))
    assert (found.value, found.at_bound) == (bound, True)


# ------------------------------------------------------------ vector
def test_vector_scaling_is_the_penalised_optimum_of_scipy():
    logits, labels = examples()
    logs, y = pooled(logits)[0].numpy(), labels.numpy()

    def loss(v):
        z = logs * v[:4] + v[4:]
        fit = np.log(np.exp(z).sum(-1)) - z[np.arange(len(y)), y]
        return fit.sum() + 0.5 * ((v[:4] - 1) ** 2).sum() + 0.5 * (v[4:] ** 2).sum()

    best = minimize(loss, np.repeat([1.0, 0.0], 4), method="BFGS", options={"gtol": 1e-6})
    z = torch.from_numpy(logs * best.x[:4] + best.x[4:])
    torch.testing.assert_close(fit_vector(logits, labels)(logits), z.softmax(-1), atol=1e-5, rtol=0)


# ------------------------------------------------------------ what they must survive
@pytest.mark.filterwarnings("ignore:The temperature is at its bound")
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
@pytest.mark.parametrize("case", ["separable", "absent", "one", "same", "huge", "float32"])
def test_calibrators_stay_finite(fit, case):
    logits, labels = examples(60)
    if case == "separable":
        logits = 8 * torch.eye(4).double()[labels]
    elif case == "absent":
        labels = labels.clamp(max=2)
    elif case == "one":
        logits, labels = logits[:, :1], labels[:1]
    elif case == "same":
        logits = torch.zeros(60, 4)
    elif case == "huge":
        logits = 1e4 * logits
    else:
        logits = logits.float()
    given = pooled(logits)
    probs = fit(given, labels)(pooled(examples(30, seed=2)[0]))
    assert probs.dtype == torch.float64
    torch.testing.assert_close(probs.sum(-1), torch.ones(30).double())
    assert bool((probs >= 0).all())
    if case != "huge":
        assert bool((probs > 0).all()), "an NLL is infinite"


@pytest.mark.bad_input
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_what_calibrators_refuse(fit):
    logits, labels = examples(5)
    shape = r"must have shape \(samples, batch, classes\)"
    for z, y, words in (
        (logits * torch.nan, labels, "`logits` must be finite"),
        (logits, labels + 4, "`labels` must be in 0..3"),
        (logits, labels[:3], "`labels` must be 5 integers"),
        (logits[:, :0], labels[:0], "at least one calibration example"),
        (logits[None], labels, shape),
    ):
        with pytest.raises(ValueError, match=words):
            fit(z, y)


@pytest.mark.bad_input
def test_a_vector_is_for_its_classes():
    logits, labels = examples(5)
    with pytest.raises(ValueError, match="of 4 classes|must be in"):
        fit_vector(logits, labels)(logits[..., :2])


# ------------------------------------------------------------ standard deviations
def mixture(n=400, samples=3, factor=2.0, seed=0):
    """Targets whose errors are a multiple of what a mixture says."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(samples, n, 1, generator=g, dtype=torch.float64)
    stds = 0.5 + torch.rand(samples, n, 1, generator=g, dtype=torch.float64)
    which = torch.randint(samples, (n,), generator=g)
    draw = means[which, torch.arange(n)]
    draw = draw + stds[which, torch.arange(n)] * torch.randn(n, 1, generator=g).double()
    return means, stds, means.mean(0) + factor * (draw - means.mean(0))


@pytest.mark.parametrize("fit", ["mixture", "moments"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_factor_of_standard_deviations_is_found(fit, factor):
    means, stds, targets = mixture(6000, factor=factor)
    assert fit_spread(means, stds, targets, fit).value == pytest.approx(factor, rel=0.05)


def test_the_mixture_fit_is_that_of_a_grid_in_scipy():
    means, stds, targets = (t.numpy() for t in mixture(150))
    centre = means.mean(0)

    def loss(s):
        return -np.log(norm.pdf(targets, centre + s * (means - centre), s * stds).mean(0)).mean()

    assert -joint_log_prob(*mixture(150)).mean() == pytest.approx(loss(1))
    grid = np.linspace(0.5, 4, 3501)
    found = fit_spread(*mixture(150)).value
    assert found == pytest.approx(grid[np.argmin([loss(s) for s in grid])], abs=2e-3)


def test_a_spread_multiplies_the_standard_deviation_of_the_mixture():
    means, stds, targets = mixture()
    spread = fit_spread(means, stds, targets)
    m, s = spread(means, stds)
    variance = lambda m, s: s.square().mean(0) + m.var(0, correction=0)  # noqa: E731
    torch.testing.assert_close(variance(m, s), spread.value**2 * variance(means, stds))
    torch.testing.assert_close(m.mean(0), means.mean(0))


@pytest.mark.parametrize("fit", ["mixture", "moments"])
def test_exact_predictions_are_at_the_bound(fit):
    means, stds = torch.zeros(2, 5), torch.ones(2, 5)
    with pytest.warns(UserWarning, match="standard deviations is at its bound, 0.01"):
        assert fit_spread(means, stds, torch.zeros(5), fit).at_bound


@pytest.mark.bad_input
def test_what_a_spread_refuses():
    means, stds, y = mixture(5)
    for s, targets, fit, words in (
        (stds, y[:, 0], "mixture", "`targets` must have shape"),
        (stds, y * torch.nan, "mixture", "`targets` must be finite"),
        (stds, y.numpy(), "mixture", "`targets` must be a tensor"),
        (0 * stds, y, "mixture", "`stds` must be positive"),
        (stds, y, "best", "`fit` must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            fit_spread(means, s, targets, fit)
