"""One draw with its own gradients, against autograd and torch.distributions."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from lightning_bnn.posteriors.perturbations import draw
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
    found = draw(mean, log_std, SPEC, 0.7, samples)
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


def test_every_draw_can_be_differentiated():
    mean, log_std = parameters(1)
    first = draw(mean, log_std, SPEC, 1.0)
    draw(mean, log_std, SPEC, 1.0, 4)
    (gradient,) = torch.autograd.grad(first.weights["a"].sum(), log_std)
    wanted = (log_std.exp() * first.noise[0])[:, :6].detach()
    torch.testing.assert_close(gradient[:, :6], wanted)
