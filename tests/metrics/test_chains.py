"""R-hat and effective sample size against arviz, and closed forms of autoregressive chains."""

import math

import pytest
import torch
from arviz_stats.base import array_stats

from lightning_bnn.metrics import effective_sample_size, rhat


def autoregressive(rho, chains=8, samples=4000, numbers=5, seed=0):
    """Stationary chains whose mean is worth n (1 - rho) / (1 + rho) independent draws."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, samples, numbers, generator=g, dtype=torch.float64)
    noise[:, 0] /= math.sqrt(1 - rho**2)
    for t in range(1, samples):
        noise[:, t] += rho * noise[:, t - 1]
    return noise


CHAINS = {
    "as they are": lambda x: x,
    "rounded": torch.round,  # ties
    "drifting": lambda x: x + torch.linspace(-1, 1, x.shape[1])[None, :, None],
    "of several spreads": lambda x: x * torch.arange(1, 1 + len(x))[:, None, None],
    "of heavy tails": lambda x: x**9,
}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("samples", [8, 9, 101])
@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.9])
def test_arviz_finds_the_same_reduction(kind, samples, rho):
    draws = CHAINS[kind](autoregressive(rho, 3, samples))
    expected = array_stats.rhat(draws.numpy(), chain_axis=0, draw_axis=1)
    torch.testing.assert_close(rhat(draws), torch.from_numpy(expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("rho", [-0.9, -0.3, 0.0, 0.5, 0.9])
def test_arviz_finds_the_same_number(kind, rho):
    """It goes on for one autocorrelation more, which changes little, and nothing if negative."""
    draws = CHAINS[kind](autoregressive(rho, 3, 1001, 20))
    expected = array_stats.ess(draws.numpy(), chain_axis=0, draw_axis=1)
    ratio = effective_sample_size(draws) / torch.from_numpy(expected)
    assert ((ratio - 1).abs() < 0.1).all()
    equal = ((ratio - 1).abs() < 1e-12).double().mean()
    assert equal > 0.5 or kind == "drifting"  # never stops early


@pytest.mark.parametrize("samples", [8, 40, 101])
def test_arviz_caps_chains_that_swing_at_the_same_number(samples):
    """Draws that alternate are worth more than independent ones, but no more than this."""
    draws = autoregressive(-0.99, 3, samples)
    expected = array_stats.ess(draws.numpy(), chain_axis=0, draw_axis=1)
    torch.testing.assert_close(
        effective_sample_size(draws), torch.from_numpy(expected), rtol=1e-12, atol=0
    )
    count = 6 * (samples // 2)
    assert expected == pytest.approx(count * math.log10(count))


@pytest.mark.parametrize("rho", [-0.3, 0.0, 0.5, 0.9])
def test_the_effective_sample_size_of_autoregressive_chains(rho):
    draws = autoregressive(rho)
    wanted = 8 * 4000 * (1 - rho) / (1 + rho)
    found = effective_sample_size(draws)
    assert found.mean().item() == pytest.approx(wanted, rel=0.1)
    torch.testing.assert_close(found, torch.full((5,), wanted).double(), rtol=0.25, atol=0)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_chains_of_one_law_agree(rho):
    assert (rhat(autoregressive(rho)) < 1.03).all()


def test_chains_that_do_not_overlap_have_the_closed_form():
    """Normal scores of either half: means -+ sqrt(2 / pi), variance 1 - 2 / pi."""
    draws = autoregressive(0.0, chains=2, numbers=1)
    draws[1] += 100
    between, within = 4 / 3 * 2 / math.pi, 1 - 2 / math.pi
    assert rhat(draws).item() == pytest.approx(math.sqrt(1 + between / within), rel=1e-3)


@pytest.mark.parametrize("shift", [0.25, 0.5, 1.0])
def test_a_chain_elsewhere_is_found(shift):
    """Ranks of nearly normal draws are nearly the draws: the plain ratio, by hand."""
    draws = autoregressive(0.0, chains=2, numbers=1)
    draws[1] += 2 * shift
    halves = torch.cat([draws[:, :2000], draws[:, 2000:]])
    plain = math.sqrt(1 + float(halves.mean(1).var(0) / halves.var(1).mean(0)))
    assert rhat(draws).item() == pytest.approx(plain, rel=0.05)


def test_a_chain_that_drifts_is_found_by_its_halves():
    draws = autoregressive(0.0, chains=4, samples=400, numbers=1)
    draws += torch.linspace(-2, 2, 400)[None, :, None]
    assert rhat(draws) > 1.3
    assert effective_sample_size(draws) < 20


def test_chains_of_other_spread_are_found_by_folding():
    draws = autoregressive(0.0, chains=4, samples=1000, numbers=1)
    draws[0] *= 5
    assert rhat(draws) > 1.1


def test_monotone_transforms_change_nothing_and_heavy_tails_do_no_harm():
    draws = autoregressive(0.5, samples=500)
    torch.testing.assert_close(rhat(draws.exp()), rhat(draws), rtol=0.01, atol=0)
    torch.testing.assert_close(effective_sample_size(draws.exp()), effective_sample_size(draws))
    cauchy = torch.tan(
        math.pi * (torch.rand(4, 1000, generator=torch.Generator().manual_seed(0)) - 0.5)
    )
    assert rhat(cauchy) < 1.02


def test_shapes_and_constant_numbers():
    draws = torch.randn(3, 20, 2, 4)
    draws[..., 0, 0] = 1
    assert rhat(draws).shape == effective_sample_size(draws).shape == (2, 4)
    assert rhat(draws)[0, 0] == 1


@pytest.mark.bad_input
@pytest.mark.parametrize("measure", [rhat, effective_sample_size])
def test_bad_draws(measure):
    with pytest.raises(ValueError, match="at least 8 samples"):
        measure(torch.randn(4, 7))
    with pytest.raises(ValueError, match="finite"):
        measure(torch.full((2, 9), torch.nan))
