"""The curvature at the outputs is the mean square of the score, summed or integrated exactly."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import jacrev

from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.posteriors import LaplaceGaussian, laplace
from lightning_bnn.posteriors.curvature import curvature
from lightning_bnn.posteriors.gauss_newton import curvature_root, gauss_newton
from lightning_bnn.posteriors.kronecker import kronecker_factors
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


def matrix(block):
    """The curvature of a block, dense."""
    unit = torch.eye(block.eigenvalues.numel()).double().unflatten(1, block.eigenvalues.shape)
    half = block.rotated(unit * block.eigenvalues.sqrt())
    return half.T @ half


@pytest.mark.parametrize("name", CASES)
def test_kronecker_factors_of_one_example_are_exact(name):
    """The mean of products of factors is the product of the means where there is one."""
    likelihood, k = CASES[name][0].double(), CASES[name][1]
    around = {"stride": 2, "padding": (0, 1), "dilation": 2, "padding_mode": "reflect"}
    net = nn.Sequential(
        nn.Conv2d(2, 4, (2, 3), **around), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, k)
    ).double()
    x, y = torch.randn(2, 2, 3, 3, dtype=torch.float64), torch.zeros(2)
    names = [n for n, _ in net.named_parameters()]
    for rows, is_exact in ((x[:1], True), (x, False)):
        full = gauss_newton(net, names, [(rows, y[: len(rows)])], likelihood, False)
        blocks = kronecker_factors(net, [(rows, y[: len(rows)])], likelihood)
        assert [block.names for block in blocks] == [(n,) for n in names]
        start = 0
        for block in blocks:
            end = start + block.eigenvalues.numel()
            is_same = torch.allclose(matrix(block), full[start:end, start:end])
            assert is_same or (not is_exact and "weight" in block.names[0])
            assert is_exact or not (is_same and block.names == ("0.weight",))
            start = end


@pytest.mark.bad_input
def test_likelihoods_without_a_known_curvature():
    with pytest.raises(ValueError, match="`likelihood` must have a `curvature_root`"):
        curvature_root(nn.Identity())
    likelihood, layer = Gaussian(std=0.3), nn.Linear(3, 2)
    likelihood.curvature_root = lambda outputs: outputs
    with pytest.raises(ValueError, match=r"must return \(batch, k, r\) for outputs \(4, 2\)"):
        curvature(layer, P.of(layer), [(torch.ones(4, 3), torch.ones(4, 2))], likelihood, "full")


# ------------------------------------------------------------ several positions
class OfTokens(nn.Module):
    """Every token by itself, so that tokens are as good as examples."""

    def __init__(self, first=False):
        super().__init__()
        self.inner, self.out, self.first = nn.Linear(4, 5), nn.Linear(5, 3), first

    def forward(self, x):
        outputs = self.out(torch.tanh(self.inner(x)))
        return outputs.movedim(-1, 1) if self.first else outputs


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize(
    ("likelihood", "counted"),
    [
        (Categorical(), slice(0, 7)),
        (Categorical("first"), slice(0, 7)),
        (Categorical(ignore_index=-100), slice(0, 5)),
        (Categorical(next_token=True), slice(0, 6)),
    ],
)
@pytest.mark.parametrize("last", [None, "out"])
def test_tokens_are_examples_to_a_curvature(structure, likelihood, counted, last):
    if last and likelihood.classes == "first":
        return
    net = OfTokens(likelihood.classes == "first").double()
    x, y = torch.randn(6, 7, 4, dtype=torch.float64), torch.randint(3, (6, 7))
    x[:, counted.stop :] *= 10
    if likelihood.ignore_index is not None:
        y[:, 5:] = likelihood.ignore_index
    flat = [(x[:, counted].reshape(-1, 4), torch.zeros(6 * counted.stop).long())]
    found = curvature(net, P.of(net), [(x[:2], y[:2]), (x[2:], y[2:])], likelihood, structure, last)
    plain = OfTokens().double()
    plain.load_state_dict(net.state_dict())
    wanted = curvature(plain, P.of(net), flat, Categorical(), structure, last)
    for block, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(block.eigenvalues, other.eigenvalues, rtol=1e-8, atol=1e-10)


class OneByOne(OfTokens):
    """The same, but layers are called for every token."""

    def forward(self, x):
        return torch.stack([super(OneByOne, self).forward(t) for t in x.unbind(1)], 1)


class Mixing(OfTokens):
    """Sums of all tokens so far."""

    def forward(self, x):
        return self.out(torch.tanh(self.inner(x)).cumsum(1))


def test_every_use_of_a_layer_counts_in_its_factors():
    net, other = OfTokens().double(), OneByOne().double()
    other.load_state_dict(net.state_dict())
    batches = [(torch.randn(6, 7, 4).double(), torch.randint(3, (6, 7)))]
    found, wanted = (kronecker_factors(n, batches, Categorical()) for n in (other, net))
    for block, same in zip(found, wanted, strict=True):
        torch.testing.assert_close(block.eigenvalues, same.eigenvalues)


class Experts(OfTokens):
    """The sign of an example decides who looks at it."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 5)

    def forward(self, x):
        expert = self.inner if float(x[0, 0]) > 0 else self.other
        return self.out(torch.tanh(expert(x)))


