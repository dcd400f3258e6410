"""Norms whose gain or bias is computed from weights, and norms over rows that differ."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_bnn.symmetry import discover, verify
from tests.cases import Forward

X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).double()


def network(norm):
    def forward(self, x):
        return self.last(torch.tanh(norm(self, self.first(x))))

    torch.manual_seed(0)
    model = Forward(forward, first=nn.Linear(5, 6), last=nn.Linear(6, 2))
    model.gain, model.bias = (nn.Parameter(torch.randn(6)) for _ in range(2))
    return model.double().eval()


@pytest.mark.parametrize(
    ("norm", "plain"),
    [
        (
            lambda s, x: F.layer_norm(x, (6,), 1 + s.gain, s.bias),
            lambda s, x: F.layer_norm(x, (6,), s.gain, s.bias),
        ),
        (
            lambda s, x: F.layer_norm(x, (6,), s.gain, 2 * s.bias),
            lambda s, x: F.layer_norm(x, (6,), s.gain, s.bias),
        ),
        (
            lambda s, x: F.rms_norm(x, (6,), s.gain.exp()),
            lambda s, x: F.rms_norm(x, (6,), s.gain),
        ),
        (
            lambda s, x: F.group_norm(x.mT, 2, 2 * s.gain, s.bias).mT,
            lambda s, x: F.group_norm(x.mT, 2, s.gain, s.bias).mT,
        ),
    ],
    ids=["layer norm", "bias", "rms norm", "group norm"],
)
def test_a_computed_gain_moves_with_its_channels(norm, plain):
    model, other = network(norm), network(plain)
    sym, expected = discover(model, X), discover(other, X)
    assert not sym.frozen
    found, known = ([(g.units, g.kind) for g in s.permutations] for s in (sym, expected))
    assert found == known != []
    assert verify(model, sym, X[:1, :2]) < 1e-10


def test_filters_that_a_batch_norm_standardises_move_with_their_gains():
    """As scaled standardisation does: the gain of every filter times a number."""

    def forward(self, x):
        w = self.conv.weight
        rows = F.batch_norm(w.reshape(1, 4, -1), None, None, 2 * self.gain, training=True, eps=1e-6)
        return self.last(torch.relu(F.conv1d(x, rows.reshape_as(w))).mean(-1))

    model = Forward(forward, conv=nn.Conv1d(4, 4, 2), last=nn.Linear(4, 2))
    model.gain = nn.Parameter(torch.rand(4) + 0.5)
    sym = discover(model.double(), X)
    assert not sym.frozen
    assert ([g.units for g in sym.permutations], sym.scaling_dof) == ([4], 4)
    moved = {sym.axes[p.axis].tensor for g in sym.permutations for p in g.placements}
    assert moved == {"gain", "conv.weight", "last.weight"}
    assert verify(model, sym, X[:1]) < 1e-10


def test_the_norm_behind_rows_that_differ_is_shifted():
    """Rows of positions have channels of their own, what a norm makes of them has one bias."""

    def forward(self, x):
        rows = torch.cat([self.token.expand(len(x), -1, -1), self.first(x)], 1) + self.places
        return self.last(torch.tanh(self.second(self.norm(rows))))

    parts = {"first": nn.Linear(5, 6), "norm": nn.LayerNorm(6), "second": nn.Linear(6, 4)}
    model = Forward(forward, last=nn.Linear(4, 2), **parts)
    model.token, model.places = (nn.Parameter(torch.randn(1, n, 6)) for n in (1, 5))
    sym = discover(model.double(), X)
    assert ("norm.bias", 6) in [(g.name, g.size) for g in sym.shifts]
    assert not sym.frozen
    assert verify(model, sym, X[:1]) < 1e-10
    # read at two places by layers of their own, one of them without a bias
    model.function = lambda s, x: forward(s, x) + F.linear(s.norm(s.places), s.second.weight).sum()
    assert ("norm.bias", 6) not in [(g.name, g.size) for g in discover(model, X).shifts]
