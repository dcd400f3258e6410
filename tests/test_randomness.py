"""Random numbers that depend on keys only."""

import torch

from weightsym.networks.randomness import key_of, keyed_generator, keyed_randomness


def test_keys_are_told_apart_and_do_not_depend_on_the_process():
    keys = {key_of(a, b) for a in range(100) for b in range(100)}
    assert len(keys) == 10_000
    assert key_of(1, "a", 2) == 2524119925830061422
    assert key_of(12, 3) != key_of(1, 23)


def test_a_context_draws_by_its_key_and_leaves_no_trace():
    torch.manual_seed(0)
    before = torch.rand(3)
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), before)
    with keyed_randomness(1, "x"):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), after)
    with keyed_randomness(1, "x"):
        assert torch.equal(torch.rand(3), inside)
    with keyed_randomness(2, "x"):
        assert not torch.equal(torch.rand(3), inside)


def test_streams_of_neighbouring_keys_are_uncorrelated():
    rows = torch.stack([torch.randn(500, generator=keyed_generator(0, k)) for k in range(50)])
    correlations = torch.corrcoef(rows).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 500**0.5
