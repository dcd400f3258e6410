"""Laplace approximations: exact where they can be, and laplace-torch's own numbers elsewhere."""

import copy

import pytest
import torch
from cases import Forward
from refusals import refuses
from torch import nn

from lightning_bnn import models
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.posteriors import LaplaceGaussian
from lightning_bnn.posteriors.curvature import (
    curvature,
    last_layer_name,
    likeliest_precision,
    log_marginal_likelihood,
)
from lightning_bnn.posteriors.laplace import CurvatureBlock
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")
STRUCTURES = pytest.mark.parametrize("structure", ["full", "kron", "diag"])


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 4)
    ).double()


def images(n=30):
    torch.manual_seed(1)
    x, y = torch.randn(n, 1, 6, 6).double(), torch.randint(4, (n,))
    return list(zip(x.split(7), y.split(7), strict=True))


def theirs(net, batches, structure, **options):
    from laplace import Laplace

    joined = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    data = torch.utils.data.TensorDataset(*joined)
    fit = Laplace(copy.deepcopy(net), "classification", hessian_structure=structure, **options)
    fit.fit(torch.utils.data.DataLoader(data, batch_size=7))
    return fit


def dense(posterior):
    """Covariance of all weights that vary, block by block."""
    parts = []
    for block in posterior.blocks:
        size = block.eigenvalues.numel()
        unit = torch.eye(size).double().view(size, *block.eigenvalues.shape)
        root = unit / (block.eigenvalues + posterior.prior_precision).sqrt()
        half = block.rotated(root)
        parts.append(half.T @ half)
    return torch.block_diag(*parts)


def assert_same_precision(posterior, fit, structure):
    found = fit.posterior_precision
    wanted = {"full": lambda p: p, "kron": lambda p: p.to_matrix(), "diag": torch.diag}[structure]
    torch.testing.assert_close(
        torch.linalg.inv(dense(posterior)), wanted(found).detach(), rtol=1e-6, atol=1e-8
    )


@STRUCTURES
@pytest.mark.parametrize(("layer", "weights"), [(None, "all"), ("5", "last_layer")])
def test_the_precision_is_that_of_laplace_torch(structure, layer, weights):
    net, batches = convolutional(), images()
    assert last_layer_name(net) == "5"
    blocks = curvature(net, P.of(net), batches, Categorical(), structure, layer)
    posterior = LaplaceGaussian(P.of(net), blocks, 3.0, last_layer=layer)
    fit = theirs(net, batches, structure, subset_of_weights=weights, prior_precision=3.0)
    assert_same_precision(posterior, fit, structure)


def test_the_last_layer_predicts_as_its_networks():
    net, batches = convolutional(), images()
    blocks = curvature(net, P.of(net), batches, Categorical(), "kron", "5")
    posterior, x = LaplaceGaussian(P.of(net), blocks, 3.0, last_layer="5"), batches[0][0]
    outputs = posterior.predict(net, x, 9, torch.Generator().manual_seed(0))
    networks = posterior.sample(9, torch.Generator().manual_seed(0))
    torch.testing.assert_close(outputs, P.apply(net, networks, x))


def test_samples_and_density_are_those_of_the_covariance():
    net, batches = convolutional(), images()
    blocks = curvature(net, P.of(net), batches, Categorical(), "kron")
    posterior = LaplaceGaussian(P.of(net), blocks, 2.0, temperature=0.5)
    names = [n for block in blocks for n in block.names]
    samples = posterior.sample(20_000, torch.Generator().manual_seed(0))
    rows = P.ravel(samples, names, stacked=True)[0]
    mean, covariance = P.ravel(P.of(net), names)[0], dense(posterior) / 2
    error = torch.cov(rows.T) - covariance
    assert error.abs().max() < 0.04 * covariance.diagonal().max()
    few = {n: t[:5] for n, t in samples.items()}
    wanted = torch.distributions.MultivariateNormal(mean, covariance).log_prob(rows[:5])
    torch.testing.assert_close(posterior.log_prob(few), wanted)


