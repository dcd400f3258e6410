"""R-hat, effective sizes and errors against arviz, and closed forms of autoregressive chains."""

import itertools
import math

import pytest
import torch
from arviz_stats.base import array_stats

from lightning_bnn.metrics import (
    effective_sample_size,
    mcse_mean,
    rhat,
    tail_effective_sample_size,
)


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


DEGENERATE = {
    "constant": torch.ones_like,
    "constant within chains": lambda x: torch.zeros_like(x) + torch.arange(len(x))[:, None, None],
    "of two values": lambda x: (x > 1).double(),
    "of tiny numbers": lambda x: 1e-9 * x,
}
MEASURES = {
    "bulk": (effective_sample_size, "ess", {}),
    "tail": (tail_effective_sample_size, "ess", {"method": "tail", "prob": 0.05}),
    "narrow tail": (
        lambda x: tail_effective_sample_size(x, 0.3), "ess", {"method": "tail", "prob": 0.3}
    ),
    "mean": (mcse_mean, "mcse", {"method": "mean"}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value")  # arviz of constant draws
@pytest.mark.parametrize("kind", [*CHAINS, *DEGENERATE])
@pytest.mark.parametrize("measure", MEASURES)
def test_arviz_finds_the_same_number(measure, kind):
    """Few and many, even and odd, one chain and several, alternating and slow, in pairs."""
    ours, theirs, options = MEASURES[measure]
    kinds, rhos = {**CHAINS, **DEGENERATE}, (-0.99, -0.3, 0.5, 0.95)
    first = list(kinds).index(kind)
    sizes = itertools.product((1, 3), (8, 9, 10, 11, 13, 16, 50, 101))
    for place, (count, samples) in enumerate(sizes, first):
        draws = kinds[kind](autoregressive(rhos[place % 4], count, samples, 4, seed=samples))
        expected = getattr(array_stats, theirs)(draws.numpy(), 0, 1, **options)
        torch.testing.assert_close(
            ours(draws), torch.from_numpy(expected), rtol=1e-12, atol=0, equal_nan=True
        )


def test_shapes_and_constant_numbers():
    draws = torch.randn(3, 20, 2, 4)
    draws[..., 0, 0] = 1
    assert rhat(draws).shape == effective_sample_size(draws).shape == (2, 4)
    assert rhat(draws)[0, 0] == 1
    assert math.isnan(array_stats.rhat(draws[..., 0, 0].numpy(), 0, 1))  # ours is 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "measure",
    [rhat, *(ours for ours, _, _ in MEASURES.values())],
)
def test_bad_draws(measure):
    for shape in ((4, 7), (0, 9), (9,), (2, 20, 0)):
        with pytest.raises(ValueError, match="at least 8 samples"):
            measure(torch.randn(shape))
    with pytest.raises(ValueError, match="finite"):
        measure(torch.full((2, 9), torch.nan))
    with pytest.raises(ValueError, match="`draws` must be a tensor"):
        measure(torch.randn(2, 9).numpy())


@pytest.mark.bad_input
@pytest.mark.parametrize("probability", [0.0, 1.0, math.nan])
def test_bad_probabilities(probability):
    with pytest.raises(ValueError, match="`probability` must be between 0 and 1, got"):
        tail_effective_sample_size(torch.randn(2, 9), probability)
