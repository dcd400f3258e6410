"""Dropout: where it acts, that a weight sample is the masked network, and its distribution."""

import pytest
import torch
from cases import Forward
from torch import nn
from torch.nn import functional as F

from lightning_bnn.posteriors import Dropout
from lightning_bnn.posteriors.dropout import dropout_sites
from weightsym import params as P


def functional():
    return Forward(
        lambda s, x: s.c(s.b(F.dropout(s.a(x).relu(), 0.3, s.training)).relu()),
        a=nn.Linear(6, 5), b=nn.Linear(5, 4), c=nn.Linear(4, 3),
    )  # fmt: skip


NETWORKS = {
    "perceptron": (
        lambda: nn.Sequential(
            nn.Dropout(0.1), nn.Linear(6, 5), nn.Dropout(0.4), nn.ReLU(), nn.Linear(5, 3)
        ),
        (4, 6),
        [("1.weight", 6, 1), ("4.weight", 5, 1)],
    ),
    "functional": (functional, (4, 6), [("b.weight", 5, 1)]),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2),
            nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(16, 3),
        ),
        (4, 1, 8, 8),
        [("4.weight", 3, 1), ("7.weight", 4, 4)],
    ),
    "pixels": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(18, 3)
        ),
        (4, 1, 5, 5),
        [("4.weight", 18, 1)],
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", NETWORKS)


def made(name):
    torch.manual_seed(0)
    make, shape, wanted = NETWORKS[name]
    return make().double().eval(), torch.randn(shape).double(), wanted


@EACH
def test_sites(name):
    net, x, wanted = made(name)
    found = dropout_sites(net.train(), (x,))
    assert [(s.weight, s.units, s.repeat) for s in found] == wanted
    assert net.training


@EACH
def test_weights_and_predictions_have_one_distribution(name):
    """Both draw masks, one for all inputs or one for each."""
    net, x, _ = made(name)
    posterior = Dropout(P.stack([P.of(net)]), dropout_sites(net, (x,)))
    n = 20_000
    networks = posterior.sample(n, torch.Generator().manual_seed(0))
    one = P.apply(net, networks, x)
    torch.manual_seed(1)
    two = posterior.predict(net, x, n)
    scale = two.std(0).max()
    assert scale > 0.01
    assert (one.mean(0) - two.mean(0)).abs().max() < 0.06 * scale
    assert (one.std(0) - two.std(0)).abs().max() < 0.06 * scale
    # of weight samples the inputs move together, of predictions they do not
    together, apart = (torch.corrcoef(o[:, :2, 0].T)[0, 1].abs() for o in (one, two))
    assert apart < 0.05
    assert together > apart


def test_a_sample_of_weights_is_the_masked_network():
    net, x, _ = made("perceptron")
    posterior = Dropout(P.stack([P.of(net)]), dropout_sites(net, (x,)), layers="last")
    drawn = posterior.sample(50, torch.Generator().manual_seed(0))
    assert torch.equal(drawn["1.weight"], net[1].weight.expand(50, -1, -1))
    ratio = drawn["4.weight"] / net[4].weight
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    kept = ratio[ratio != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.6))
    assert float((ratio == 0).double().mean()) == pytest.approx(0.4, abs=0.1)


def test_batch_norm_stays_as_it_is():
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    posterior = Dropout(P.stack([P.of(net)]))
    x = torch.randn(7, 6)
    for chunk_size in (None, 1):
        outputs = posterior.predict(net, x, 5, chunk_size=chunk_size)
        assert outputs.std(0).min() > 0
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(m.training for m in net.modules())


def test_only_the_last_layer():
    """Of every network of a stack, at once or one by one."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 3)).eval()
    networks, x = P.populate(net, 2), torch.randn(7, 6)
    for chunk_size in (None, 1):
        outputs = Dropout(networks, layers="last").predict(net, x, 6, chunk_size=chunk_size)
        wanted = P.apply(net, networks, x).repeat_interleave(3, 0)
        torch.testing.assert_close(outputs, wanted)
        every = Dropout(networks).predict(net, x, 6, chunk_size=chunk_size)
        assert not torch.allclose(every, wanted)


def test_dropout_of_rate_zero_passes_on_what_it_gets():
    net = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.0), nn.Linear(6, 5)).eval()
    x = torch.randn(7, 6)
    sites = dropout_sites(net, (x,))
    assert [(s.rate, s.weight) for s in sites] == [(0.3, "2.weight"), (0.0, None)]
    drawn = Dropout(P.stack([P.of(net)]), sites).sample(40)
    assert bool((drawn["2.weight"] == 0).any())


def residual():
    return Forward(
        lambda s, x: s.b(x + F.dropout(s.a(x), 0.5, s.training)),
        a=nn.Linear(6, 6),
        b=nn.Linear(6, 3),
    )


def tied():
    return Forward(lambda s, x: s.a(F.dropout(s.a(x), 0.5, s.training)), a=nn.Linear(6, 6))


def attention():
    return Forward(
        lambda s, x: F.scaled_dot_product_attention(
            s.a(x), x, x, dropout_p=0.4 if s.training else 0.0
        ),
        a=nn.Linear(6, 6),
    )


def test_attention_drops_as_it_does_in_training():
    """Beside a layer of rate 0, which drops nothing."""
    torch.manual_seed(0)
    net, x, n = nn.Sequential(nn.Dropout(0.0), attention()), torch.randn(1, 3, 6), 20_000
    wanted = net.train()(x.expand(n, -1, -1))
    drawn = Dropout(P.stack([P.of(net)])).predict(net.eval(), x, n)[:, 0]
    assert (drawn.mean(0) - wanted.mean(0)).abs().max() < 0.06 * wanted.std(0).max()
    torch.testing.assert_close(drawn.std(0), wanted.std(0), rtol=0.06, atol=0)


@pytest.mark.parametrize(
    ("net", "x", "reason"),
    [
        (residual(), (4, 6), "no weight reads its units one by one"),
        (tied(), (4, 6), "no weight reads"),
        (nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2)), (4, 6), "no weight reads"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.2), nn.Conv2d(2, 1, 3)),
            (4, 1, 8, 8),
            "no weight reads",
        ),
        (nn.Sequential(nn.AlphaDropout(0.2), nn.Linear(6, 5)), (4, 6), "moves its units"),
        (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (4, 3, 6), "is in attention"),
        (attention(), (4, 3, 6), "is in attention"),
    ],
)
def test_dropout_that_is_no_weight_sample_still_predicts(net, x, reason):
    x, net = torch.randn(x), net.eval()
    sites = dropout_sites(net, (x,))
    posterior = Dropout(P.stack([P.of(net)]), sites)
    assert posterior.predict(net, x, 5).std(0).max() > 0
    with pytest.raises(ValueError, match=reason):
        posterior.sample(2)


@pytest.mark.bad_input
def test_errors():
    net = nn.Linear(2, 2)
    posterior = Dropout(P.stack([P.of(net)]))
    with pytest.raises(ValueError, match="`sites` must be known"):
        posterior.sample(2)
    with pytest.raises(ValueError, match="Linear has no dropout"):
        posterior.predict(net, torch.randn(2, 2), 2)
    with pytest.raises(ValueError, match="has no dropout with a rate above 0"):
        dropout_sites(nn.Sequential(net, nn.Dropout(0.0)), (torch.randn(2, 2),))
    with pytest.raises(ValueError, match="`layers` must be"):
        Dropout(P.stack([P.of(net)]), layers="first")
