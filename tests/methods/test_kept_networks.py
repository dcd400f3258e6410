"""Networks in memory are the last ones that were kept, in order."""

import copy

import pytest
import torch

from lightning_bnn.methods.kept_networks import InMemory


def member(value):
    return {"w": torch.full((2, 3), float(value)), "b": torch.tensor([value, -value])}


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 5, 20])
def test_the_last_ones_in_order(limit):
    kept = InMemory(limit)
    for count in range(1, 70):
        kept.append(member(count))
        size = count if limit is None else min(count, limit)
        expected = torch.arange(count - size + 1, count + 1)
        assert len(kept) == size
        assert torch.equal(kept.tensors()["w"][:, 0, 0], expected.float())
        assert torch.equal(kept.tensors()["b"][:, 1], -expected)


@pytest.mark.parametrize("at", [2, 5, 6, 7, 11])
def test_a_checkpoint_in_between_changes_nothing(at):
    whole, half = InMemory(5), InMemory(5)
    for count in range(at):
        half.append(member(count))
    state = copy.deepcopy(half.state_dict())
    assert all(len(t) == min(at, 5) for t in state.values())
    again = InMemory(5)
    again.load_state_dict(state)
    for count in range(20):
        whole.append(member(count))
        if count >= at:
            again.append(member(count))
    assert all(torch.equal(t, again.tensors()[n]) for n, t in whole.tensors().items())
