"""The curvature at the outputs is the mean square of the score, summed or integrated exactly."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import jacrev

from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.posteriors.curvature import curvature, curvature_root
from weightsym import params as P

CASES = {
    "categorical": (Categorical(), 4),
    "bernoulli": (Bernoulli(), 1),
    "fixed": (Gaussian(std=0.3), 2),
    "learned": (Gaussian("learned", std=0.7, targets=2), 2),
    "heteroscedastic": (Gaussian("heteroscedastic", least=0.1), 4),
}


def targets_and_weights(likelihood, outputs):
    """All targets of one example, and how likely each is; Gauss-Hermite for Gaussians."""
    if isinstance(likelihood, Categorical):
        return torch.arange(len(outputs)), outputs.softmax(-1)
    if isinstance(likelihood, Bernoulli):
        return torch.arange(2), torch.stack([1 - outputs.sigmoid(), outputs.sigmoid()])[:, 0]
    mean, std = likelihood.moments(outputs[None])
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(9))
    k = mean.shape[-1]
    grid = torch.cartesian_prod(*[nodes] * k).view(-1, k)
    joint = torch.cartesian_prod(*[weights / weights.sum()] * k).view(-1, k).prod(-1)
    return mean + std * grid, joint


def fisher(likelihood, outputs):
    """Of one example, by brute force."""
    targets, weights = targets_and_weights(likelihood, outputs)

    def log_probs(f):
        return likelihood.log_prob(f.expand(len(targets), -1), targets)

    scores = jacrev(log_probs)(outputs)
    return torch.einsum("y,yi,yj->ij", weights, scores, scores)


def outputs_of(name, n=5):
    likelihood, k = CASES[name]
    return likelihood.double(), torch.randn(n, k, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_the_square_of_the_root_is_the_fisher_information(name):
    likelihood, outputs = outputs_of(name)
    root = curvature_root(likelihood)(outputs).detach()
    wanted = torch.stack([fisher(likelihood, f) for f in outputs]).detach()
    torch.testing.assert_close(root @ root.mT, wanted, rtol=1e-8, atol=1e-10)
    if name not in ("fixed", "learned"):  # whose curvature is the same everywhere
        assert not torch.allclose(wanted[0], wanted[1])


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("name", CASES)
def test_the_curvature_of_a_network_is_its_pull_back(name, structure):
    likelihood, k = CASES[name][0].double(), CASES[name][1]
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, k)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    (block,) = curvature(net, P.of(net), [(x, torch.zeros(6))], likelihood, structure)
    wanted = 0
    for row in x:
        slopes = jacrev(lambda own, row=row: torch.func.functional_call(net, own, (row[None],))[0])
        jacobian = torch.cat(
            [t.flatten(1) for t in slopes(dict(net.named_parameters())).values()], 1
        )
        wanted = wanted + jacobian.T @ fisher(likelihood, net(row[None])[0].detach()) @ jacobian
    values = block.eigenvalues[:, 0]
    found = values if structure == "diag" else block.left @ torch.diag(values) @ block.left.T
    wanted = wanted.detach().diag() if structure == "diag" else wanted.detach()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.bad_input
def test_likelihoods_without_a_known_curvature():
    with pytest.raises(ValueError, match="`likelihood` must be Categorical, Bernoulli or Gaussian"):
        curvature_root(nn.Identity())