def test_layers_that_some_batches_do_not_call():
    net, x, y = Experts().double(), torch.randn(4, 4).double().abs(), torch.zeros(4).long()
    for rows, silent in (([x], "other"), ([-x], "inner"), ([x, -x, x[:0]], "")):
        batches = [(part, y[: len(part)]) for part in rows if len(part)]
        blocks = kronecker_factors(net, batches, Categorical())
        zero = {block.names[0] for block in blocks if not block.eigenvalues.any()}
        assert zero == ({f"{silent}.weight", f"{silent}.bias"} if silent else set())


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("net", [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))])
def test_examples_that_are_ignored_have_no_curvature(net, structure):
    net, x, y = net.double(), torch.randn(6, 4).double(), torch.tensor([0, -1, 2, -1, -1, 1])
    batches = [(x, torch.full_like(y, -1)), (x, y)]
    found = curvature(net, P.of(net), batches, Categorical(ignore_index=-1), structure)
    kept = [(x[y >= 0], y[y >= 0])]
    wanted = curvature(net, P.of(net), kept, Categorical(), structure)
    for block, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(block.eigenvalues, other.eigenvalues, rtol=1e-8, atol=1e-10)


def test_products_of_two_tokens_vanish_in_the_mean_of_kronecker_factors():
    net = Mixing().double()
    x, y, n = torch.randn(1, 4, 4).double(), torch.zeros(1, 4).long(), 3000
    found = kronecker_factors(net, [(x.expand(n, 4, 4), y.expand(n, 4))], Categorical())[1]
    outputs = []
    net.inner.register_forward_hook(lambda *call: outputs.append(call[2]))
    rows = net(x)[0]
    roots = curvature_root(Categorical())(rows.detach())
    apart = [
        torch.autograd.grad(rows[t], outputs[0], roots[t, :, c], retain_graph=True)[0][0]
        for t in range(4)
        for c in range(3)
    ]
    wanted = sum(g.T @ g for g in apart)
    together = sum(g.T @ g for g in (sum(apart[c::3]) for c in range(3)))
    scale = float(wanted.norm())
    assert float((matrix(found) / n - wanted).norm()) < 0.05 * scale
    assert float((together - wanted).norm()) > 0.2 * scale


@pytest.mark.parametrize("name", CASES)
def test_a_linear_layer_has_its_curvature_in_closed_form(name):
    likelihood, k = CASES[name][0].double(), CASES[name][1]
    layer, names = nn.Linear(5, k).double(), ["weight", "bias"]
    x, y = torch.randn(40, 5).double(), torch.zeros(40).long()
    y = torch.zeros(40, 2) if isinstance(likelihood, Gaussian) else y
    batches = [(x[:25], y[:25]), (x[25:], y[25:])]
    (diagonal,) = curvature(layer, P.of(layer), batches, likelihood, "diag")
    wanted = gauss_newton(layer, names, batches, likelihood, True)
    torch.testing.assert_close(diagonal.eigenvalues[:, 0], wanted)
    found = curvature(layer, P.of(layer), batches, likelihood, "kron")
    for block, other in zip(found, kronecker_factors(layer, batches, likelihood), strict=True):
        torch.testing.assert_close(matrix(block), matrix(other))


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_outputs_of_a_wide_last_layer_are_drawn_as_its_weights_would_draw_them(
    structure, positions, monkeypatch
):
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(30, *positions, 4).double(), torch.randint(3, (30, *positions))
    blocks = curvature(net, P.of(net), [(x, y)], Categorical(), structure, "2")
    posterior = LaplaceGaussian(P.of(net), blocks, 0.3, last_layer="2")
    generator, n = torch.Generator().manual_seed(0), 20_000
    by_weights = posterior.predictor(n, generator)(net, x[:2])
    monkeypatch.setattr(laplace, "_LARGEST_LAYERS", 0)
    by_outputs = posterior.predictor(n, generator)(net, x[:2])
    assert by_outputs.shape == by_weights.shape
    error = by_weights.std(0) * 5 / n**0.5
    assert bool(((by_outputs.mean(0) - by_weights.mean(0)).abs() < 2 * error).all())

    def covariance(samples):
        rows = (samples - samples.mean(0)).flatten(1, -2).movedim(1, 0)
        return rows.mT @ rows / n

    wanted, found = covariance(by_weights), covariance(by_outputs)
    noise = 0.05 * float(wanted.max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=noise)
    assert not torch.allclose(found[0], wanted[1], rtol=0, atol=noise)
