"""Compact representations: matched networks as one Gaussian, pruned and combined."""

import pytest
import torch

from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian
from weightsym import (
    align,
    discover,
    match,
    match_activations,
    permute,
    random_permutations,
)  # fmt: skip
from weightsym import params as P

NET = mlp(6, [12], 3).eval()
NET.load_state_dict(P.unstack(P.populate(NET, 1, torch.Generator().manual_seed(77)))[0])
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
SYM = discover(NET, X[:2])
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


FRAMES = {
    "weights": lambda stack, first: match(stack, first, SYM).apply(stack, SYM),
    "activations": lambda stack, first: permute(
        stack, SYM, match_activations(NET, stack, first, SYM, [X])
    ),
    "joint": lambda stack, first: align(stack, SYM).apply(stack, SYM),
}


@pytest.mark.parametrize("frame", FRAMES)
def test_matched_copies_have_the_noise_they_were_made_with(frame):
    stack = permuted_copies()
    q = DiagonalGaussian.fit(FRAMES[frame](stack, P.of(NET)))
    torch.testing.assert_close(q.log_std.exp().mean().item(), STD, rtol=0.05, atol=0)
    if frame != "joint":
        for name, t in q.centre.items():
            torch.testing.assert_close(t, P.of(NET)[name], atol=5 * STD, rtol=0)
    apart = DiagonalGaussian.fit(stack)
    assert apart.log_std.exp().mean() > 5 * STD


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
        (lambda q, s: q.fit(P.unstack(s)), "`networks` must be a stack"),
        (lambda q, s: q.prune(1.5), "`fraction` must be between 0 and 1"),
    ],
)
def test_bad_input(call, sentence):
    stack = permuted_copies(3)
    with pytest.raises(ValueError, match=sentence):
        call(DiagonalGaussian.fit(stack), stack)
