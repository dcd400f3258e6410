"""R-hat, effective sizes and errors against arviz, and closed forms of autoregressive chains."""

import itertools
import math
from functools import partial

import pytest
import torch
from arviz_stats.base import array_stats
from refusals import refuses

from lightning_bnn.metrics import effective_sample_size, mcse_mean, rhat, tail_effective_sample_size


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


DEGENERATE = {
    "constant": torch.ones_like,
    "constant within chains": lambda x: torch.zeros_like(x) + torch.arange(len(x))[:, None, None],
    "of two values": lambda x: (x > 1).double(),
    "of tiny numbers": lambda x: 1e-9 * x,
}
LEVELS = {"constant within chains", "of two values"}
"""Chains of halves without any spread, for which arviz has no reduction."""
MEASURES = {
    "reduction": (rhat, "rhat", {}),
    "bulk": (effective_sample_size, "ess", {}),
    "tail": (tail_effective_sample_size, "ess", {"method": "tail", "prob": 0.05}),
    "narrow tail": (
        lambda x: tail_effective_sample_size(x, 0.3), "ess", {"method": "tail", "prob": 0.3}
    ),
    "mean": (mcse_mean, "mcse", {"method": "mean"}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value")  # arviz of constant draws
@pytest.mark.parametrize(
    ("measure", "kind"),
    [
        (m, k)
        for m in MEASURES
        for k in (*CHAINS, *DEGENERATE)
        if m != "reduction" or k not in LEVELS
    ],
)
def test_arviz_finds_the_same_number(measure, kind):
    """Few and many, even and odd, one chain and several, alternating and slow, in pairs."""
    ours, theirs, options = MEASURES[measure]
    kinds, rhos = {**CHAINS, **DEGENERATE}, (-0.99, -0.3, 0.5, 0.95)
    first = list(kinds).index(kind)
    counts = (3,) if ours is rhat else (1, 3)  # for arviz, one chain has no reduction
    sizes = itertools.product(counts, (8, 9, 10, 11, 13, 16, 50, 101))
    for place, (count, samples) in enumerate(sizes, first):
        draws = kinds[kind](autoregressive(rhos[place % 4], count, samples, 4, seed=samples))
        expected = torch.from_numpy(getattr(array_stats, theirs)(draws.numpy(), 0, 1, **options))
        if ours is rhat:  # of constant numbers, which arviz does not know
            expected = expected.where(~expected.isnan(), 1.0)
        torch.testing.assert_close(ours(draws), expected, rtol=1e-12, atol=0, equal_nan=True)
        apart = draws.unflatten(2, (2, 2))
        torch.testing.assert_close(ours(apart).flatten(), ours(draws), equal_nan=True)


NAN = torch.full((2, 9), torch.nan)
test_errors = refuses(
    *((partial(ours, NAN), "finite") for ours, _, _ in MEASURES.values()),
    *((partial(ours, NAN.numpy()), "must be a tensor") for ours, _, _ in MEASURES.values()),
    *(
        (partial(rhat, torch.randn(shape)), "at least 8 samples")
        for shape in ((4, 7), (0, 9), (9,), (2, 20, 0))
    ),
    *(
        (partial(tail_effective_sample_size, NAN, p), "`probability` must be between 0 and 1, got")
        for p in (0.0, 1.0, math.nan)
    ),
)
