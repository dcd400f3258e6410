"""Likelihoods and the prior against torch.distributions and scipy."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import distributions as D

from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian, IsotropicGaussianPrior


def test_categorical():
    z, y = torch.randn(3, 5, 4).double(), torch.randint(4, (5,))
    expected = D.Categorical(logits=z).log_prob(y)
    torch.testing.assert_close(Categorical().log_prob(z, y), expected)
    torch.testing.assert_close(Categorical().log_prob(z[0], y), expected[0])
    torch.testing.assert_close(Categorical().predictive(z), z.softmax(-1).mean(0))


def test_bernoulli_is_categorical_with_one_logit_at_zero():
    z, y = 5 * torch.randn(3, 6, 1).double(), torch.randint(2, (6,))
    both = torch.cat([torch.zeros_like(z), z], -1)
    torch.testing.assert_close(Bernoulli().log_prob(z, y), Categorical().log_prob(both, y))
    torch.testing.assert_close(Bernoulli().predictive(z), Categorical().predictive(both))
    assert Bernoulli().log_prob(torch.full((1, 1), -200.0), torch.tensor([1])) == -200


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("outputs", "targets", "sentence"),
    [
        (torch.zeros(3, 2), torch.zeros(3).long(), "`outputs` must be one logit"),
        (torch.zeros(3, 1), torch.tensor([0, 1, 2]), "`targets` must be 0 or 1"),
    ],
)
def test_bernoulli_needs_one_logit_and_two_classes(outputs, targets, sentence):
    with pytest.raises(ValueError, match=sentence):
        Bernoulli().log_prob(outputs, targets)


@pytest.mark.parametrize("noise", ["fixed", "learned", "heteroscedastic"])
def test_gaussian(noise):
    likelihood = Gaussian(noise, std=0.7, targets=2).double()
    outputs, y = (
        torch.randn(3, 5, 4 if noise == "heteroscedastic" else 2).double(),
        torch.randn(5, 2),
    )
    mean, std = outputs[..., :2], torch.tensor(0.7).double().expand(3, 5, 2)
    if noise == "heteroscedastic":
        std = outputs[..., 2:].exp().log1p() + 1e-3
    expected = norm(mean.numpy(), std.numpy()).logpdf(y.numpy()).sum(-1)
    np.testing.assert_allclose(
        likelihood.log_prob(outputs, y.double()).detach(), expected, rtol=1e-6
    )
    trained = [p for p in likelihood.parameters() if p.requires_grad]
    assert len(trained) == (noise == "learned")
    prediction = likelihood.predictive(outputs)
    g = torch.Generator().manual_seed(0)
    draws = mean[torch.randint(3, (200_000,), generator=g)]
    index = torch.randint(3, (200_000,), generator=g)
    draws = mean[index] + std[index] * torch.randn(200_000, 5, 2, generator=g).double()
    torch.testing.assert_close(prediction.mean, draws.mean(0), atol=0.05, rtol=0)
    torch.testing.assert_close(prediction.variance, draws.var(0), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("stacked", [False, True])
def test_prior(stacked):
    lead = (3,) if stacked else ()
    params = {
        "w": torch.randn(*lead, 2, 4).double(),
        "s": torch.randn(lead).double(),
        "bn.running_mean": torch.randn(*lead, 4).double(),
    }
    found = IsotropicGaussianPrior(0.3).log_prob(params, stacked=stacked)
    flat = torch.cat([params["w"].reshape(*lead, -1), params["s"][..., None]], -1)
    torch.testing.assert_close(found, D.Normal(0.0, 0.3).log_prob(flat).sum(-1))
    alone = IsotropicGaussianPrior(0.3).log_prob(params, ["s"], stacked)
    torch.testing.assert_close(alone, D.Normal(0.0, 0.3).log_prob(params["s"]))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Gaussian().log_prob(torch.ones(3, 1), torch.ones(3)), "`targets` must have shape"),
        (
            lambda: Gaussian("heteroscedastic").log_prob(torch.ones(3, 3), torch.ones(3, 1)),
            "got an odd number, 3",
        ),
        (lambda: Categorical().log_prob(torch.ones(3, 2), torch.ones(3)), "3 class indices"),
        (lambda: Categorical().log_prob(torch.ones(3, 2), torch.ones(2).long()), "3 class indices"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
