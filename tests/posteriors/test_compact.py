"""Compact representations: matched networks as one Gaussian, pruned and combined."""

import pytest
import torch

from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, LowRankGaussian
from weightsym import align, discover, match_activations, permute, random_permutations
from weightsym import params as P

NET = mlp(6, [12], 3).eval()
NET.load_state_dict(P.unstack(P.populate(NET, 1, torch.Generator().manual_seed(77)))[0])
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
SYM = discover(NET, X[:2])
MATCHING = {"symmetries": SYM, "model": NET, "batches": [X]}
STD = 0.01


def permuted_copies(count=30):
    g = torch.Generator().manual_seed(1)
    centre = P.of(NET)
    noisy = DiagonalGaussian(centre, STD).sample(count, g)
    noisy = {name: t.detach() for name, t in noisy.items()}
    moves = [
        torch.stack(p)
        for p in zip(*(random_permutations(SYM, g) for _ in range(count)), strict=True)
    ]
    return permute(noisy, SYM, moves)


@pytest.mark.parametrize("align", ["weights", "activations", "joint"])
def test_matched_copies_have_the_noise_they_were_made_with(align):
    stack = permuted_copies()
    q = DiagonalGaussian.fit(stack, P.of(NET), align, **MATCHING)
    torch.testing.assert_close(q.log_std.exp().mean().item(), STD, rtol=0.05, atol=0)
    for name, t in q.centre.items():
        torch.testing.assert_close(t, P.of(NET)[name], atol=5 * STD, rtol=0)
    apart = DiagonalGaussian.fit(stack)
    assert apart.log_std.exp().mean() > 5 * STD


@pytest.mark.parametrize("kind", [DiagonalGaussian, LowRankGaussian])
def test_networks_in_one_frame_spread_less_than_those_matched_to_one(kind):
    networks = P.populate(NET, 8)
    apart, first, joint = (
        kind.fit(networks, align=align, symmetries=align and SYM)
        for align in (None, "weights", "joint")
    )

    def spread(q):
        drawn = P.ravel(q.sample(2000, torch.Generator().manual_seed(0)), stacked=True)[0]
        return float(drawn.detach().var(0).sum())

    assert spread(joint) < 0.98 * spread(first) < 0.98 * spread(apart)


@pytest.mark.parametrize("kind", [DiagonalGaussian, LowRankGaussian])
def test_networks_are_brought_into_the_frame_of_the_first_by_activations(kind):
    stack = permuted_copies()
    q = kind.fit(stack, align="activations", **MATCHING)
    first = {n: t[0] for n, t in stack.items()}
    moved = match_activations(NET, stack, first, SYM, MATCHING["batches"])
    expected = kind.fit(permute(stack, SYM, moved))
    assert torch.equal(q.state_dict()["mean"], expected.state_dict()["mean"])
    assert not torch.equal(q.state_dict()["mean"], kind.fit(stack).state_dict()["mean"])


@pytest.mark.parametrize("kind", [DiagonalGaussian, LowRankGaussian])
def test_a_joint_frame_takes_the_options_of_align(kind):
    net = mlp(3, [6], 2, torch.nn.Tanh)
    sym, stack = discover(net, torch.randn(2, 3)), P.populate(net, 5)
    q = kind.fit(stack, align="joint", symmetries=sym, signs=True, sweeps=7, seed=3)
    expected = kind.fit(align(stack, sym, signs=True, sweeps=7, seed=3).apply(stack, sym))
    plain = kind.fit(stack, align="joint", symmetries=sym)
    assert torch.equal(q.state_dict()["mean"], expected.state_dict()["mean"])
    assert not torch.equal(q.state_dict()["mean"], plain.state_dict()["mean"])


def test_the_reference_is_the_first_network_by_default():
    stack = permuted_copies()
    first = {name: t[0] for name, t in stack.items()}
    one = DiagonalGaussian.fit(stack, align="weights", symmetries=SYM)
    two = DiagonalGaussian.fit(stack, first, "weights", SYM)
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.log_std, two.log_std)


def test_means_and_deviations_without_matching():
    stack = permuted_copies()
    q = DiagonalGaussian.fit(stack)
    rows, _ = P.ravel(stack, stacked=True)
    torch.testing.assert_close(q.mean.detach(), rows.mean(0))
    torch.testing.assert_close(q.log_std.detach().exp(), rows.std(0))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_pruning_keeps_the_most_certain_weights(fraction):
    q = DiagonalGaussian.fit(permuted_copies())
    found, _ = P.ravel(q.prune(fraction))
    gone = found == 0
    count = round(fraction * len(found))
    assert int(gone.sum()) == count
    if 0 < count < len(found):
        assert q.log_std[gone].min() >= q.log_std[~gone].max()
    torch.testing.assert_close(found[~gone], q.mean.detach()[~gone])


@pytest.mark.parametrize("align", ["weights", "activations"])
def test_deviations_of_another_posterior_follow_its_means(align):
    g = torch.Generator().manual_seed(3)
    std = {name: 0.1 + torch.rand(t.shape, generator=g) for name, t in P.of(NET).items()}
    mine = DiagonalGaussian(P.of(NET), 0.5)
    move = random_permutations(SYM, g)
    other = DiagonalGaussian(permute(P.of(NET), SYM, move), permute(std, SYM, move))
    both = mine.with_deviations_of(other, align, **MATCHING)
    assert torch.equal(both.mean, mine.mean)
    for name, t in both.deviations.items():
        torch.testing.assert_close(t, std[name])
    as_they_are = mine.with_deviations_of(other, None)
    torch.testing.assert_close(as_they_are.log_std, other.log_std)


def test_buffers_stay():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    stack = P.populate(net, 3)
    q = DiagonalGaussian.fit(stack)
    assert q.centre.keys() == stack.keys()
    assert q.prune(0.5)["1.running_var"].equal(torch.ones(4))
    assert "1.running_var" not in q.deviations


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda q, s: q.fit(s, align="weights"), "`symmetries` must be what `discover`"),
        (
            lambda q, s: q.with_deviations_of(q, align="joint", symmetries=SYM),
            "which needs a stack of networks",
        ),
        (lambda q, s: q.fit(s, align="looks", symmetries=SYM), "`align` must be one of"),
        (lambda q, s: q.fit(s, align="activations", symmetries=SYM), "`model` and `batches` must"),
        (lambda q, s: q.fit(s, P.of(NET)), "`reference` is used with `align`"),
        (lambda q, s: q.fit(s, signs=True), "`signs` is used with `align`"),
        (lambda q, s: LowRankGaussian.fit(s, signs=True), "`signs` is used with `align`"),
        (
            lambda q, s: q.fit(s, align="weights", symmetries=SYM, mixing=True),
            "`mixing` goes with `align='joint'`, got 'weights'",
        ),
        (lambda q, s: q.fit(P.unstack(s)), "`networks` must be a stack"),
        (lambda q, s: q.prune(1.5), "`fraction` must be between 0 and 1"),
        (lambda q, s: q.with_deviations_of(q), "`symmetries` must be what `discover`"),
    ],
)
def test_bad_input(call, sentence):
    stack = permuted_copies(3)
    with pytest.raises(ValueError, match=sentence):
        call(DiagonalGaussian.fit(stack), stack)
