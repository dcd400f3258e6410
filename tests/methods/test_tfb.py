"""TFB: the noise of adapters is that of their product, whatever factors it was stored as."""

import lightning as L
import pytest
import torch
from runs import QUIET
from torch import nn
from torch.utils.data import TensorDataset

from lightning_bnn import methods, params
from lightning_bnn.methods import Batch, Run
from lightning_bnn.methods.tfb import adapter_factors, largest_scale, noise_blocks
from lightning_bnn.modules import TFB
from lightning_bnn.posteriors import LaplaceGaussian, Posterior
from weightsym import discover

IN, RANK, OUT, ROWS = 6, 3, 5, 40


class Adapted(nn.Module):
    """A fixed linear layer with a trained pair beside it, stored as layers or as plain factors."""

    def __init__(self, plain=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.head = nn.Linear(IN, OUT), nn.Linear(OUT, 3)
        self.plain = plain
        self.down = nn.Parameter(torch.randn(IN, RANK) if plain else torch.randn(RANK, IN))
        self.up = nn.Parameter(torch.randn(RANK, OUT) if plain else torch.randn(OUT, RANK))
        self.base.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, x):
        pair = x @ self.down @ self.up if self.plain else x @ self.down.mT @ self.up.mT
        return self.head((self.base(x) + pair).tanh())

    def product(self, stack):
        down, up = stack["down"], stack["up"]
        return (down @ up).mT if self.plain else up @ down


@torch.no_grad()
def told_by(net, seed=1):
    """Examples whose labels are what a network says, as if it were trained on them."""
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed))
    return Batch((x,), net(x).argmax(-1))


def fitted(net, **options):
    method, run = methods.TFB(**options), Run(net)
    state = method.init(net, params.stack([params.of(net)]))
    method.at_end(state, [told_by(net)], run)
    return method.posterior(state, run)


def unit_noise(net, n=20_000):
    sym = discover(net, torch.randn(4, IN))
    member = params.of(net)
    (block,) = noise_blocks(net, member, adapter_factors(net, sym))
    posterior = LaplaceGaussian(member, [block], 1e-30, 1.0, "network")
    stack = posterior.sample(n, torch.Generator().manual_seed(0))
    return net.product({k: t for k, t in stack.items()}) - net.product(member)


@pytest.mark.parametrize("plain", [False, True])
def test_noise_of_scale_one_is_isotropic_on_what_the_adapter_reaches(plain):
    net = Adapted(plain)
    noise = unit_noise(net).double()
    covariance = torch.einsum("noi,npj->oipj", noise, noise) / len(noise)
    up = net.up.detach().double().mT if plain else net.up.detach().double()
    onto = up @ torch.linalg.pinv(up)
    wanted = torch.einsum("op,ij->oipj", onto, torch.eye(IN).double())
    torch.testing.assert_close(covariance, wanted, atol=0.05, rtol=0)
    naive = torch.einsum("or,pr,ij->oipj", up, up, torch.eye(IN).double())  # A + noise, no scales
    assert (covariance - naive).abs().max() > 0.5


def test_other_factors_of_the_same_product_have_the_same_posterior():
    net, other = Adapted(), Adapted()
    matrix = torch.randn(RANK, RANK)
    other.down.data, other.up.data = matrix @ net.down.data, net.up.data @ matrix.inverse()
    torch.testing.assert_close(*(each(*told_by(net).inputs) for each in (net, other)))
    scales = [fitted(each, draws=200).temperature ** 0.5 for each in (net, other)]
    assert scales[0] == pytest.approx(scales[1], rel=0.05)


@pytest.mark.parametrize("tolerance", [0.003, 0.1])
def test_the_loss_grows_by_the_tolerance(tolerance):
    net = Adapted()
    posterior = fitted(net, tolerance=tolerance, draws=400)
    batch = told_by(net)
    outputs = params.apply(net, posterior.sample(4000), *batch.inputs)
    logs = outputs.log_softmax(-1).gather(-1, batch.targets.expand(4000, -1)[..., None])
    before = nn.functional.cross_entropy(net(*batch.inputs), batch.targets)
    grown = float((-logs.mean() - before).detach())
    assert grown == pytest.approx(tolerance, rel=0.15)


def test_without_an_adapter_every_trained_matrix_has_noise():
    net = nn.Sequential(nn.Linear(IN, 4), nn.ReLU(), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    posterior = fitted(net)
    stack = posterior.sample(3000)
    assert stack["2.weight"].std(0).min() > 0.9 * posterior.temperature**0.5
    assert all((stack[n] == stack[n][0]).all() for n in ("0.weight", "0.bias", "2.bias"))


def test_a_direction_that_is_not_read_has_no_noise():
    net = Adapted()
    net.up.data[:, 0] = 0
    drawn = fitted(net).sample(500)["down"].std(0)
    assert drawn[0].max() < 1e-4 * drawn[1:].min()


def test_a_trained_network_is_bayesian_in_three_lines(tmp_path):
    net = Adapted()
    batch = told_by(net)
    examples = TensorDataset(*batch.inputs, batch.targets)
    datamodule = L.LightningDataModule.from_datasets(examples, test_dataset=examples, batch_size=10)
    module = TFB(net)
    (found,) = L.Trainer(**QUIET).test(module, datamodule, verbose=False)
    assert found["test/mi"] > 0
    path = tmp_path / "posterior.safetensors"
    module.posterior().save(path)
    again = Posterior.load(path)
    x = batch.inputs[0]
    torch.testing.assert_close(
        again.predict(net, x, 400).softmax(-1).mean(0),
        module.posterior().predict(net, x, 400).softmax(-1).mean(0),
        atol=0.05,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda net: net.up.data.zero_(), "Every adapter is zero"),
        (lambda net: net.requires_grad_(False), "is_trainable=True"),
        (lambda net: net.head.weight.data.zero_(), "loss stays within `tolerance`"),
        (lambda net: net.head.bias.data.fill_(torch.nan), "finite"),
    ],
)
def test_what_cannot_be_done_is_said(spoil, words):
    net = Adapted()
    spoil(net)
    with pytest.raises(ValueError, match=words):
        fitted(net)


@pytest.mark.parametrize("least", [0.3, 3e-4, 700.0])
def test_the_scale_is_found_wherever_it_is(least):
    scale, grown = largest_scale(lambda s: 2 + (s / least) ** 2, 3.0)
    assert scale <= least < 1.03 * scale
    assert grown == pytest.approx(3.0, abs=0.05)