def test_draws_do_not_depend_on_the_basis_of_equal_eigenvalues():
    """Which a machine may choose as it likes; of different eigenvalues it may not."""
    g = torch.Generator().manual_seed(0)
    basis, turn = (torch.linalg.qr(torch.randn(6, 6, generator=g).double())[0] for _ in range(2))
    turned = basis.clone()
    turned[:, :3] = basis[:, :3] @ torch.linalg.qr(turn[:3, :3])[0]

    def drawn(left, values):
        block = CurvatureBlock(("w",), values[:, None], left)
        posterior = LaplaceGaussian({"w": torch.zeros(6).double()}, [block])
        return posterior.sample(5, torch.Generator().manual_seed(1))["w"]

    equal, different = torch.tensor([[0.0, 0, 0, 1, 2, 3], [0, 5, 0, 1, 2, 3]]).double()
    torch.testing.assert_close(drawn(basis, equal), drawn(turned, equal))
    assert not torch.allclose(drawn(basis, different), drawn(turned, different), atol=0.1)


def test_linearised_predictions_have_the_moments_of_the_glm():
    net, batches = convolutional(), images()
    blocks = curvature(net, P.of(net), batches, Categorical(), "full")
    posterior = LaplaceGaussian(P.of(net), blocks, 3.0)
    x = batches[0][0][:3]
    outputs = posterior.predict(net, x, 4000, torch.Generator().manual_seed(0))
    few, one_by_one = (
        posterior.predict(net, x, 20, torch.Generator().manual_seed(0), chunk_size)
        for chunk_size in (None, 1)
    )
    torch.testing.assert_close(few, one_by_one)
    fit = theirs(net, batches, "full", subset_of_weights="all", prior_precision=3.0)
    mean, covariance = fit._glm_predictive_distribution(x)
    scale = covariance.diagonal(dim1=1, dim2=2).max()
    assert (outputs.mean(0) - mean).abs().max() < 0.1 * scale.sqrt()
    for k in range(3):
        assert (torch.cov(outputs[:, k].T) - covariance[k]).abs().max() < 0.1 * scale


@pytest.mark.parametrize("std", [0.5, 2.0])
def test_linear_regression_is_exact(std):
    torch.manual_seed(0)
    x, net = torch.randn(40, 3).double(), nn.Linear(3, 1).double()
    y = (x @ torch.tensor([[1.0], [-2.0], [0.5]]).double()) + std * torch.randn(40, 1).double()
    design = torch.cat([x, torch.ones(40, 1).double()], 1)
    precision = design.T @ design / std**2 + 4 * torch.eye(4).double()
    mean = torch.linalg.solve(precision, design.T @ y / std**2)[:, 0]
    exact = {"weight": mean[None, :3], "bias": mean[3:]}
    batches = list(zip(x.split(9), y.split(9), strict=True))
    blocks = curvature(net, exact, batches, Gaussian(std=std).double(), "full")
    posterior = LaplaceGaussian(exact, blocks, 4.0)
    torch.testing.assert_close(dense(posterior), torch.linalg.inv(precision))
    outputs = posterior.predict(net, x, 20_000, torch.Generator().manual_seed(0))[..., 0]
    wanted = (design @ torch.linalg.inv(precision) * design).sum(1)
    torch.testing.assert_close(outputs.var(0), wanted, rtol=0.05, atol=0)


@STRUCTURES
def test_the_marginal_likelihood_is_laplace_torchs(structure):
    net, batches = convolutional(), images()
    blocks = curvature(net, P.of(net), batches, Categorical(), structure)
    fit = theirs(net, batches, structure, subset_of_weights="all")
    ours = [log_marginal_likelihood(blocks, P.of(net), p) for p in (0.3, 5.0)]
    theirs_ = [float(fit.log_marginal_likelihood(torch.tensor([p]).double())) for p in (0.3, 5.0)]
    assert ours[0] - ours[1] == pytest.approx(theirs_[0] - theirs_[1], rel=1e-6)
    best = likeliest_precision(blocks, P.of(net))
    top = log_marginal_likelihood(blocks, P.of(net), best)
    assert all(top > log_marginal_likelihood(blocks, P.of(net), best * f) for f in (0.98, 1.02))


