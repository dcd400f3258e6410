"""One draw with its own gradients, against autograd and torch.distributions."""

import copy

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from lightning_bnn.posteriors.perturbations import Scratch, draw
from weightsym import params as P

SPEC = P.ravel({"a": torch.zeros(2, 3), "b": torch.zeros(4)})[1]


def parameters(members):
    generator = torch.Generator().manual_seed(members)
    mean, log_std = torch.randn(2, members, 10, generator=generator, dtype=torch.float64)
    return mean.requires_grad_(), log_std.requires_grad_()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("members", [1, 2])
def test_values_and_gradients(samples, members):
    mean, log_std = parameters(members)
    found = draw(mean, log_std, SPEC, 0.7, Scratch(), samples)
    weights = (mean + log_std.exp() * found.noise).reshape(samples * members, 10)
    q = Normal(mean, log_std.exp())
    kl = kl_divergence(q, Normal(torch.zeros_like(mean), 0.7)).sum(1)
    entropy = q.entropy().sum(1)
    torch.testing.assert_close(P.ravel(found.weights, stacked=True)[0], weights)
    torch.testing.assert_close(found.cross_entropy - found.entropy, kl)
    torch.testing.assert_close(found.entropy, entropy)

    c = torch.randn(samples * members, 10, dtype=torch.float64)
    a, b = torch.randn(2, members, dtype=torch.float64)

    def value(w, cross, h):
        return (w * c).sum().sin() + (a * cross).sum() + (b * h).sum()

    ours = value(P.ravel(found.weights, stacked=True)[0], found.cross_entropy, found.entropy)
    theirs = value(weights, kl + entropy, entropy)
    for x, y in zip(
        torch.autograd.grad(ours, (mean, log_std)),
        torch.autograd.grad(theirs, (mean, log_std)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_memory_is_shared_by_draws_and_the_older_one_cannot_be_differentiated():
    mean, log_std = parameters(1)
    scratch = Scratch()
    first = draw(mean, log_std, SPEC, 1.0, scratch)
    loss = first.weights["a"].sum()
    second = draw(mean, log_std, SPEC, 1.0, scratch)
    assert first.weights["a"].data_ptr() == second.weights["a"].data_ptr()
    with pytest.raises(RuntimeError, match="drawn again"):
        loss.backward()
    second.weights["a"].sum().backward()
    assert copy.deepcopy(scratch)._held == ()


def test_another_shape_gets_other_memory():
    mean, log_std = parameters(1)
    scratch = Scratch()
    assert draw(mean, log_std, SPEC, 1.0, scratch).weights["a"].shape == (1, 2, 3)
    assert draw(mean, log_std, SPEC, 1.0, scratch, 4).weights["a"].shape == (4, 2, 3)
    half = draw(mean.float(), log_std.float(), SPEC, 1.0, scratch, 4)
    assert half.weights["a"].dtype == torch.float32
