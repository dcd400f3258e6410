"""Rows of zeros beside channels, bags of rows of a table, sizes that depend on the input."""

import pytest
import torch
from torch import nn

from lightning_bnn.symmetry import UnsupportedModel, discover, verify
from tests.cases import Forward

X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).double()


def multihead(zeros=False, bias=False):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(6, 2, add_zero_attn=zeros, add_bias_kv=bias, batch_first=True)
    torch.nn.init.normal_(layer.in_proj_bias)
    forward = lambda s, x: s.layer(x, x, x, need_weights=False)[0]  # noqa: E731
    return Forward(forward, layer=layer).double().eval()


def units(sym):
    return sorted(g.units for g in sym.permutations)


@pytest.mark.parametrize("bias", [False, True])
def test_an_empty_key_leaves_heads_as_they_are_but_for_shifts(bias):
    """Keys of all tokens gain a number that the empty one does not."""
    without, model = multihead(bias=bias), multihead(zeros=True, bias=bias)
    plain, sym = discover(without, X), discover(model, X)
    assert units(sym) == units(plain) == [2, 3, 3, 3, 3]
    assert (sym.scaling_dof, sym.sign_dof) == (12, 12)
    assert [(g.kind, g.size) for g in sym.linear] == [(g.kind, g.size) for g in plain.linear]
    assert not sym.shifts
    assert [g.size for g in plain.shifts] == [6, 6]
    assert not sym.frozen
    assert verify(model, sym, X[:1, :3]) < 1e-10


def test_zeros_among_channels_are_no_channels():
    """Their columns of the next layer are read by nobody, and stay where they are."""

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return self.last(torch.cat([y, y.new_zeros(*y.shape[:-1], 2)], -1))

    model = Forward(forward, first=nn.Linear(6, 4), last=nn.Linear(6, 2)).double()
    sym = discover(model, X)
    assert units(sym) == [4]
    assert verify(model, sym, X[:1]) < 1e-10


@pytest.mark.parametrize(("mode", "mixes"), [("sum", True), ("mean", True), ("max", False)])
def test_bags_of_rows_are_linear_in_channels_unless_they_are_maxima(mode, mixes):
    def forward(self, tokens):
        return self.last(torch.tanh(self.first(self.table(tokens))))

    parts = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 2)}
    model = Forward(forward, table=nn.EmbeddingBag(9, 3, mode=mode), **parts).double()
    tokens = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(0))
    sym = discover(model, tokens)
    assert [(g.kind, g.size) for g in sym.linear] == [("general", 3)] * mixes
    assert not sym.frozen
    assert verify(model, sym, tokens[:2, :3]) < 1e-10


@pytest.mark.bad_input
def test_sizes_that_depend_on_the_input_are_refused_in_a_sentence():
    model = Forward(lambda s, x: s.a(x[x.sum(-1) > 0]), a=nn.Linear(6, 2))
    with pytest.raises(UnsupportedModel, match="depends on the numbers in the input"):
        discover(model, X.float())