def recurrent():
    """No network for vmap: its examples run one by one."""
    return Forward(
        lambda s, x: s.out(s.rnn(x[:, None])[0][:, 0]),
        rnn=nn.RNN(3, 4, batch_first=True),
        out=nn.Linear(4, 2),
    )


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_networks_that_vmap_cannot_run(structure):
    torch.manual_seed(0)
    net, batches = recurrent().double(), [(torch.randn(5, 3).double(), torch.randint(2, (5,)))]
    with pytest.raises(RuntimeError):
        torch.vmap(net)(batches[0][0][:, None])
    blocks = curvature(net, P.of(net), batches, Categorical(), structure)
    posterior = LaplaceGaussian(P.of(net), blocks, 3.0)
    fit = theirs(net, batches, structure, subset_of_weights="all", prior_precision=3.0)
    assert_same_precision(posterior, fit, structure)


@pytest.mark.parametrize("frozen", ["0", "3.weight", "3.bias"])
def test_frozen_weights_stay_and_do_not_change_the_factors_of_others(frozen):
    net, batches = convolutional(), images()
    every = {b.names: b for b in curvature(net, P.of(net), batches, Categorical(), "kron")}
    for name, p in net.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    blocks = curvature(net, P.of(net), batches, Categorical(), "kron")
    for block in blocks:
        torch.testing.assert_close(block.eigenvalues, every[block.names].eigenvalues)
    drawn = LaplaceGaussian(P.of(net), blocks).sample(3)
    for name, p in net.named_parameters():
        assert torch.equal(drawn[name], p.expand(3, *p.shape)) != p.requires_grad


def net_of(forward, **more):
    return Forward(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2), **more)


def tied():
    net = Forward(lambda s, x: s.two(s.one(x).tanh()), one=nn.Linear(3, 3), two=nn.Linear(3, 3))
    net.two.weight = net.one.weight
    return net


class Tripled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


BENT = net_of(lambda s, x: 2 * s.head(s.body(x)))
TWICE = net_of(lambda s, x: s.head(s.body(x)) + s.head(s.body(-x)))
ASIDE = net_of(lambda s, x: 2 * s.head(s.body(x @ s.aside.weight)), aside=nn.Linear(3, 3))


def of(net, structure="kron", layer=None):
    batches = [(torch.randn(5, 3), torch.randint(2, (5,)))]
    return lambda: curvature(net, P.of(net), batches, Categorical(), structure, layer)


def block_posterior(**options):
    block = CurvatureBlock(("w",), torch.ones(3, 1))
    return LaplaceGaussian({"w": torch.zeros(3)}, [block], **options)


test_bad_input = refuses(
    (of(BENT, "full", "head"), "'head' is not the last"),
    (of(TWICE, "full", "head"), "is used 2 times"),
    (of(tied()), "weights that layers share have no Kronecker factors"),
    (of(ASIDE), "the layer 'aside' is not called, but its weights are used"),
    (of(Tripled(3, 2)), "it has Tripled.*only linear layers and ungrouped 2D convolutions"),
    (of(BENT, "lowrank"), "`structure` must be"),
    (
        of(models.mlp(784, [512], 10), "full"),
        "A full curvature of 407050 weights takes 1326 GB: set `structure='kron'`",
    ),
    (
        of(nn.Linear(1, 10**7)),
        r"in Kronecker factors takes 800 TB of memory, .*: set `structure='diag'`, or `layers",
    ),
    (lambda: last_layer_name(nn.Conv1d(1, 1, 1)), "Conv1d has no linear layer"),
    (lambda: block_posterior(prior_precision=0.0), "`prior_precision` must be positive"),
    (lambda: block_posterior(temperature=-1.0), "`temperature` must not be negative"),
    (lambda: block_posterior(prediction="glm"), "`prediction` must be"),
)
