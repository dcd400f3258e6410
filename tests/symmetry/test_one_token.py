"""An example of one token, in which a softmax and positions hide, is read as one of two."""

import pytest
import torch
from cases import Forward
from modern_networks import attention
from torch import nn

from weightsym import discover, verify


def sizes(sym):
    kinds = [(g.units, g.kind) for g in sym.permutations], [(g.kind, g.size) for g in sym.linear]
    return (*kinds, sym.scaling_dof, sym.sign_dof, sym.dimension)


@pytest.mark.parametrize("rotary", ["half", "interleaved", None])
def test_positions_are_seen_in_an_example_of_one_token(rotary):
    """At position 0 nothing is rotated, so that all matrices would seem to pass."""
    torch.manual_seed(0)
    model = attention(width=4, rotary=rotary)().double().eval()
    short, long = torch.randn(2, 1, 10).double(), torch.randn(2, 5, 10).double()
    sym = discover(model, short)
    assert sizes(sym) == sizes(discover(model, long))
    assert not sym.unchecked
    assert not sym.frozen
    assert verify(model, sym, long) < 1e-10


def heard(self, signal):
    return self.attention(self.frames(signal[:, None]).mT)


@pytest.mark.parametrize("rotary", ["half", None])
def test_a_signal_of_one_frame_is_read_as_one_of_two(rotary):
    torch.manual_seed(0)
    layers = {"frames": nn.Conv1d(1, 10, 8, 8), "attention": attention(width=4, rotary=rotary)()}
    model = Forward(heard, **layers).double().eval()
    one, many = torch.randn(2, 8).double(), torch.randn(2, 40).double()
    sym = discover(model, one)
    assert sizes(sym) == sizes(discover(model, many))
    assert not sym.unchecked
    assert verify(model, sym, many) < 1e-10


def test_a_network_that_takes_one_length_only_stays_unchecked():
    def of_eight(self, signal):
        return heard(self, signal.reshape(len(signal), 8))

    layers = {"frames": nn.Conv1d(1, 10, 8, 8), "attention": attention(width=4, rotary="half")()}
    model = Forward(of_eight, **layers).double().eval()
    assert "two tokens" in discover(model, torch.randn(2, 8).double()).unchecked


def language(self, tokens, mask):
    x = self.embed(tokens)
    scores = self.query(x) @ self.key(x).mT + torch.where(mask > 0, 0.0, -1e9)[:, None]
    return self.last(scores.softmax(-1) @ self.value(x))


def test_tokens_are_numbers_of_words_and_masks_stay_open():
    parts = {n: nn.Linear(6, 4) for n in ("query", "key", "value")}
    model = Forward(language, embed=nn.Embedding(9, 6), last=nn.Linear(4, 2), **parts).double()
    sym = discover(model, torch.tensor([[8], [0]]), torch.ones(2, 1, dtype=torch.long))
    assert not sym.unchecked
    assert ("general", 4) in [(g.kind, g.size) for g in sym.linear]
    # two tokens that are one word: queries and keys are not seen
    same = discover(model, torch.tensor([[1], [1]]), torch.ones(2, 1, dtype=torch.long))
    assert "two tokens" in same.unchecked
