"""What every posterior must do: repeatable draws, moments, density, saving, prediction."""

import pytest
import torch
from posterior_cases import POSTERIORS, draw, gaussian, same, template
from refusals import refuses
from torch import distributions as D
from torch import nn

from lightning_bnn import models
from lightning_bnn.posteriors import (
    DiagonalGaussian,
    Empirical,
    LowRankGaussian,
    Mixture,
    Posterior,
)
from weightsym import params as P

EACH = pytest.mark.parametrize("name", POSTERIORS)


@EACH
def test_draws(name):
    posterior = POSTERIORS[name]()
    assert isinstance(posterior, Posterior)
    stack, net = draw(posterior), template()
    assert list(stack) == list(P.of(net))
    assert P.stack_size(stack) == 7
    assert same(stack, draw(posterior))
    assert not same(stack, draw(posterior, seed=6))
    state = torch.get_rng_state()
    draw(posterior)
    assert torch.equal(state, torch.get_rng_state())


@EACH
def test_predict(name):
    posterior, net, x = POSTERIORS[name](), template(), torch.randn(5, 3).double()
    found = posterior.predict(net, x, 7, torch.Generator().manual_seed(5))
    expected = torch.stack(
        [torch.func.functional_call(net, w, x) for w in P.unstack(draw(posterior))]
    )
    torch.testing.assert_close(found, expected)


