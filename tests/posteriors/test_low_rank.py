"""SWAG's Gaussian: the covariance of a planted trajectory, across layers too."""

import pytest
import torch

from lightning_bnn.posteriors import LowRankGaussian
from weightsym import params as P


def trajectory(n=60):
    """Two tensors that move in lock-step along two directions, with a little noise."""
    g = torch.Generator().manual_seed(0)
    directions = torch.randn(2, 7, generator=g, dtype=torch.float64)
    rows = torch.randn(n, 2, generator=g, dtype=torch.float64) @ directions
    rows = 1 + rows + 0.1 * torch.randn(n, 7, generator=g, dtype=torch.float64)
    return {"a": rows[:, :4].reshape(n, 2, 2), "b": rows[:, 4:]}, rows


@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("rank", [2, 3, 30])  # of two networks, K - 1 is half of K
def test_the_covariance_is_half_diagonal_and_half_of_the_last_networks(scale, rank):
    networks, rows = trajectory()
    posterior = LowRankGaussian.fit(networks, rank=rank, scale=scale)
    last = rows[-rank:] - rows.mean(0)
    wanted = scale / 2 * (rows.var(0, correction=0).diag() + last.T @ last / (rank - 1))
    samples = posterior.sample(200_000, torch.Generator().manual_seed(1))
    found = P.ravel(samples, stacked=True)[0]
    error = (torch.cov(found.T) - wanted).abs().max() / wanted.diagonal().max()
    assert error < 0.02
    assert (found.mean(0) - rows.mean(0)).abs().max() < 0.02
    torch.testing.assert_close(posterior.mean, rows.mean(0))


@pytest.mark.parametrize("rank", [2, 10])
def test_the_density_is_that_of_a_full_gaussian(rank):
    networks, rows = trajectory()
    posterior = LowRankGaussian.fit(networks, rank=rank, scale=0.5)
    last = rows[-rank:] - rows.mean(0)
    cov = 0.25 * (rows.var(0, correction=0).diag() + last.T @ last / (rank - 1))
    wanted = torch.distributions.MultivariateNormal(rows.mean(0), cov).log_prob(rows)
    torch.testing.assert_close(posterior.log_prob(networks), wanted)


def test_constant_weights_stay_constant():
    networks = {"a": torch.full((5, 3), 2.0), "n": torch.arange(5)}
    samples = LowRankGaussian.fit(networks).sample(4)
    assert torch.equal(samples["a"], torch.full((4, 3), 2.0))
    assert samples["n"].tolist() == [4] * 4


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRankGaussian.fit({"a": torch.zeros(1, 2)}), "`networks` must hold at least"),
        (lambda: LowRankGaussian.fit(trajectory()[0], rank=61), "`rank` must be between 2 and"),
        (lambda: LowRankGaussian.fit(trajectory()[0], scale=-1.0), "`scale` must not be neg"),
        (
            lambda: LowRankGaussian(
                {"a": torch.zeros(2)}, {"a": torch.ones(2)}, {"a": torch.ones(1, 2)}
            ),
            "`deviations` must hold at least 2",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
