"""Momenta that are drawn anew leave the target alone: variances of chains, computed and drawn."""

import itertools
import math

import pytest
import torch
from torch import nn

from lightning_bnn.samplers import SGHMC

N = 50
EVERY = pytest.mark.parametrize("every", [1, 2, 3, 10, 50])
FRICTIONS = pytest.mark.parametrize("friction", [1e-3, 0.1, 0.5, 1.0])


def stationary_variances(make, monkeypatch, every):
    """Of the weight after each of ``every`` steps on a quadratic of curvature 1, exactly.

    A step is linear in the weight and in the noise. One element of the parameter starts at one
    without noise, each other one at zero with a single draw of one, so that a period is
    theta -> c theta + sum_j d_j xi_j, whose variance is sum_j d_j^2 / (1 - c^2).
    """
    size, draws = 2 * every + 3, itertools.count(1)
    theta = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    sampler = make([theta], num_data=N, resample_every=every)

    def unit(*_):
        return [torch.eye(size, dtype=torch.float64)[next(draws)]]

    monkeypatch.setattr(sampler, "_noise", unit)
    with torch.no_grad():
        theta[0] = 1
    responses = []
    for _ in range(every):
        theta.grad = theta.detach().clone()
        sampler.step()
        responses.append(theta.detach().clone())
    own, drawn = torch.stack(responses)[:, 0] ** 2, torch.stack(responses)[:, 1:].square().sum(1)
    return own * drawn[-1] / (1 - own[-1]) + drawn


class Unforced(SGHMC):
    """Redrawn momenta that know nothing of the force, in its place after every step."""

    def update(self, group, params, values, *more):
        for p in params:
            scale = math.sqrt(2 / (N * (1 + group["momentum"])))
            drawn = self._noise(group, [p], "")[0]
            self.state[p]["velocity"] = scale * drawn
        super().update({**group, "resample_every": None}, params, values, *more)


@EVERY
@FRICTIONS
def test_the_variance_is_that_of_the_target(every, friction, monkeypatch):
    """As the rate goes to zero, whatever the period; at any rate it is what the docs state."""
    for lr in (1e-6, 1e-2, 0.5):

        def make(*args, lr=lr, **options):
            return SGHMC(*args, lr=lr, momentum=1 - friction, **options)

        found = stationary_variances(make, monkeypatch, every)
        exact = 1 / N / (1 - lr / (2 * (2 - friction)))
        torch.testing.assert_close(found, torch.full_like(found, exact), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("friction", [0.1, 0.5])
def test_momenta_without_the_force_are_too_cold(friction, monkeypatch):
    """Positions and momenta of a step are half a step apart: who forgets it samples 1 / (2 - f)."""
    found = stationary_variances(
        lambda *args, **options: Unforced(*args, lr=1e-6, momentum=1 - friction, **options),
        monkeypatch, 1,
    )  # fmt: skip
    assert found.item() * N == pytest.approx(1 / (2 - friction), rel=1e-4)


@pytest.mark.parametrize(("every", "prior"), [(1, 0.5 * N), (10, 0.0)])
def test_chains_have_that_variance(every, prior):
    """Half of the force from the data, half from the prior, or all of it from the data."""
    theta = nn.Parameter(torch.zeros(60_000, dtype=torch.float64))
    sampler = SGHMC([theta], 0.5, 0.9, N, prior_precision=prior, resample_every=every)
    for _ in range(150):
        theta.grad = theta.detach() * (1 - prior / N)
        sampler.step()
    wanted = 1 / N / (1 - 0.5 / (2 * 1.9))
    assert theta.var().item() == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("every", "momentum", "estimate"), [(1, 0.5, 0.5), (3, 0.5, 0.1), (3, 0.9, 0.1)]
)
def test_noise_that_minibatches_bring_is_not_added_again(every, momentum, estimate):
    lr, g = 0.5, torch.Generator().manual_seed(0)
    theta = nn.Parameter(torch.zeros(60_000, dtype=torch.float64))
    sampler = SGHMC([theta], lr, momentum, N, noise_estimate=estimate, resample_every=every)
    for _ in range(90):
        batch = torch.randn(60_000, dtype=torch.float64, generator=g)
        theta.grad = theta.detach() + math.sqrt(2 * estimate / (lr * N)) * batch
        sampler.step()
    wanted = 1 / N / (1 - lr / (2 * (1 + momentum)))
    assert theta.var().item() == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("every", [1, 4])
def test_at_temperature_zero_a_redrawn_momentum_is_none(every):
    """SGD whose momentum begins anew, which is plain SGD if it does so at every step."""
    theta = nn.Parameter(torch.ones(3, dtype=torch.float64))
    sampler = SGHMC([theta], 0.1, 0.9, N, temperature=0.0, resample_every=every)
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for step in range(8):
        if step % every == 0:
            plain = torch.optim.SGD([other], 0.1, momentum=0.9)
        for p, optimizer in ((theta, sampler), (other, plain)):
            p.grad = p.detach().clone()
            optimizer.step()
    torch.testing.assert_close(theta, other)
