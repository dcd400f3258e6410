"""The symmetrized posterior against its definition, and its laws."""

import itertools
import math

import pytest
import torch

from lightning_bnn import models
from lightning_bnn.posteriors import DiagonalGaussian, Symmetrized, symmetrized
from weightsym import discover, permute, random_permutations
from weightsym import params as P

PERCEPTRON = models.mlp(2, [3], 1).double()
X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).double()
SYM = discover(PERCEPTRON, X)


def made(std=0.5, seed=0):
    torch.manual_seed(seed)
    return Symmetrized(
        DiagonalGaussian({k: torch.randn_like(v) for k, v in stack1().items()}, std), SYM
    )


def stack1():
    return P.of(PERCEPTRON)


def test_definition():
    """The mean density over the six orders of three hidden units, moved by hand."""
    posterior = made()
    stack = posterior.base.sample(5)
    total = 0
    for p in itertools.permutations(range(3)):
        index = list(p)
        moved = dict(stack)
        moved["1.weight"], moved["1.bias"] = stack["1.weight"][:, index], stack["1.bias"][:, index]
        moved["3.weight"] = stack["3.weight"][:, :, index]
        total = total + posterior.base.log_prob(moved).exp()
    torch.testing.assert_close(posterior.log_prob(stack), (total / 6).log())


def test_the_density_is_that_of_a_whole_orbit():
    """Of two layers, too, whose densities the base tells apart."""
    net = models.mlp(3, [3, 4], 2).double()
    sym = discover(net, torch.randn(2, 3).double())
    deep = Symmetrized(DiagonalGaussian(P.of(net), 0.3), sym)
    stack = deep.sample(4)
    moved = permute(stack, sym, random_permutations(sym, members=4))
    torch.testing.assert_close(deep.log_prob(moved), deep.log_prob(stack))
    assert not torch.allclose(deep.base.log_prob(moved), deep.base.log_prob(stack))


def test_samples_have_the_density():
    """Importance weights between two symmetrized posteriors average to one."""
    wide, narrow = made(0.6), made(0.5)
    stack = wide.sample(20_000, torch.Generator().manual_seed(1))
    ratio = (narrow.log_prob(stack) - wide.log_prob(stack)).exp()
    assert ratio.mean().item() == pytest.approx(1, abs=4 * ratio.std().item() / 20_000**0.5)
    first = stack["1.weight"].mean(0)
    torch.testing.assert_close(first, first.mean(0).expand(3, 2), atol=0.05, rtol=0)


def test_draws_bound_the_entropy_from_below(monkeypatch):
    """Identity and K - 1 uniform permutations: the entropy grows with K up to its value."""
    posterior = made(0.8)
    stack = posterior.base.sample(200, torch.Generator().manual_seed(2))
    exact = -posterior.log_prob(stack).mean()
    alone = -posterior.base.log_prob(stack).mean()
    assert 0 <= exact - alone <= math.log(6)
    monkeypatch.setattr(symmetrized, "_ENUMERATE_UP_TO", 0)
    monkeypatch.setattr(symmetrized.Symmetrized, "_layers", lambda self: [])
    means = []
    for posterior.draws in (1, 2, 8, 32):
        seeds = (torch.Generator().manual_seed(s) for s in range(30))
        means.append(torch.stack([-posterior.log_prob(stack, g).mean() for g in seeds]).mean())
    assert means[0].item() == pytest.approx(alone.item())
    assert alone < means[1] < means[2] < means[3] < exact + 0.05
    assert abs(means[3] - exact) < 0.2


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="`draws` must be at least 1, got 0"):
        Symmetrized(made().base, SYM, 0)