# ------------------------------------------------------------ Gaussian
def test_moments_and_density():
    posterior = gaussian()
    stack = draw(posterior, 40_000)
    rows, _ = P.ravel(stack, posterior.spec.names, stacked=True)
    mean, std = posterior.mean.detach(), posterior.log_std.exp().detach()
    torch.testing.assert_close(rows.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(rows.std(0), std, atol=0.01, rtol=0.02)
    few = {k: v[:9] for k, v in stack.items()}
    expected = D.Normal(mean, std).log_prob(rows[:9]).sum(-1)
    torch.testing.assert_close(posterior.log_prob(few), expected)
    torch.testing.assert_close(posterior.entropy(), D.Normal(mean, std).entropy().sum())
    assert bool((stack["1.running_var"] == 1).all())


def test_gradients_reach_mean_and_deviation():
    posterior = gaussian()
    loss = posterior.predict(template(), torch.randn(4, 3).double(), 3).square().mean()
    loss.backward()
    assert posterior.mean.grad.abs().sum() > 0
    assert posterior.log_std.grad.abs().sum() > 0


def test_a_fit_has_the_moments_of_its_networks_and_their_buffers():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    stack = P.populate(net, 5)
    found = DiagonalGaussian.fit(stack)
    rows, _ = P.ravel(stack, found.spec.names, stacked=True)
    torch.testing.assert_close(found.mean.detach(), rows.mean(0))
    torch.testing.assert_close(found.log_std.detach().exp(), rows.std(0))
    assert found.centre.keys() == stack.keys()
    assert "1.running_var" not in found.deviations
    assert found.prune(1.0)["1.running_var"].equal(torch.ones(4))


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_pruning_keeps_the_most_certain_weights(fraction):
    posterior = DiagonalGaussian({"w": 1 + torch.rand(40)}, {"w": 0.1 + torch.rand(40)})
    found, std = posterior.prune(fraction)["w"], posterior.deviations["w"]
    gone = found == 0
    assert int(gone.sum()) == round(fraction * 40)
    assert fraction == 0 or std[gone].min() >= std[~gone].max()
    torch.testing.assert_close(found[~gone], posterior.centre["w"][~gone])


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
    samples = posterior.sample(100_000, torch.Generator().manual_seed(1))
    found = P.ravel(samples, stacked=True)[0]
    error = (torch.cov(found.T) - wanted).abs().max() / wanted.diagonal().max()
    assert error < 0.02
    assert (found.mean(0) - rows.mean(0)).abs().max() < 0.02
    law = torch.distributions.MultivariateNormal(rows.mean(0), wanted)
    torch.testing.assert_close(posterior.log_prob(networks), law.log_prob(rows))


# ------------------------------------------------------------ made of networks
def test_without_replacement():
    stack = P.populate(models.mlp(2, [3], 1), 9)
    found = draw(Empirical(stack), 9)["1.weight"]
    order = [next(k for k, w in enumerate(stack["1.weight"]) if torch.equal(w, f)) for f in found]
    assert sorted(order) == list(range(9))
    assert order != list(range(9))


def test_mixture_is_spread_over_its_modes():
    modes = [Empirical({"w": torch.full((50,), float(k))}) for k in range(3)]
    mixture, counts = Mixture(modes, [1.0, 2.0, 2.0]), torch.zeros(3)
    for seed in range(400):
        w = draw(mixture, 6, seed)["w"]
        found = torch.bincount(w.long(), minlength=3)
        assert bool(((found - 6 * mixture.weights).abs() < 1).all())
        counts += found
    torch.testing.assert_close(counts / counts.sum(), mixture.weights.float(), atol=0.02, rtol=0)
    assert len({tuple(draw(mixture, 6, s)["w"].tolist()) for s in range(20)}) > 5


def test_density_of_a_mixture():
    parts, stack = [gaussian(0), gaussian(1)], draw(gaussian(2))
    found = Mixture(parts, [1.0, 3.0]).log_prob(stack)
    p = [part.log_prob(stack) for part in parts]
    expected = torch.log(0.25 * (p[0] - p[1]).exp() + 0.75) + p[1]
    torch.testing.assert_close(found, expected)


MEAN = {"a": torch.ones(2, 3), "b": torch.ones(3)}
INF, WIDE = torch.full((3,), torch.inf), {n: torch.stack([t, -t]) for n, t in MEAN.items()}
SQUARE = nn.Linear(5, 5)  # its bias has as many numbers as its weight has rows


def test_a_stack_of_square_networks():
    stack = P.populate(SQUARE, 5)
    torch.testing.assert_close(Posterior.of(stack, SQUARE).networks, stack)


def test_deviations_belong_to_weights_by_name():
    std = {"b": 1 + torch.rand(3), "a": 1 + torch.rand(2, 3)}
    for posterior in (DiagonalGaussian(MEAN, std), LowRankGaussian(MEAN, std, WIDE)):
        held = getattr(posterior, "std", None)
        held = posterior.deviations if held is None else P.unravel(held, posterior.spec)
        torch.testing.assert_close(held, {"a": std["a"], "b": std["b"]})


test_errors = refuses(
    (lambda: gaussian().sample(0), "`n` must be at least 1, got 0"),
    (lambda: Empirical({"w": torch.ones(3)}).sample(4), "at most 3, the number of networks"),
    (lambda: Mixture([]), "`components` must hold at least one"),
    (lambda: Mixture([gaussian()], [0.0]), "`weights` must be 1 positive, finite numbers"),
    (lambda: DiagonalGaussian({"w": torch.ones(3)}, 0.0), "`std` must be positive"),
    (lambda: Posterior.of(P.of(SQUARE), SQUARE), "`source` is one network, like `network`"),
    (lambda: Posterior.of(P.populate(SQUARE, 5), template()), "'0.bias' is missing in it, but"),
    (lambda: Posterior.of([SQUARE] * 2, nn.Linear(5, 4)), r"'bias' is \(5,\) in it, but \(4,\)"),
    (lambda: DiagonalGaussian({"n": torch.ones(3).long()}), "`mean` has no weights"),
    (lambda: DiagonalGaussian(MEAN, {"a": torch.ones(3), "b": torch.ones(2, 3)}), "`std` must"),
    (lambda: DiagonalGaussian(MEAN, {**MEAN, "a": MEAN["a"].T}), r"'a' of shape \(2, 3\), got"),
    (lambda: DiagonalGaussian(MEAN, {"a": MEAN["a"]}), "`std` must have 'b' .*, got nothing"),
    (lambda: DiagonalGaussian(MEAN, {**MEAN, "b": -MEAN["b"]}), "must be positive and finite"),
    (lambda: DiagonalGaussian(MEAN, {**MEAN, "b": INF}), "`std` must be positive and finite"),
    (lambda: LowRankGaussian(MEAN, {**MEAN, "b": INF}, WIDE), "`std` must be finite and not"),
    (lambda: LowRankGaussian(MEAN, {**MEAN, "b": -MEAN["b"]}, WIDE), "must be finite and not"),
    (lambda: LowRankGaussian(MEAN, MEAN, MEAN), r"`deviations` must have 'a' .*, got \(2, 3\)"),
    (lambda: LowRankGaussian(MEAN, MEAN, WIDE, 0.0).log_prob(WIDE), "is 0 for 9 of 9"),
    (lambda: DiagonalGaussian.fit({"w": torch.ones(3, 2) * 1j}), "`networks` has no weights"),
    (lambda: DiagonalGaussian(MEAN).sample(2.5), "`n` must be a whole number, got 2.5"),
    (lambda: Mixture([gaussian()] * 2, [float("inf"), 1.0]), "2 positive, finite numbers"),
    (lambda: draw(Mixture([gaussian(), DiagonalGaussian(MEAN)])), "the same network, but shape"),
    (lambda: DiagonalGaussian.fit([MEAN]), "`networks` must be a stack"),
    (lambda: gaussian().prune(1.5), "`fraction` must be between 0 and 1"),
    (lambda: LowRankGaussian.fit({"a": torch.zeros(1, 2)}), "`networks` must hold at least"),
    (lambda: LowRankGaussian.fit(WIDE, rank=61), "`rank` must be between 2 and"),
    (lambda: LowRankGaussian.fit(WIDE, scale=-1.0), "`scale` must not be neg"),
    (
        lambda: LowRankGaussian(MEAN, MEAN, {n: t[:1] for n, t in WIDE.items()}),
        "`deviations` must hold at least 2",
    ),
    *(
        (lambda q=q: POSTERIORS[q]().log_prob(P.of(template())), "for each network of a stack")
        for q in ("dense", "laplace", "gaussian", "low rank", "mixture")
    ),
)


def test_no_density():
    with pytest.raises(NotImplementedError, match="Empirical has no density"):
        Empirical({"w": torch.ones(3)}).log_prob({"w": torch.ones(1)})


@pytest.mark.parametrize("kind", [DiagonalGaussian, LowRankGaussian])
def test_what_all_networks_share_has_no_density(kind):
    rows, table = torch.randn(30, 5), torch.randn(1000)
    networks = {"w": rows, "table": table.expand(30, -1)}
    fitted, some = kind.fit(networks), {name: t[:2] for name, t in networks.items()}
    assert torch.equal(fitted.sample(3)["table"], table.expand(3, -1))
    assert torch.equal(fitted.log_prob(some), kind.fit({"w": rows}).log_prob({"w": rows[:2]}))
    another = {"w": rows, "table": networks["table"] + torch.randn(30, 1)}
    assert len(kind.fit(another).spec.names) == 2
